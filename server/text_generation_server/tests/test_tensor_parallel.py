"""A model that is split over the processes of a group computes the same as the whole model, also after errors."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import model_tasks as tasks
import pytest
import torch
from collective_tasks import Ranks
from family_tools import TOLERANCE, Checkpoints, quick_and_long
from shard_tools import ALONE, SAMPLED, make_checkpoint, make_platform

from text_generation_common.errors import ModelError
from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.config import read_config
from text_generation_common.sampling import Sampling
from text_generation_server.distributed import Alone, Group
from text_generation_server.kernels import reference
from text_generation_server.models.decoder import Decoder
from text_generation_server.models.loading import Loader
from text_generation_server.models.parts import split_model
from text_generation_server.weights.files import SafetensorsFiles

VARIANTS: dict[str, dict[str, Any]] = {
    "more kv heads than shards": {"num_attention_heads": 8, "num_key_value_heads": 8},
    "fewer kv heads than shards": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "biases, odd sizes": {"attention_bias": True, "mlp_bias": True, "vocab_size": 321, "intermediate_size": 163},
    "tied, odd vocabulary": {"tie_word_embeddings": True, "vocab_size": 323},
}
COMPANY: dict[str, dict[str, Any]] = {
    "plain": {},
    "long dot products": {"hidden_size": 1024, "intermediate_size": 1600, "num_hidden_layers": 1},
}
# One of each way to find a rank's part of the files: groups, transposed weights, one key head, experts; slopes,
# and norms of all heads together. `-m models` splits all variants.
QUICK = ("gpt2", "gpt_bigcode", "qwen3_moe", "bloom", "olmo2", "gpt_oss")
SIZES = pytest.mark.parametrize("size", [2, 4])


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_split_model_computes_the_same_as_the_whole_model(ranks: Ranks, tmp_path: Path, variant: str) -> None:
    make_checkpoint(tmp_path, **VARIANTS[variant])
    vocabulary = read_config(tmp_path).vocab_size
    whole = tasks.greedy_texts(ALONE, tmp_path, vocabulary)
    for size in (2, 4):
        first, *others = ranks.run(size, tasks.greedy_texts, tmp_path, vocabulary)
        assert others == [[]] * (size - 1)
        for (tokens, logprobs), (whole_tokens, whole_logprobs) in zip(first, whole, strict=True):
            assert tokens == whole_tokens
            torch.testing.assert_close(logprobs, whole_logprobs, atol=1e-4, rtol=1e-5)


def splits(config: ModelConfig, size: int) -> bool:
    try:
        split_model(config, 0, size, reference.vocabulary_part(config.vocab_size, size))
    except ModelError as error:
        assert f"--num-shard {size} cannot divide the {config.num_heads} attention heads" in str(error)
        return False
    return True


@pytest.mark.parametrize("variant", quick_and_long(QUICK))
def test_a_split_family_computes_the_same_as_the_whole_model(
    ranks: Ranks, checkpoints: Checkpoints, variant: str, record_property: Callable[[str, Any], None]
) -> None:
    path = checkpoints(variant).path
    config = read_config(path)
    whole = tasks.greedy_texts(ALONE, path, config.vocab_size)
    sizes = [size for size in ((2,) if variant in QUICK else (2, 4)) if splits(config, size)]
    for size in sizes:
        first = ranks.run(size, tasks.greedy_texts, path, config.vocab_size)[0]
        for (tokens, logprobs), (whole_tokens, whole_logprobs) in zip(first, whole, strict=True):
            assert tokens == whole_tokens
            assert (logprobs - whole_logprobs).abs().max() <= TOLERANCE
    record_property("shards", sizes)
    assert 2 in sizes


@SIZES
@pytest.mark.parametrize("model", COMPANY, ids=str)
def test_other_requests_chunks_and_resuming_change_no_bit_of_a_split_model(
    ranks: Ranks, tmp_path: Path, model: str, size: int
) -> None:
    make_checkpoint(tmp_path, **COMPANY[model])
    for parameters in (Sampling(), SAMPLED):
        found = ranks.run(size, tasks.texts_in_company, tmp_path, parameters)[0]
        assert len(found) == len(tasks.CROWD) + 2
        for what, alone, then in found:
            assert alone == then and alone[0], what


@SIZES
def test_gloo_and_shared_memory_compute_the_same_bits(ranks: Ranks, model: Path, size: int) -> None:
    through_memory, through_gloo = (
        ranks.run(size, tasks.greedy_texts, model, 320, share_memory=share_memory)[0] for share_memory in (True, False)
    )
    for (tokens, logprobs), (gloo_tokens, gloo_logprobs) in zip(through_memory, through_gloo, strict=True):
        assert tokens == gloo_tokens and torch.equal(logprobs, gloo_logprobs)


@SIZES
def test_ranks_that_sample_parts_of_the_vocabulary_write_the_texts_of_one_rank(
    ranks: Ranks, model: Path, size: int
) -> None:
    """Greedy and drawn texts, with steps in between for which all logits go to rank 0, since a row asks for a cut."""
    merges, alone = tasks.texts_by_parts(ALONE, model)
    assert merges == 0
    results = ranks.run(size, tasks.texts_by_parts, model)
    merges, texts = results[0]
    assert merges == tasks.NEW - tasks.WITH_CUT and [merged for merged, _ in results[1:]] == [0] * (size - 1)
    for (tokens, logprobs), (tokens_alone, logprobs_alone) in zip(texts, alone, strict=True):
        assert tokens == tokens_alone and len(set(tokens)) > 1
        assert logprobs == pytest.approx(logprobs_alone, abs=1e-4)


@SIZES
def test_prompt_logprobs_of_a_split_model_are_those_of_the_whole_model(ranks: Ranks, model: Path, size: int) -> None:
    logprobs, top_ids, top_logprobs = tasks.prompt_scores(ALONE, model)
    assert len(logprobs) == 69 and len(top_ids) == 2 * 69
    of_rank_0, *others = ranks.run(size, tasks.prompt_scores, model)
    assert all(not len(values) for of_rank in others for values in of_rank)
    assert torch.equal(of_rank_0[1], top_ids)
    torch.testing.assert_close(of_rank_0[0], logprobs, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(of_rank_0[2], top_logprobs, atol=1e-4, rtol=1e-5)


def test_only_rank_0_names_requests_and_a_cache_holds_the_ranks_heads(ranks: Ranks, model: Path) -> None:
    slot_bytes = 3 * 2 * 2 * 16 * 4  # bytes: layers × keys and values × heads × head size × bytes of float32
    assert tasks.outputs(ALONE, model)[2] == slot_bytes
    first, second = ranks.run(2, tasks.outputs, model)
    assert first[0] == [7] and len(first[1]) == 1 and second[:2] == ([], [])
    assert first[2] == second[2] == slot_bytes / 2


@SIZES
def test_each_rank_reads_only_its_part_of_the_files(model: Path, size: int) -> None:
    config = read_config(model)
    files_bytes = sum(SafetensorsFiles(model).get(name).nbytes for name in SafetensorsFiles(model).names)
    norms_bytes = (2 * config.num_layers + 1) * config.hidden_size * 4
    kv_bytes = config.num_layers * 2 * config.num_kv_heads * config.head_size * config.hidden_size * 4
    copies = max(1, size // config.num_kv_heads)
    read = [bytes_read(model, rank, size) for rank in range(size)]
    assert sum(read) == files_bytes + (size - 1) * norms_bytes + (copies - 1) * kv_bytes
    for bytes_of_rank in read:
        assert bytes_of_rank == pytest.approx(sum(read) / size, rel=0.02)


def bytes_read(path: Path, rank: int, size: int) -> int:
    """Bytes that one rank reads when it loads its part. Loading does not need the other ranks."""
    config, group, files = read_config(path), Group(rank, size, Alone()), SafetensorsFiles(path)
    tensors: list[int] = []
    platform = make_platform(group=group)
    loader = Loader(files, platform, torch.float32, lambda: tensors.append(files.bytes_read))
    Decoder(config, platform, loader, 512)
    assert len(tensors) == loader.num_tensors == len(files.names) and tensors == sorted(tensors)
    return files.bytes_read


def test_heads_that_cannot_be_divided_are_refused_with_numbers_that_can(model: Path) -> None:
    config = read_config(model)
    with pytest.raises(ModelError, match=r"--num-shard 3 cannot divide the 4 attention heads.*choose one of 1, 2, 4"):
        split_model(config, 0, 3, 107)
    with pytest.raises(ModelError, match=r"the 12 attention heads and 6 key.*choose one of 1, 2, 3, 6, 12"):
        split_model(replace(config, num_heads=12, num_kv_heads=6), 0, 4, 80)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 4), (8, 2), (8, 1)])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_head_column_and_id_has_a_rank(model: Path, heads: int, kv_heads: int, size: int) -> None:
    config = replace(read_config(model), num_heads=heads, num_kv_heads=kv_heads, vocab_size=35, intermediate_size=163)
    part = reference.vocabulary_part(35, size)
    splits = [split_model(config, rank, size, part) for rank in range(size)]
    assert [head for s in splits for head in s.query_heads] == list(range(heads))
    assert [column for s in splits for column in s.intermediate] == list(range(163))
    assert [token for s in splits for token in s.vocabulary] == list(range(35))
    assert {s.vocabulary_part for s in splits} == {-(-35 // size)}
    for split in splits:
        assert {head * kv_heads // heads for head in split.query_heads} == set(split.kv_heads)


def test_a_step_that_one_rank_cannot_prepare_fails_on_all_and_the_group_goes_on(ranks: Ranks, model: Path) -> None:
    first, second = ranks.run(2, tasks.fail_to_prepare, model)
    assert first[0] == "StepError: rank 1 of 2 could not prepare the step: its log says why"
    assert second[0].startswith("StepError: batch 1 with 2 requests is not what this shard holds")
    assert first[1] == first[2] and len(first[1][0]) == tasks.NEW


@pytest.mark.parametrize("point", ["shard.step", "shard.prefill", "shard.decode"])
def test_a_rank_that_fails_in_the_middle_of_a_step_breaks_the_group(ranks: Ranks, model: Path, point: str) -> None:
    first, second = ranks.run(2, tasks.fail_at, model, f"{point}[rank=1]:raise", wait_s=1.0)
    assert second == f"GroupBroken: rank 1 of 2 failed inside a step: InjectedFault: injected at {point}"
    assert first.startswith("GroupBroken: rank 1 did not come")
    assert tasks.fail_at(ALONE, model, f"{point}:raise") == f"InjectedFault: injected at {point}"


def test_a_warm_up_that_fails_on_one_rank_fails_on_all(ranks: Ranks, model: Path) -> None:
    first, second = ranks.run(2, tasks.fail_at, model, "shard.warmup[rank=1]:raise")
    assert first == "StepError: rank 1 of 2 could not measure its memory: its log says why"
    assert second == "InjectedFault: injected at shard.warmup"
    for error in ranks.run(2, tasks.ask_for_too_much, model):
        assert error.startswith("MemoryLimitError: --max-batch-total-tokens")


def test_a_split_model_follows_grammars_and_writes_the_texts_of_one_rank(ranks: Ranks, model: Path) -> None:
    """All ranks must decide alike whether they sample parts of the vocabulary, though rank 0 alone follows grammars."""
    merges, alone = tasks.constrained_texts(ALONE, model)
    assert merges == 0 and sorted(alone) == [2, 3]
    (merges, texts), others = ranks.run(2, tasks.constrained_texts, model)
    assert merges == 1 + tasks.FREE_STEPS and others == (0, {})
    assert texts == alone
