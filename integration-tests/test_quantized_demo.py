"""The demo model with weights in GPTQ's 4 bits, served without a flag for them, and activations, keys and values in
int8: it adds, resumes texts and follows grammars."""

import json
import shutil
from pathlib import Path

import pytest
from asks import WORDS, asks
from calls import at_once, stream
from demo_model.corpus import sum_question
from faults import SLOWER, streams_though_a_shard_is_killed
from safetensors.torch import load_file, save_file
from server_process import ServerProcess
from test_demo_model import assert_most_are_right
from test_forms import SCHEMA, is_person
from test_sockets import assert_two_shards_listen_on_the_loopback_only
from written_codes import LINEAR, words

from text_generation_common.model_files import demo_directory

# Few tokens in a step make the warm-up shorter.
FLAGS = (
    *("--dtype", "float32", "--activations", "int8", "--kv-cache-dtype", "int8", "--num-shard", "2"),
    *("--max-batch-total-tokens", "4096", "--max-batch-prefill-tokens", "256", "--max-concurrent-requests", "32"),
    "--testing",
)
SIZE, LARGEST = 32, 15


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, each weight rounded to the nearest of 16 numbers of its group."""
    found = tmp_path_factory.mktemp("gptq") / "demo"
    shutil.copytree(demo_directory(), found)
    tensors = load_file(found / "model.safetensors")
    for name in [name for name in tensors if name.removesuffix(".weight").endswith(LINEAR)]:
        layer, weight = name.removesuffix(".weight"), tensors.pop(name).float()
        groups = weight.view(len(weight), -1, SIZE)
        low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
        scales = ((high - low) / LARGEST).half().clamp(min=1e-4)
        zeros = (-low / scales.float()).round().clamp(1, LARGEST)
        q = (groups / scales.float() + zeros).round().clamp(0, LARGEST).long().flatten(1)
        tensors |= {
            f"{layer}.qweight": words(q, 4).T.contiguous(),
            f"{layer}.qzeros": words(zeros.squeeze(-1).T.long() - 1, 4),
            f"{layer}.scales": scales.squeeze(-1).T.contiguous(),
        }
    save_file(tensors, found / "model.safetensors")
    config = json.loads((found / "config.json").read_text())
    settings = {"quant_method": "gptq", "bits": 4, "group_size": SIZE, "desc_act": False}
    (found / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return found


def assert_a_prompt_is_cached(server: ServerProcess) -> None:
    """The second time its tokens come from the cache, and the text is the same."""
    prompt = stream(" ".join(WORDS), max_new_tokens=20)
    (cold,), (warm,) = at_once(server.url, prompt), at_once(server.url, prompt)
    assert warm[-1]["generated_text"] == cold[-1]["generated_text"]
    cached, length = warm[-1]["details"]["cached_tokens"], warm[-1]["details"]["input_length"]
    assert cold[-1]["details"]["cached_tokens"] < cached and cached >= length - 1


def test_the_demo_model_in_4_bits_on_two_shards_is_served_as_any_other(folder: Path) -> None:
    with ServerProcess("--model-id", str(folder), *FLAGS, environ={"FAILPOINTS": SLOWER}) as server:
        assert_two_shards_listen_on_the_loopback_only(server)
        assert_most_are_right(server, sum_question, 16, 12)
        streams_though_a_shard_is_killed(server, asks(4, 60), rank=1)
        assert_a_prompt_is_cached(server)
        form = {"type": "json", "value": SCHEMA}
        (person,) = at_once(server.url, stream("A fox", grammar=form, do_sample=True, max_new_tokens=60))
    assert is_person(person[-1]["generated_text"])
