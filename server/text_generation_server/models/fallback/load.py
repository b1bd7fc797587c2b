"""Makes a `FallbackModel` of the weights files, and checks what can be checked before it serves.

transformers computes an RMS norm by seven operations of torch, four times in a layer of some models: our norms take
their places where a trial shows that they compute the same.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from text_generation_common.errors import ModelError
from text_generation_common.models.tensors import LinearSize
from text_generation_common.quantized.layout import DENSE_TYPES, PASSED_OVER
from text_generation_common.quantized.tensors.splits import on_tensors
from text_generation_common.weights.headers import BUFFERS
from text_generation_server.kernels.interface import Kernels
from text_generation_server.layers.linear import make_linear
from text_generation_server.layers.weights import WeightFormat, dense
from text_generation_server.models.fallback.config import FallbackConfig, check_ropes
from text_generation_server.models.fallback.model import (
    FallbackModel,
    FallbackSizes,
    ForeignHead,
    GivenHidden,
    KernelLinear,
    LinearOfCodes,
)
from text_generation_server.models.fallback.probe import NAME, Probe, attending, probe, refused, register
from text_generation_server.models.loading import Files, PackedLayers
from text_generation_server.platforms import Platform

logger = logging.getLogger("text_generation_server")


def load_fallback(
    files: Files,
    config: FallbackConfig,
    platform: Platform,
    dtype: torch.dtype,
    max_total_tokens: int,
    on_tensor: Callable[[], None],
    weight_format: WeightFormat,
    packed: PackedLayers | None,
) -> FallbackModel:
    """Loads the model with transformers. Called for one rank alone. `on_tensor` is called for each tensor that is
    read, and each linear layer that is made. ModelError if files and config.json do not fit together, or if the model
    would be computed wrongly."""
    check_ropes(config, max_total_tokens)
    model = _loaded(files, config, dtype, platform.device, on_tensor=on_tensor, packed=packed)
    name, model_type = model.base_model_prefix, config.model_type
    base = getattr(model, name, None)
    if base is None or not isinstance(model.get_output_embeddings(), nn.Linear | LinearOfCodes):
        raise refused(model_type, "the model cannot be divided into a base and a linear head")
    try:
        with torch.inference_mode():
            _replace_linears(model, platform, packed, dtype=dtype, weight_format=weight_format, on_linear=on_tensor)
            replace_norms(model, platform.kernels)
            rules, output = probe(model_type, base, config.num_layers, max_total_tokens, platform.device)
            hidden_TH = output.last_hidden_state[0]
            whole = _whole_logits(model, len(hidden_TH), platform.device)
            given = GivenHidden(type(output))
            setattr(model, name, given)  # the model loses its base
            head = ForeignHead(model, given)
            if (apart := head(hidden_TH)).shape != whole.shape or not torch.allclose(apart, whole.float(), 1e-2, 1e-2):
                raise refused(model_type, "its head cannot be computed apart from its base")
    except ModelError:
        raise
    except Exception as error:  # the code of an untried model may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise refused(model_type, f"a trial before serving failed: {reason}") from error
    if apart.shape[1] != config.vocab_size:
        raise refused(model_type, f"its head makes {apart.shape[1]} logits for {config.vocab_size} tokens")
    logger.info("loaded by transformers, %.1f MiB read", files.bytes_read / 2**20)
    return FallbackModel(base, head, rules, FallbackSizes(config.vocab_size, max_total_tokens, dtype), platform)


class StoredTensor:
    """A tensor of the weights files, for transformers: it is read when it is asked for its numbers."""

    def __init__(self, files: Files, name: str, on_tensor: Callable[[], None]) -> None:
        self._files = files
        self._name = name
        self._on_tensor = on_tensor

    def __getitem__(self, _: Any) -> Tensor:
        self._on_tensor()
        return self._files.get(self._name)


def _loaded(
    files: Files, config: FallbackConfig, dtype: torch.dtype, device: torch.device, on_tensor: Callable[[], None],
    packed: PackedLayers | None,
) -> Any:  # fmt: skip
    """transformers' model, from tensors that we read: transformers opens no file, and asks no network."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    register()
    in_files = _text_names(files.names) if config.is_within else {name: name for name in files.names}
    layers, of_codes = ({}, set()) if packed is None else _layers_of_codes(config, files, in_files, packed)
    stored = {name: StoredTensor(files, own, on_tensor) for name, own in in_files.items() if own not in of_codes}
    # Experts one after the other read the weights of those alone that were chosen. GPUs have a kernel for all of them.
    experts = {"experts_implementation": "eager"} if device.type == "cpu" else {}
    try:
        model, info = _with_codes(config.model_class, layers).from_pretrained(
            None, config=config.values, state_dict=stored, dtype=dtype, attn_implementation=NAME,
            local_files_only=True, output_loading_info=True, **experts,
        )  # fmt: skip
    except Exception as error:  # each model has checks of its own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"transformers cannot load the weights as a {config.model_type}: {reason}") from error
    for what, keys in (("lack", info["missing_keys"]), ("have a strange", info["unexpected_keys"])):
        names = [str(key) for key in sorted(keys) if what == "lack" or not BUFFERS.search(str(key))]
        if names:
            raise ModelError(
                f"the weights files {what} tensor {ascii(names[0])[1:-1]}: do the weights belong to this config.json?"
            )
    for option in ("output_attentions", "output_hidden_states", "output_router_logits"):
        if getattr(model.config, option, False):
            setattr(model.config, option, False)
    model.config.return_dict = True
    return model.eval().requires_grad_(False).to(device)


def _layers_of_codes(
    config: FallbackConfig, files: Files, in_files: Mapping[str, str], packed: PackedLayers
) -> tuple[dict[str, str], set[str]]:
    """The linear layers of which the files have codes, by transformers' names, with their names in the files; and all
    tensors that belong to codes. ModelError if another layer is quantized."""
    with torch.device("meta"):
        model = config.model_class(deepcopy(config.values))
    names = {own.rpartition(".")[0]: name.rpartition(".")[0] for own, name in in_files.items()}
    layers, of_codes = {}, {name for name in files.names if name.endswith(PASSED_OVER)}
    for own, module in model.named_modules():
        if type(module) is nn.Linear and own in names:
            size = LinearSize(module.out_features, module.in_features, module.bias is not None)
            if (found := packed.tensors(names[own], size)) is not None:
                layers[own] = names[own]
                of_codes |= found.keys()
    for name in in_files.values():
        stored = files.describe(name)
        if name not in of_codes and stored is not None and stored.type not in DENSE_TYPES:
            raise ModelError(
                f"the tensor {ascii(name)[1:-1]} is stored as {ascii(stored.type)[1:-1]}, and of a model that"
                " transformers computes, only linear layers outside of experts may be quantized: choose a checkpoint"
                " whose other weights are not"
            )
    if model.get_output_embeddings() in [model.get_submodule(own) for own in layers]:
        config.values.tie_word_embeddings = False
    return layers, of_codes


def _with_codes(model_class: Any, layers: Mapping[str, str]) -> Any:
    """The class of a model in which these linear layers have no weights, so that transformers makes none."""
    if not layers:
        return model_class

    def init(self: Any, *args: Any, **options: Any) -> None:
        model_class.__init__(self, *args, **options)
        for own, layer in layers.items():
            self.set_submodule(own, LinearOfCodes(self.get_submodule(own), layer))

    return type(model_class.__name__, (model_class,), {"__init__": init, "__module__": model_class.__module__})


def _text_names(names: Collection[str]) -> dict[str, str]:
    """The tensors of the text model in a model of texts and images, as transformers has written it until version 4.51
    and since: their names in the text model alone, and in the files."""
    found = {}
    for name in names:
        if name.startswith("language_model."):
            found[name.removeprefix("language_model.")] = name
        elif name.startswith("model.language_model."):
            found["model." + name.removeprefix("model.language_model.")] = name
        elif name.startswith("lm_head."):
            found[name] = name
    logger.info("the text model alone is loaded: of %d tensors in the files, %d", len(names), len(found))
    return found


def _replace_linears(
    model: Any, platform: Platform, packed: PackedLayers | None, *, dtype: torch.dtype, weight_format: WeightFormat,
    on_linear: Callable[[], None],
) -> None:  # fmt: skip
    """Puts our linear layers in the places of transformers'. The head keeps the form of the files, and has logits in
    float32."""
    head = model.get_output_embeddings()
    found = [
        (parent, name, module)
        for parent in list(model.modules())
        for name, module in parent.named_children()
        if type(module) in (nn.Linear, LinearOfCodes)
    ]
    made: dict[nn.Module, KernelLinear] = {}
    for parent, name, linear in found:
        if linear not in made:
            bias = None if linear.bias is None else linear.bias.data
            form, out = (dense, torch.float32) if linear is head else (weight_format, None)
            if isinstance(linear, LinearOfCodes):
                assert packed is not None
                x_type, weight = dtype, packed.weight(linear.layer)
                assert weight is not None
                weight = on_tensors(weight, lambda tensor: tensor.to(platform.device))
            else:
                x_type, weight = linear.weight.dtype, form(linear.weight.data)
            ours = make_linear(platform.kernels, weight, bias, x_type=x_type, y_type=out)
            made[linear] = KernelLinear(ours, x_type)
            on_linear()
        setattr(parent, name, made[linear])


def _whole_logits(model: Any, tokens: int, device: torch.device) -> Tensor:
    """The logits [T, V] of tokens 0 at positions from 0, which attend to nothing, by the whole model."""
    ids = torch.zeros((1, tokens), dtype=torch.long, device=device)
    with attending(Probe()):
        logits: Tensor = model(
            input_ids=ids, position_ids=torch.arange(tokens, device=device)[None], use_cache=False
        ).logits
    return logits[0]


EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps")  # names that norms have for the number added to the mean
# Factors of the rows of the trial: eps matters in small rows, and not in large ones.
SIZES = (1e-3, 1e-2, 1.0, 30.0)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}  # relative to each number


class KernelNorm(nn.Module):
    """An RMS norm of ours in the place of one of transformers'."""

    def __init__(self, kernels: Kernels, theirs: nn.Module, weight_D: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = theirs.weight
        self._kernels = kernels
        self._theirs = theirs
        self._weight_D = weight_D
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:
            result: Tensor = self._theirs(x)
            return result
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._kernels.rms_norm(rows, self._weight_D, self._eps).view(x.shape)


def replace_norms(model: Any, kernels: Kernels) -> None:
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if "RMSNorm" in type(module).__name__ and (ours := _like(module, kernels)) is not None:
                setattr(parent, name, ours)


def _like(theirs: nn.Module, kernels: Kernels) -> KernelNorm | None:
    """A norm of ours that computes what `theirs` does, or None."""
    parameters = dict(theirs.named_parameters())
    eps = next((value for name in EPS if isinstance(value := getattr(theirs, name, None), float)), None)
    if list(parameters) != ["weight"] or (weight := parameters["weight"].data).dim() != 1 or eps is None:
        return None
    rows = torch.randn(len(SIZES), len(weight), generator=torch.Generator().manual_seed(0))
    rows = (rows * torch.tensor(SIZES).unsqueeze(1)).to(weight)
    expected = theirs(rows)
    best, least = None, TOLERANCE.get(weight.dtype, 0.0)
    # The weight as it is; multiplied before the result is rounded; and the norms that have the weight minus 1.
    for candidate in (weight, weight.float(), weight.float() + 1):
        ours = KernelNorm(kernels, theirs, candidate, eps)
        result = ours(rows)
        if result.shape != expected.shape or result.dtype != expected.dtype:
            continue
        error = float(((result - expected).abs() / expected.abs().clamp(min=1e-6)).float().max())
        if error < least:
            best, least = ours, error
    return best
