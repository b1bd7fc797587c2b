"""Settings and tensors with random changes are read, or refused in one line. `make fuzz-formats` tries 20,000."""

import random
import sys

import torch
from golden_layers import GOLDEN, TYPES, Case
from test_formulas import awq, gptq

from text_generation_common.errors import WeightsError
from text_generation_common.quantized.tensors.matrix import exact_weight
from text_generation_common.quantized.tensors.splits import inputs_of, joined

CASES = [*GOLDEN.values(), gptq(4, 32, act_order=True), gptq(3, 64), awq(32)]
HOSTILE = (
    *(None, True, False, 0, -1, 1, 3, 4, 5, 8, 16, 32, 127, 10**9, 2**63, -(2**70), 0.5, float("nan")),
    *("", "gptq", "(a+)+$", "re:(", [], {}, [128, 128], [0, -1], ["re:.*"], ["lm_head"]),
    *({"l": {"bits": 8}}, {"-:l": {}}, {"weights": 4}),
)
NUMBERS = (0, 1, -1, 7, 127, 255, 2**31 - 1, -(2**31), float("nan"), float("inf"), -1e30)


def changed_settings(rng, settings):
    """A copy in which one value at any depth is another, or is missing."""
    copy = {
        key: changed_settings(rng, value) if isinstance(value, dict) and rng.random() < 0.7 else value
        for key, value in settings.items()
    }
    if copy and rng.random() < 0.5:
        name = rng.choice([*copy, "group_size", "bits", "dynamic", "extra_config", "weight_block_size", "ignore"])
        copy[name] = rng.choice(HOSTILE)
        if rng.random() < 0.1:
            del copy[name]
    return copy


def changed_tensor(rng, tensor):
    match rng.randrange(5):
        case 0:
            return tensor.flatten()[: rng.randrange(tensor.numel() + 1)]
        case 1:
            return tensor.t().contiguous() if tensor.dim() == 2 else tensor.unsqueeze(0)
        case 2:
            return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8) if tensor.dim() else tensor
        case 3:
            return tensor.float().to(rng.choice([*TYPES]))
        case _:
            copy = tensor.clone()
            if copy.numel():
                copy.view(-1)[rng.randrange(copy.numel())] = torch.tensor(float(rng.choice(NUMBERS))).to(copy.dtype)
            return copy


def mutant(rng):
    case = rng.choice(CASES)
    settings = changed_settings(rng, case.settings) if rng.random() < 0.4 else case.settings
    tensors, shape = dict(case.tensors), list(case.shape)
    for _ in range(rng.randrange(3)):
        name = rng.choice([*tensors])
        match rng.randrange(8):
            case 0:
                del tensors[name]
                break
            case 1:
                tensors[rng.choice([*case.tensors, *(f"l{end}" for end in (".weight", ".qweight", ".g_idx"))])] = (
                    tensors[name]
                )
            case _:
                tensors[name] = changed_tensor(rng, tensors[name])
    if rng.random() < 0.1:
        shape[rng.randrange(len(shape))] = rng.choice((1, 2, 16, 31, 64, 128, 300))
    return Case(settings, tuple(shape), tensors, case.matrix)


def check_parts(rng, value, shape):
    """The value's matrix has the shape; a random part of its inputs, joined with itself, is a part of the matrix."""
    whole = exact_weight(value).nan_to_num()
    assert whole.shape == torch.Size(shape)
    start = 8 * rng.randrange(-(-shape[-1] // 8))
    stop = rng.randrange(start, shape[-1]) // 2 * 2 + 2
    part = inputs_of(value, range(start, min(stop, shape[-1])))
    both = torch.cat([exact_weight(weight).nan_to_num() for weight in joined([part, part])], dim=-2)
    assert torch.equal(both, torch.cat([whole[..., start:stop]] * 2, dim=-2))


def check(count, seed):
    """Numbers of layers that were read and that were refused."""
    rng, read, refused = random.Random(seed), 0, 0
    for _ in range(count):
        case = mutant(rng)
        try:
            if case.scheme() is not None:
                check_parts(rng, case.read(), case.shape)
                read += 1
        except WeightsError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 500, error
    return read, refused


def test_changed_layers_are_read_or_refused_in_one_line():
    read, refused = check(600, seed=35)
    assert read > 50 and refused > 200


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(check(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1))
