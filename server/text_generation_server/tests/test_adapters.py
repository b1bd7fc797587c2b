"""LoRA adapters beside each other in one step, compared with transformers' own model that each is merged into."""

import copy
import json
from pathlib import Path

import pytest
import torch
from adapter_tools import (
    asking,
    load_on_one_rank_alone,
    merged,
    runner_of,
    sizes_of,
    some,
    texts_of,
    write_adapter,
)
from collective_tasks import Ranks
from family_tools import EVERYTHING, ROUNDING, VOCABULARY, Checkpoints, quick_and_long, teacher_forced
from gguf_fixtures import FIXTURES, GOLDENS, make_gguf, make_original
from safetensors.torch import load_file, save_file
from shard_tools import ALONE, SAMPLED, Client, fresh_client, make_runner, random_ids, scattered_slots

from text_generation_common.adapters.content import digest_of
from text_generation_common.adapters.listed import ListedAdapter, identified
from text_generation_common.errors import NOT_FINITE, ModelError
from text_generation_common.models.config import read_config
from text_generation_common.models.tensors import LinearSize
from text_generation_common.quantized.tensors.matrix import exact_weight
from text_generation_server.device.kept import KeptMemory
from text_generation_server.errors import StepError
from text_generation_server.kernels.cpu import load_kernels
from text_generation_server.kernels.cpu.backend import CpuKernels
from text_generation_server.kernels.cpu.programs import DecodePrograms
from text_generation_server.layers.weights import WeightFormat, int4, int8
from text_generation_server.models.adapters import AdapterBank, load_adapters
from text_generation_server.runner import ModelRunner
from text_generation_server.step.rows import PromptChunk

NEW = 8
WRITTEN = json.loads(GOLDENS.read_text())
# A family of each order of rows: plain, turned in pairs, in groups, fused, [inputs, outputs], with constant factors.
QUICK = (
    "qwen2", "gptj", "gpt_neox", "falcon, as 40B", "phi3", "gpt2", "gemma2", "granite", "glm", "qwen2_moe", "bloom",
)  # fmt: skip


def adapted_runner(model: Path, folder: Path, dtype: torch.dtype = torch.float32) -> tuple[ModelRunner, list[str]]:
    """A runner with two adapters of all layers and one of some. Returns their digests, too."""
    sizes = sizes_of(model)
    listed = [
        write_adapter(folder / "a", sizes, 4, seed=1, use_rslora=True),
        write_adapter(folder / "b", sizes, 16, seed=2),
        write_adapter(folder / "c", some(sizes, 2), 3, seed=3, rank_pattern={}, alpha_pattern={}),
    ]
    bank = load_adapters(listed, read_config(model), 64)
    kernels = load_kernels()
    graphs = {}
    if isinstance(kernels, CpuKernels):
        graphs = {name: DecodePrograms(kernels.library, kernels.threads) for name in ("graphs", "adapter_graphs")}
    runner = make_runner(model, dtype, kernels=kernels, adapters=bank, **graphs)
    runner.warmup(512, None, 16, 2048)
    return runner, [digest_of(Path(adapter.path)) for adapter in listed]


@pytest.mark.parametrize("variant", quick_and_long(QUICK))
def test_rows_of_one_step_have_the_logits_of_models_that_their_adapters_are_merged_into(
    checkpoints: Checkpoints, variant: str, tmp_path: Path
) -> None:
    made = checkpoints(variant)
    runner, digests = adapted_runner(made.path, tmp_path)
    client = fresh_client(runner)
    prompts = [random_ids(length, seed=length) for length in (9, 33, 40, 17)]
    asked = [*digests, ""]
    outputs = [
        client.step(
            [], [asking(client, i, prompt, asked[i], parameters=EVERYTHING) for i, prompt in enumerate(prompts)]
        )
    ]
    outputs += [client.step([0, 1, 2, 3]) for _ in range(NEW - 1)]
    models = [merged(made.model, tmp_path / name, made.path) for name in "abc"] + [made.model]
    for number, model in enumerate(models):
        expected = teacher_forced(model, prompts[number], client.tokens[number])
        for step, output in enumerate(outputs):
            at = output.request_ids.index(number) * VOCABULARY
            ids = output.top_ids.view(-1)[at : at + VOCABULARY].long()
            found = torch.zeros(VOCABULARY).scatter_(0, ids, output.top_logprobs.view(-1)[at : at + VOCABULARY])
            assert (found - expected[step]).abs().max() <= 2 * ROUNDING, (number, step)
        others = [other for other in models if other is not model]
        assert all(
            (teacher_forced(o, prompts[number], client.tokens[number]) - expected).abs().max() > 0.1 for o in others
        )


@pytest.mark.parametrize(
    ("variant", "dtype"), [("qwen3", torch.float32), ("qwen3", torch.bfloat16), ("qwen2_moe", torch.float32)]
)
def test_other_rows_chunks_and_resuming_change_no_bit_of_a_row_with_an_adapter(
    checkpoints: Checkpoints, tmp_path: Path, variant: str, dtype: torch.dtype
) -> None:
    path = checkpoints(variant).path
    runner, digests = adapted_runner(path, tmp_path, dtype)
    asked = [*digests, "", digests[0]]
    prompts = [random_ids(length, seed=length) for length in (5, 23, 50, 7, 31)]

    def alone(number: int, runner: ModelRunner = runner) -> tuple[list[int], list[float]]:
        client = fresh_client(runner)
        client.step([], [asking(client, number, prompts[number], asked[number], parameters=SAMPLED)])
        for _ in range(NEW - 1):
            client.step([number])
        return client.tokens[number], client.logprobs[number]

    single = [alone(number) for number in range(5)]
    runner.clear(None)
    client = Client(runner, scattered_slots(runner, seed=1))
    client.step([], [asking(client, i, prompts[i], asked[i], parameters=SAMPLED) for i in (0, 1)])
    client.step([0, 1], [asking(client, 2, prompts[2], asked[2], end=20, parameters=SAMPLED)])
    client.step([0], [PromptChunk(2, 20, 50, True), asking(client, 3, prompts[3], asked[3], parameters=SAMPLED)])
    # Another shard has made the first three tokens.
    history = torch.cat([prompts[4], torch.tensor(single[4][0][:3])])
    client.step([0, 1, 2, 3], [asking(client, 4, history, asked[4], prompt_length=31, parameters=SAMPLED)])
    while waiting := [i for i in range(5) if len(client.tokens[i]) < NEW - 3 * (i == 4)]:
        client.step(waiting)
    for number, (tokens, logprobs) in enumerate(single):
        first = 3 * (number == 4)
        assert (client.tokens[number], client.logprobs[number]) == (tokens[first:], logprobs[first:])
    # A row without an adapter has the bits of a server without adapters.
    plain = make_runner(path, dtype, kernels=runner._kernels)
    plain.warmup(512, None, 16, 2048)
    assert alone(3, plain) == single[3]


def test_what_adapters_add_to_experts_is_part_of_a_program(checkpoints: Checkpoints, tmp_path: Path) -> None:
    made = checkpoints("qwen2_moe", calm=True)
    sizes, prompt = sizes_of(made.path), random_ids(21)
    adapter = write_adapter(tmp_path / "one", sizes, 8, seed=1)
    if (kernels := load_kernels()) is None or not kernels.library.has("gemm"):
        pytest.skip("needs compiled products of bfloat16")
    programs = DecodePrograms(kernels.library, kernels.threads)
    texts = []
    for graphs in ({"adapter_graphs": programs}, {}):
        runner, (digest,) = runner_of(made.path, [adapter], dtype=torch.bfloat16, kernels=kernels, **graphs)
        texts.append(greedy(runner, prompt, digest))
    assert texts[0] == texts[1] != greedy(runner, prompt, "")
    assert set(programs._programs) == {1}


@pytest.mark.parametrize("weight_format", [int8, int4])
def test_an_adapter_adds_to_the_products_of_a_quantized_base(
    checkpoints: Checkpoints, tmp_path: Path, weight_format: WeightFormat
) -> None:
    made, (sizes, adapter) = checkpoints("qwen3"), one_adapter(checkpoints("qwen3").path, tmp_path)
    bank = load_adapters([adapter], read_config(made.path), 64)
    runner = make_runner(made.path, weight_format=weight_format, adapters=bank)
    runner.warmup(512, None, 16, 2048)
    client, prompt, digest = fresh_client(runner), random_ids(21), digest_of(Path(adapter.path))
    outputs = [client.step([], [asking(client, 0, prompt, digest, parameters=EVERYTHING)])]
    outputs += [client.step([0]) for _ in range(NEW - 1)]
    model = copy.deepcopy(made.model)
    with torch.no_grad():
        for name in sizes:
            weight = model.get_submodule(name).weight
            weight.copy_(exact_weight(weight_format(weight.data)))
    expected = teacher_forced(merged(model, tmp_path / "one", made.path), prompt, client.tokens[0])
    for step, output in enumerate(outputs):
        found = torch.zeros(VOCABULARY).scatter_(0, output.top_ids.view(-1).long(), output.top_logprobs.view(-1))
        assert (found - expected[step]).abs().max() <= 2 * ROUNDING


def one_adapter(model: Path, folder: Path) -> tuple[dict[str, LinearSize], ListedAdapter]:
    sizes = sizes_of(model)
    return sizes, write_adapter(folder / "one", sizes, 8, seed=1)


def test_an_adapter_with_a_nan_fails_its_own_rows_only(checkpoints: Checkpoints, tmp_path: Path) -> None:
    path, prompts = checkpoints("qwen3").path, [random_ids(length, seed=length) for length in (9, 33, 17)]
    listed = [write_adapter(tmp_path / name, sizes_of(path), 4, seed=number) for number, name in enumerate("ab")]
    file = tmp_path / "b/adapter_model.safetensors"
    tensors = load_file(file)
    next(tensor for name, tensor in tensors.items() if "layers.1" in name)[0, 0] = float("nan")
    save_file(tensors, file)
    runner, digests = runner_of(path, listed)
    asked = [digests[0], digests[1], ""]

    def text(numbers: list[int]) -> Client:
        client = fresh_client(runner)
        first = client.step([], [asking(client, i, prompts[i], asked[i]) for i in numbers])
        assert first.failures == ({1: NOT_FINITE} if 1 in numbers else {})
        for _ in range(3):
            client.step([i for i in numbers if i != 1])
        return client

    crowd = text([0, 1, 2])
    for number in (0, 2):
        alone = text([number])
        assert (alone.tokens[number], alone.logprobs[number]) == (crowd.tokens[number], crowd.logprobs[number])


def test_an_adapter_that_the_shard_lacks_is_refused_before_anything_changes(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    runner, _ = adapted_runner(checkpoints("qwen3").path, tmp_path)
    client = fresh_client(runner)
    with pytest.raises(StepError, match="request 1: this shard has no adapter 'abc'"):
        client.step([], [asking(client, 1, random_ids(5), "abc")])
    assert not runner.num_rows


def greedy(runner: ModelRunner, prompt: torch.Tensor, adapter: str) -> tuple[list[int], list[float]]:
    client = fresh_client(runner)
    client.step([], [asking(client, 0, prompt, adapter)])
    for _ in range(NEW - 1):
        client.step([0])
    return client.tokens[0], client.logprobs[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_that_is_loaded_later_has_the_bits_that_it_has_from_the_start(
    checkpoints: Checkpoints, tmp_path: Path, dtype: torch.dtype
) -> None:
    path, prompt = checkpoints("qwen3").path, random_ids(21)
    sizes = sizes_of(path)
    listed = [write_adapter(tmp_path / name, sizes, 3 + seed, seed=seed) for seed, name in enumerate("abc")]
    nothing = write_adapter(tmp_path / "nothing", sizes_of(path), 5, gain=0.0)
    whole, (*digests, neutral) = runner_of(path, [*listed, nothing], dtype=dtype)
    assert greedy(whole, prompt, neutral) == greedy(whole, prompt, ""), "second matrices of zeros change no bit"
    bank = load_adapters(listed, read_config(path), 64, count=1, in_host=2, kept=KeptMemory())
    runner = make_runner(path, dtype, adapters=bank)
    runner.warmup(256, None, 16, 1024)
    assert bank.slots == {digests[0]: 0}
    for digest in (digests[0], digests[2], digests[1], digests[0], digests[2]):
        with torch.inference_mode():
            assert runner.load_adapter(0, digest) == ""
        bank.slots.clear()  # as in a process that is forked from this one's template
        bank.take_over()
        assert bank.slots == {digest: 0} and bank.in_slots == [digest]
        assert greedy(runner, prompt, digest) == greedy(whole, prompt, digest)
    assert greedy(runner, prompt, "") == greedy(whole, prompt, "")
    bank.forget()
    bank.take_over()
    assert bank.in_slots == [""]
    assert greedy(runner, prompt, bank.any_slot)[0] == greedy(whole, prompt, "")[0]


def test_files_that_have_changed_are_not_loaded_and_the_slot_keeps_its_adapter(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    path = checkpoints("qwen3").path
    listed = [write_adapter(tmp_path / name, sizes_of(path), 4, seed=seed) for seed, name in enumerate("ab")]
    digests = [digest_of(Path(adapter.path)) for adapter in listed]
    bank = load_adapters(listed, read_config(path), 64, count=1)
    runner = make_runner(path, adapters=bank)
    runner.warmup(256, None, 16, 1024)
    file = tmp_path / "b/adapter_model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"\x00")
    assert "have changed since they were checked" in runner.load_adapter(0, digests[1])
    file.unlink()
    assert "cannot be read: No such file or directory" in runner.load_adapter(0, digests[1])
    assert bank.slots == {digests[0]: 0}
    file.write_bytes(content)
    assert runner.load_adapter(0, digests[1]) == "" and bank.slots == {digests[1]: 0}


@pytest.mark.parametrize("count", [64, 2])
def test_shards_start_again_without_adapters_whose_files_were_removed_or_changed(
    checkpoints: Checkpoints, tmp_path: Path, count: int
) -> None:
    path, prompt = checkpoints("qwen3").path, random_ids(21)
    listed = [identified(write_adapter(tmp_path / name, sizes_of(path), 4, seed=i)) for i, name in enumerate("abc")]
    whole, digests = runner_of(path, listed)
    text = greedy(whole, prompt, digests[2])
    kept, changed = tmp_path / "kept", tmp_path / "b/adapter_config.json"
    (tmp_path / "a").rename(kept)
    fields = changed.read_text()
    changed.write_text(fields.replace('"r": 4', '"r": 5'))  # which does not fit the matrices
    bank = load_adapters(listed, read_config(path), 64, count=count)
    assert list(bank.known) == digests and bank.in_slots == (["", "", digests[2]] if count == 64 else ["", ""])
    runner = make_runner(path, adapters=bank)
    runner.warmup(256, None, 16, 1024)
    for digest, name in zip(digests, "ab", strict=False):
        refusal = bank.prepare(digest)
        assert refusal.startswith(f"--lora-adapters {name}: ") or f"/{name}/adapter_config.json cannot be" in refusal
    if count == 2:
        assert runner.load_adapter(1, digests[2]) == ""
    assert greedy(runner, prompt, digests[2]) == text
    kept.rename(tmp_path / "a")
    changed.write_text(fields)
    if count == 64:  # the next start of the shards finds them
        assert "did not find its files" in runner.load_adapter(0, digests[0]) and bank.slots == {digests[2]: 2}
    else:
        assert runner.load_adapter(0, digests[0]) == ""
        assert greedy(runner, prompt, digests[0]) == greedy(whole, prompt, digests[0])
    with pytest.raises(ModelError, match="at most 3 is served"):
        load_adapters(listed, read_config(path), 3)


def test_an_adapter_that_has_moved_is_read_where_it_is_now(checkpoints: Checkpoints, tmp_path: Path) -> None:
    path, folder = checkpoints("qwen3").path, tmp_path / "allowed"
    own, guest = (
        identified(write_adapter(folder / name, sizes_of(path), 4, seed=i)) for i, name in enumerate(("own", "guest"))
    )
    bank = visited_bank(path, folder, [own])
    runner = make_runner(path, adapters=bank)
    runner.warmup(256, None, 16, 1024)
    assert bank.prepare(guest.revision, guest.path) == ""
    for number, (adapter, name) in enumerate(((own, "own"), (guest, "guest"))):
        (folder / name).rename(folder / f"{name}-moved")
        bank._prepared.clear()
        assert "cannot be read" in bank.prepare(adapter.revision, adapter.path)
        assert bank.prepare(adapter.revision, str(folder / f"{name}-moved")) == ""
        bank._prepared.clear()  # as when others have taken its place
        assert runner.load_adapter(number, adapter.revision) == ""
    (folder / "guest-moved").rename(folder / "again")
    assert bank.prepare(guest.revision, str(folder / "again")) == ""  # without reading it
    bank._prepared.clear()
    assert bank.prepare(guest.revision) == ""


def test_all_ranks_load_an_adapter_or_none(ranks: Ranks, checkpoints: Checkpoints, tmp_path: Path) -> None:
    path = checkpoints("qwen3").path
    listed = [write_adapter(tmp_path / name, sizes_of(path), 4, seed=seed) for seed, name in enumerate("ab")]
    found = ranks.run(2, load_on_one_rank_alone, path, listed)
    assert "cannot be read" in found[1][0] and "another rank cannot load" in found[0][0]
    assert [(slots, last) for _, slots, last in found] == [([digest_of(tmp_path / "a")], "")] * 2


def visited_bank(model: Path, folder: Path, listed: list[ListedAdapter], rank: int = 8) -> AdapterBank:
    return load_adapters(listed, read_config(model), rank, count=2, in_host=2, folders=[folder])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_start", [0, 1])
def test_an_adapter_that_comes_while_the_shard_runs_has_the_bits_that_it_has_from_the_start(
    checkpoints: Checkpoints, tmp_path: Path, dtype: torch.dtype, at_start: int
) -> None:
    path, prompt = checkpoints("qwen3").path, random_ids(21)
    listed = [write_adapter(tmp_path / name, sizes_of(path), 3 + seed, seed=seed) for seed, name in enumerate("abc")]
    whole, digests = runner_of(path, listed, dtype=dtype)
    bank = visited_bank(path, tmp_path, listed[:at_start])
    runner = make_runner(path, dtype, adapters=bank)
    runner.warmup(256, None, 16, 1024)
    assert greedy(runner, prompt, "") == greedy(whole, prompt, "")
    for slot, number in ((0, 2), (1, 1), (0, 0), (1, 2)):
        assert bank.prepare(digests[number], listed[number].path) == ""
        with torch.inference_mode():
            assert runner.load_adapter(slot, digests[number]) == ""
        assert bank.slots[digests[number]] == slot and len(bank.slots) <= 2
        assert greedy(runner, prompt, digests[number]) == greedy(whole, prompt, digests[number])
    assert greedy(runner, prompt, "") == greedy(whole, prompt, "")


def test_an_adapter_that_comes_is_refused_in_one_line_before_anything_changes(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    path, folder = checkpoints("qwen3").path, tmp_path / "allowed"
    sizes = sizes_of(path)
    good = write_adapter(folder / "good", sizes, 4, seed=1)
    bank = visited_bank(path, folder, [])
    runner = make_runner(path, adapters=bank)
    runner.warmup(256, None, 16, 1024)
    large, outside = write_adapter(folder / "large", sizes, 9), write_adapter(tmp_path / "outside", sizes, 4, seed=2)
    head = {"lm_head": LinearSize(VOCABULARY, next(iter(sizes.values())).inputs)}
    of_head = write_adapter(folder / "head", head, 4)
    for adapter, says in (
        (large, "at most 8 is served"),
        (outside, "outside of the folders of --lora-dirs"),
        (of_head, "lm_head: the server has no room for this layer"),
    ):
        refusal = bank.prepare(digest_of(Path(adapter.path)), adapter.path)
        assert says in refusal and "\n" not in refusal
    digest = digest_of(Path(good.path))
    assert "have changed since they were checked" in bank.prepare("0" * 64, good.path)
    assert "does not know the adapter" in bank.prepare(digest)
    assert "does not know the adapter" in runner.load_adapter(0, digest)
    assert bank.prepare(digest, good.path) == "" == runner.load_adapter(1, digest)
    assert digest in bank.slots and not bank.known
    closed, file = load_adapters([good], read_config(path), 8), Path(good.path) / "adapter_model.safetensors"
    assert "takes no adapters but those of its start" in closed.prepare(digest_of(Path(large.path)), large.path)
    file.write_bytes(file.read_bytes()[:-4] + bytes(4))
    assert bank.prepare(digest) == ""  # in the host's memory still


GGUF_BASES = ("llama3", "falcon, as 40B", "gpt2", "bloom", "gemma3", "phi3, longrope")


@pytest.mark.parametrize(
    "fixture", [n if n in GGUF_BASES else pytest.param(n, marks=pytest.mark.slow) for n in FIXTURES]
)
def test_an_adapter_of_the_original_fits_the_gguf_file_that_was_made_of_it(tmp_path: Path, fixture: str) -> None:
    original = make_original(tmp_path / "original", fixture)
    make_gguf(tmp_path / "model.gguf", tmp_path / "original", WRITTEN[fixture])
    adapter = write_adapter(tmp_path / "adapter", sizes_of(tmp_path / "original"), 4, seed=1)
    model = merged(original, tmp_path / "adapter", tmp_path / "original")
    prompt = random_ids(33)
    adapted, plain = texts_of(ALONE, tmp_path / "model.gguf", [adapter], prompt, NEW)
    expected = teacher_forced(model, prompt, adapted.tokens)
    assert (adapted.logprobs - expected).abs().max() <= 2 * ROUNDING
    assert expected.argmax(dim=1).tolist() == adapted.tokens
    assert (plain.logprobs[0] - adapted.logprobs[0]).abs().max() > 0.05
