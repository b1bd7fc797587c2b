"""Every field of config.json that a family reads, changed alone while the weights stay as they are: the logits move, or
the model is refused by name, or it is known why the field has no effect."""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import VARIANTS
from family_fields import NO_EFFECT, Raw, change, spelling, transformers_reads
from family_tools import EVERYTHING, ROUNDING, TYPES, VOCABULARY, Checkpoints, fields_of
from shard_tools import Client, make_platform, random_ids, scattered_slots

from text_generation_common.errors import ModelError
from text_generation_common.models.config import read_config
from text_generation_common.models.tensors import shapes
from text_generation_server.models import get_model
from text_generation_server.runner import ModelRunner
from text_generation_server.sampling.sampler import Sampler
from text_generation_server.weights.files import SafetensorsFiles

MOVED = 100 * ROUNDING
LONGEST = 256
PROMPTS = (150, 40, 7)
FIELDS = [(model_type, name) for model_type in TYPES for name in fields_of(model_type)]
# Fields whose limits depend on the field: a refusal may name them.
BOUND = {"n_head": {"rotary_dim"}, "num_attention_heads": {"rotary_dim"}}
# What a refusal says, where that is not the field's name.
TOLD = {"model_type": "model type", "quantization_config": "quantized", "compression_config": "quantized"}


class FilesWithout(SafetensorsFiles):
    """The files of a checkpoint without some of their tensors."""

    def __init__(self, folder: Path, left_out: frozenset[str] = frozenset()) -> None:
        super().__init__(folder)
        self._where = {name: file for name, file in self._where.items() if name not in left_out}
        self._shapes = {name: shape for name, shape in self._shapes.items() if name not in left_out}


def logits(path: Path, left_out: frozenset[str] = frozenset()) -> torch.Tensor:
    """Log-probabilities [prompts, V] of the token after each of some prompts. ModelError as `get_model`."""
    platform = make_platform()
    model = get_model(
        FilesWithout(path, left_out), read_config(path), platform, torch.float32, LONGEST, lambda: None
    )  # fmt: skip
    runner = ModelRunner(model, platform, Sampler(platform.kernels, 0.5, 2.0), lambda: None)
    runner.warmup(16, None, len(PROMPTS), None)
    client = Client(runner, scattered_slots(runner))
    chunks = [client.first_chunk(n, random_ids(n, n), parameters=EVERYTHING) for n in PROMPTS]
    output = client.step([], chunks)
    rows = torch.zeros(len(PROMPTS), VOCABULARY).scatter_(
        1, output.top_ids.long().view(-1, VOCABULARY), output.top_logprobs.view(-1, VOCABULARY)
    )
    return rows[torch.tensor([output.request_ids.index(n) for n in PROMPTS])]


@dataclass
class Bench:
    """Changes the configs of checkpoints."""

    checkpoints: Checkpoints
    folder: Path
    before: dict[str, torch.Tensor]

    def raw(self, variant: str) -> Raw:
        raw: Raw = json.loads((self.checkpoints(variant).path / "config.json").read_text())
        return raw

    def write(self, variant: str, raw: Raw) -> Path:
        path = self.folder / str(list(VARIANTS).index(variant))
        if not path.exists():
            path.mkdir()
            (path / "model.safetensors").symlink_to(self.checkpoints(variant).path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(raw))
        return path

    def unchanged(self, variant: str) -> torch.Tensor:
        if variant not in self.before:
            self.before[variant] = logits(self.checkpoints(variant).path)
        return self.before[variant]


@pytest.fixture(scope="module")
def bench(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(checkpoints, tmp_path_factory.mktemp("changed"), {})


@dataclass(frozen=True)
class Outcome:
    """What a change of a field does: kind is moved, refused, same, or little (the logits hardly move)."""

    kind: str
    detail: str
    left_out: int = 0  # tensors that the changed config does not have


def outcome(bench: Bench, variant: str, changed: Raw) -> Outcome:
    path = bench.write(variant, changed)
    left_out = frozenset[str]()
    try:
        config, files = read_config(path), SafetensorsFiles(path)
        expected = shapes(replace(config, names=config.names.as_in(lambda name: files.describe(name) is not None)))
        stored = {name: found.shape for name in expected if (found := files.describe(name)) is not None}
        if stored == expected:
            left_out = frozenset(files.names) - expected.keys()
        after = logits(path, left_out)
    except ModelError as error:
        assert len(str(error).splitlines()) == 1
        return Outcome("refused", str(error))
    moved = (after - bench.unchanged(variant)).abs().max().item()
    kind = "moved" if moved >= MOVED else "same" if moved == 0 else "little"
    return Outcome(kind, f"{moved / ROUNDING:.0f}", len(left_out))


def outcomes(bench: Bench, model_type: str, name: str) -> Iterator[tuple[str, Raw, Outcome]]:
    """What happens when this field of config.json is changed: an item for each variant of the family that can have
    another value."""
    for variant, (family, _) in VARIANTS.items():
        if family == model_type and (changed := change(model_type, name, raw := bench.raw(variant))) not in (None, raw):
            assert changed is not None
            yield variant, changed, outcome(bench, variant, changed)


def refused_by(model_type: str, name: str, message: str) -> str | None:
    """How a refusal names the field: by its name, or by a tensor whose shape or existence depends on it."""
    if "tensor" in message:
        return "by a tensor"
    names = {TOLD.get(name, name), spelling(model_type).get(name, name)} | BOUND.get(name, set())
    return "by name" if any(re.search(rf"\b{word}\b", message) for word in names) else None


def result(bench: Bench, model_type: str, name: str) -> tuple[str, str]:
    """What happens, and how or why, in the variant in which most happens. AssertionError if nothing happens, and no
    reason is known."""
    refused, reasons, others = set[str](), set[str](), []
    for variant, changed, found in outcomes(bench, model_type, name):
        if found.kind == "moved":
            return "moved", found.detail + " †" * bool(found.left_out)
        if found.kind == "refused" and (how := refused_by(model_type, name, found.detail)):
            refused.add(how)
        elif found.kind == "same" and (reason := why_same(bench, model_type, name, variant, changed)):
            reasons.add(reason)
        else:
            others.append((variant, found))
    if refused:
        return "refused", min(refused)
    assert reasons and not others, f"{name} of {model_type}: {others or reasons or 'no variant has it'}"
    return "no effect", "; ".join(sorted(reasons))


def why_same(bench: Bench, model_type: str, name: str, variant: str, changed: Raw) -> str | None:
    """Why this change of the field changes no logit, if a reason is known."""
    known = NO_EFFECT.get(name)
    paths = bench.checkpoints(variant).path, bench.write(variant, changed)
    if known is not None and (not known.families or model_type in known.families):
        before, after = (getattr(read_config(path), known.attribute, None) for path in paths)
        if not known.attribute or before != after:
            return known.reason
    if name == "max_position_embeddings" and any(rope.scaling.kind == "yarn" for rope in read_config(paths[0]).ropes):
        return "with yarn, the longest text follows from the fields of the rope"
    if not transformers_reads(model_type, name):
        return "not a field of this family: transformers does not read it either"
    return None


@pytest.mark.parametrize("model_type", TYPES)
def test_every_field_has_a_change_that_is_tested(bench: Bench, model_type: str) -> None:
    raws = [bench.raw(variant) for variant, (family, _) in VARIANTS.items() if family == model_type]
    fields = fields_of(model_type)
    assert {name for name in fields if all(change(model_type, name, raw) is None for raw in raws)} == set()


@pytest.mark.models
@pytest.mark.parametrize(("model_type", "name"), FIELDS)
def test_a_changed_field_moves_the_logits_or_is_refused(
    bench: Bench, model_type: str, name: str, record_property: Callable[[str, Any], None]
) -> None:
    record_property("field", result(bench, model_type, name))


# Wrong values for a field, by the type of its right values.
WRONG: dict[type, tuple[Any, ...]] = {
    bool: ("yes", 2, [True], math.nan),
    int: ("7", 2.5, -3, 10**30, True, math.nan, ["x"], {}),
    float: ("0.5", -1, 1e30, True, math.nan, math.inf, [0.5]),
    str: (7, "unknown", ["silu"], True),
    list: ("x", 7, ["unknown"], [-1], {}),
    dict: ("x", 7, ["x"]),
}
WHOLE_OR_NOT = {"query_pre_attn_scalar"}  # numbers that are whole in most files
ZERO_IS_RIGHT = {"eos_token_id", "max_window_layers"}
# Fields that are not read at all: their values cannot be wrong.
READ_SOMEWHERE = {"num_key_value_heads", "original_max_position_embeddings", "scale_attn_weights"}
UNREAD = {name for name, known in NO_EFFECT.items() if not known.attribute} - READ_SOMEWHERE  # fmt: skip


def mutants(model_type: str, raw: Raw) -> Iterator[tuple[str, Any, Raw]]:
    """(field, wrong value, config with it)."""
    unread = UNREAD | {name for name, known in NO_EFFECT.items() if model_type in known.families}
    for name in fields_of(model_type):
        if name in unread:
            continue
        if (changed := change(model_type, name, raw)) is None or not transformers_reads(model_type, name):
            continue
        right = changed.get(name)
        zero = (0,) if type(right) in (int, float) and name not in ZERO_IS_RIGHT else ()
        kind = float if name in WHOLE_OR_NOT else type(right)
        for value in WRONG.get(kind, ()) + zero:
            yield name, value, changed | {name: value}


@pytest.mark.parametrize("model_type", TYPES)
def test_wrong_values_are_refused_in_one_line_that_names_the_field(
    bench: Bench, model_type: str, record_property: Callable[[str, Any], None]
) -> None:
    refused, accepted = set[str](), set[str]()  # some fields are read in some variants only
    for variant in (variant for variant, (family, _) in VARIANTS.items() if family == model_type):
        for name, value, mutant in mutants(model_type, bench.raw(variant)):
            try:
                read_config(bench.write(variant, mutant))
            except ModelError as error:
                told = str(error)
                assert len(told.splitlines()) == 1 and refused_by(model_type, name, told) == "by name", told
                refused.add(f"{name}: {value!r}")
            else:
                accepted.add(f"{name}: {value!r}")
        if accepted <= refused:
            break
    assert accepted - refused == set() and len(refused) >= 20
    record_property("mutants", len(refused))
