"""Lays out on the device what a step's rows ask of single tokens. A step whose rows ask for nothing sends nothing."""

from collections.abc import Sequence

import numpy as np
import torch

from text_generation_server.device.transfers import send
from text_generation_server.kernels.interface import Allowed, Bans, Bias
from text_generation_server.step.token_lists import TokenLists

Lists = Sequence[TokenLists | None]  # the lists of each row


def bias_of(lists: Lists, device: torch.device) -> Bias | None:
    widest = max((len(own.bias_tokens) for own in lists if own), default=0)
    if not widest:
        return None
    tokens = np.full((len(lists), widest), -1, np.int32)
    values = np.zeros((len(lists), widest), np.float32)
    for i, own in enumerate(lists):
        if own:
            tokens[i, : len(own.bias_tokens)], values[i, : len(own.bias_values)] = own.bias_tokens, own.bias_values
    there = send([tokens.ravel(), values.view(np.int32).ravel()], device)
    return Bias(there[0].view(tokens.shape), there[1].view(torch.float32).view(tokens.shape))


def allowed_of(lists: Lists, device: torch.device) -> Allowed | None:
    asking = [(i, own.allowed) for i, own in enumerate(lists) if own and len(own.allowed)]
    if not asking:
        return None
    tokens = np.full((len(asking), max(len(allowed) for _, allowed in asking)), -1, np.int32)
    for a, (_, allowed) in enumerate(asking):
        tokens[a, : len(allowed)] = allowed
    rows, listed = send([np.array([i for i, _ in asking], np.int32), tokens.ravel()], device)
    return Allowed(rows, listed.view(tokens.shape))


def bans_of(lists: Lists, device: torch.device) -> Bans | None:
    asking = [(i, own) for i, own in enumerate(lists) if own and len(own.banned)]
    if not asking:
        return None
    rows = np.repeat(np.array([i for i, _ in asking], np.int32), [len(own.banned) for _, own in asking])
    columns = [(own.banned, own.until, own.sizes, own.before) for _, own in asking]
    tokens, until, sizes, before = map(np.concatenate, zip(*columns, strict=True))
    offsets = np.append(0, np.cumsum(sizes)).astype(np.int32)
    return Bans(*send([rows, tokens, until, offsets, before], device))
