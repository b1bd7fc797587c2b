"""Steps cost what the formula says, and the derived models what their data sheets allow."""

from pathlib import Path

import pytest

from text_generation_benchmark.shapes import LLAMA_8B, LLAMA_70B, LlamaShape
from text_generation_benchmark.simulation.cost import H200, MODELS, SimulatedModel, StepCost
from text_generation_router.scheduling.costs import keys_of


def test_weights_are_read_or_tokens_computed_whichever_takes_longer() -> None:
    cost = StepCost(1, 10, 2, 0, 0, 0, 0)
    assert cost.seconds(3, 0) == 11 and cost.seconds(3, 0, 4) == 1 + 2 * 7


def test_everything_that_a_step_carries_costs_time() -> None:
    cost = StepCost(1, 0, 0, 10, 100, 1000, 10_000)
    assert cost.seconds(1, 2, 3, 4) == 1 + 10 + 200 + 3000 + 40_000


@pytest.mark.parametrize(("shape", "parameters"), [(LLAMA_8B, 8.03e9), (LLAMA_70B, 70.55e9)])
def test_the_shapes_are_the_models(shape: LlamaShape, parameters: float) -> None:
    assert shape.layers * shape.layer_weights + 2 * shape.head_weights == pytest.approx(parameters, rel=0.001)


def test_a_token_of_8b_takes_128_kib_and_of_70b_320() -> None:
    assert (2 * LLAMA_8B.kv_numbers, 2 * LLAMA_70B.kv_numbers) == (128 * 1024, 320 * 1024)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_no_step_is_faster_than_the_device(model: SimulatedModel) -> None:
    shape, count = (LLAMA_8B, 1) if "8b" in model.name else (LLAMA_70B, 2 if "tp2" in model.name else 4)
    weights = 2 * shape.layers * shape.layer_weights
    assert model.cost.seconds(1, 1000) > weights / (count * H200.bytes_per_s)
    assert model.cost.seconds(0, 0, 8192, keys_of(0, 8192)) > 8192 * weights / (count * H200.flops_per_s)
    kept = model.slots * 2 * shape.kv_numbers + weights
    assert 0.8 * count * H200.memory_bytes < kept < count * H200.memory_bytes


def test_a_model_is_read_as_it_was_written(tmp_path: Path) -> None:
    model = MODELS["h200-8b"]
    model.write(tmp_path / "m.json")
    assert SimulatedModel.read(tmp_path / "m.json") == model


@pytest.mark.parametrize("text", ["{", "{}", '{"cost": {}}', "[]"])
def test_a_file_that_is_not_a_model_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(ValueError, match=r"m\.json is not what --write-model writes"):
        SimulatedModel.read(tmp_path / "m.json")
