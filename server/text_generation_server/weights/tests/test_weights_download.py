"""`download-weights` as a process, with a fake hub on loopback."""

import hashlib
import io
import json
import os
import signal
import socket
import termios
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, get_session
from huggingface_hub.utils import hf_raise_for_status
from safetensors.torch import load_file, save
from sentencepiece_files import byte_pieces
from tokenizers import Tokenizer

from text_generation_common.errors import ShardError, WeightsError
from text_generation_common.weights.headers import verify
from text_generation_server.errors import NetworkError, SilentHub
from text_generation_server.weights.files import HubAccess
from text_generation_server.weights.hub import download, hub_errors, resolve
from text_generation_server.weights.prepare import prepare
from text_generation_server.weights.transfer import Retries

PRESENT = "Files are already present on the host. Skipping download."


def test_the_files_needed_to_serve_are_fetched_once(hub, shell, Model, tiny_files):
    files = tiny_files() | {
        "README.md": b"#",
        "training_args.safetensors": b"x",
        "consolidated.safetensors": b"x",
        "extra/model.safetensors": b"x",
        "pytorch_model.bin": b"x",
    }
    hub.models["owner/tiny"] = Model({"main": files})
    first = shell.download("owner/tiny")
    assert first.returncode == 0, first.stderr
    assert "Download: [1/1] -- ETA: 0:00:00" in first.stdout
    path = shell.snapshot("owner/tiny")
    assert {file.name for file in path.iterdir()} == set(tiny_files())
    assert all((path / name).read_bytes() == content for name, content in tiny_files().items())
    assert path == resolve("owner/tiny", None, HubAccess(cache_dir=shell.cache))

    hub.log.clear()
    second = shell.download("owner/tiny")
    assert second.returncode == 0 and PRESENT in second.stdout
    assert hub.log == []


NO_WIDTH = ("config.json", b'{"model_type": "llama"}', "config.json has no field hidden_size")


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        NO_WIDTH,
        ("config.json", b'{"model_type": "lama"}', 'model type "lama" is not supported: did you mean llama?'),
        ("config.json", b'{"model_type": "stablelm"}', "transformers does not declare that its attention"),
        ("config.json", b'{"model_type": "llama4"}', "it is more than a text model"),
        ("config.json", b'{"model_type": "qwen3_next"}', "its layers keep a state for each text"),
        ("config.json", b'{"quantization_config": {"quant_method": "aqlm"}}', "quantized as aqlm"),
        ("quantize_config.json", b'{"bits": 4, "is_marlin_format": true}', "as gptq (marlin)"),
        ("generation_config.json", b" " * (2**23 + 1), "(revision main) has 8388609 bytes"),
    ],
)
def test_a_model_that_is_not_supported_is_refused_before_its_weights_are_fetched(
    asking_hub, Model, tiny_files, tmp_path, file, content, named
):
    asking_hub.models["owner/tiny"] = Model({"main": tiny_files() | {file: content}})
    with pytest.raises(ShardError) as refused:
        prepare("owner/tiny", None, HubAccess(cache_dir=tmp_path), auto_convert=True)
    assert named in str(refused.value) and "\n" not in str(refused.value)
    assert asking_hub.gets("model.safetensors") == [] and asking_hub.gets("generation_config.json") == []


def test_a_refused_model_ends_the_command_with_one_line(hub, shell, Model, tiny_files, one_error_line):
    file, content, named = NO_WIDTH
    hub.models["owner/tiny"] = Model({"main": tiny_files() | {file: content}})
    refused = shell.download("owner/tiny")
    assert refused.returncode == 1 and named in one_error_line(refused.stderr)
    assert hub.gets("model.safetensors") == []


def test_a_revision_is_its_own_download(hub, shell, Model, tiny_files, one_error_line):
    hub.models["tiny"] = Model({"main": tiny_files(0), "dev": tiny_files(1)})
    assert shell.download("tiny", "--revision", "dev").returncode == 0
    access = HubAccess(cache_dir=shell.cache)
    assert (resolve("tiny", "dev", access) / "model.safetensors").read_bytes() == tiny_files(1)["model.safetensors"]
    with pytest.raises(WeightsError, match="tiny is not in the cache"):
        resolve("tiny", None, access)
    unknown = shell.download("tiny", "--revision", "nope")
    assert unknown.returncode == 1 and "tiny has no revision nope" in one_error_line(unknown.stderr)


def test_an_index_says_which_parts_belong_to_the_model(hub, shell, Model, tiny_files):
    parts = {f"model-0000{i}-of-00002.safetensors": save({f"w{i}": torch.full((4,), float(i))}) for i in (1, 2)}
    weight_map = {f"w{i}": f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    files = tiny_files() | parts | {"model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode()}
    hub.models["parts"] = Model({"main": files | {"other.safetensors": b"x"}})
    done = shell.download("parts")
    assert done.returncode == 0, done.stderr
    assert "Download: [2/2]" in done.stdout
    found = {file.name for file in shell.snapshot("parts").glob("*.safetensors")}
    assert found == set(parts)


def test_a_repository_with_tokenizer_model_alone_gets_its_tokenizer_json(hub, shell, Model, tiny_files):
    files = {name: content for name, content in tiny_files().items() if name != "tokenizer.json"}
    hub.models["old"] = Model({"main": files | {"tokenizer.model": byte_pieces(320)}})
    done = shell.download("old")
    assert done.returncode == 0, done.stderr
    tokenizer = Tokenizer.from_file(str(shell.snapshot("old") / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 320 and tokenizer.decode(tokenizer.encode("a text, 1 ñ").ids) == "a text, 1 ñ"


def test_a_private_model_needs_the_token(hub, shell, Model, tiny_files, one_error_line):
    hub.models["owner/private"] = Model({"main": tiny_files()}, token="hf_secret")
    refused = shell.download("owner/private", HF_TOKEN="hf_wrong")
    assert refused.returncode == 1
    assert "owner/private was not found" in one_error_line(refused.stderr) and "HF_TOKEN" in refused.stderr
    accepted = shell.download("owner/private", HF_API_TOKEN="hf_secret")
    assert accepted.returncode == 0, accepted.stderr
    assert "hf_secret" not in accepted.stdout + accepted.stderr


def test_offline_serves_from_the_cache_and_says_so_when_it_is_empty(hub, shell, Model, tiny_files, one_error_line):
    hub.models["tiny"] = Model({"main": tiny_files()})
    empty = shell.download("tiny", HF_HUB_OFFLINE="true")
    assert empty.returncode == 1 and "HF_HUB_OFFLINE is set" in one_error_line(empty.stderr)
    assert shell.download("tiny").returncode == 0
    hub.log.clear()
    cached = shell.download("tiny", HF_HUB_OFFLINE="1")
    assert cached.returncode == 0 and PRESENT in cached.stdout
    assert hub.log == []


def test_a_killed_download_goes_on_where_it_stopped(hub, shell, Model, tiny_files, one_error_line):
    """The Range of the second process's request shows where it continued."""
    files = tiny_files() | {"model.safetensors": save({"weight": torch.arange(1 << 20, dtype=torch.float32)})}
    hub.models["big"] = Model({"main": files})
    hub.stall_after["model.safetensors"] = 3_000_000
    with shell.start("download-weights", "big") as process:
        digest = hashlib.sha256(files["model.safetensors"]).hexdigest()
        partial = _wait_for_partial(shell.cache, digest, num_bytes=1 << 20)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=10)
    held = partial.stat().st_size
    with pytest.raises(WeightsError, match="is not in the cache"):
        resolve("big", None, HubAccess(cache_dir=shell.cache))
    assert not (shell.snapshot("big") / "model.safetensors").exists()

    hub.stall_after.clear()
    again = shell.download("big")
    assert again.returncode == 0, again.stderr
    assert hub.gets("model.safetensors") == [None, f"bytes={held}-"] and held >= 1 << 20
    assert hub.gets("config.json") == [None]
    assert (shell.snapshot("big") / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert not partial.exists()


def _wait_for_partial(cache: Path, digest: str, num_bytes: int) -> Path:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for file in cache.glob(f"models--*/blobs/{digest}.tgi.incomplete"):
            if file.stat().st_size >= num_bytes:
                return file
        time.sleep(0.01)
    raise AssertionError("the download never began")


def test_a_hub_that_cannot_be_reached_is_a_network_error_in_one_line():
    with pytest.raises(NetworkError, match="cannot be reached for tiny") as failed, hub_errors("tiny", None):
        HfApi(endpoint="http://127.0.0.1:1").model_info("tiny")
    assert "\n" not in str(failed.value)


def test_a_hub_that_never_answers_is_told_in_its_error_alone(monkeypatch, tmp_path, caplog):
    """The launcher has a line before it, and two for an error: with another one there would be four."""
    caplog.set_level("INFO")
    monkeypatch.setattr("text_generation_server.weights.hub._API_TIMEOUT_S", 2.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        api = partial(HfApi, f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr("text_generation_server.weights.hub.HfApi", api)
        with pytest.raises(SilentHub, match=r"cannot be reached for tiny.*: check the connection, then"):
            download("tiny", None, HubAccess(tmp_path), retries=Retries(pause_s=0.0))
    assert caplog.messages == []


@pytest.mark.parametrize(("status", "kind"), [(503, NetworkError), (403, WeightsError)])
def test_only_answers_that_may_change_are_network_errors(hub, Model, status, kind):
    hub.models["tiny"] = Model({"main": {"config.json": b"{}"}})
    hub.statuses["config.json"] = [status]
    with pytest.raises(WeightsError, match=f"answered {status} for tiny") as failed, hub_errors("tiny", None):
        hf_raise_for_status(get_session().get(f"{hub.url}/tiny/resolve/main/config.json"))
    assert type(failed.value) is kind


def test_a_cache_that_cannot_be_written_is_one_line(hub, shell, Model, tiny_files, one_error_line):
    hub.models["tiny"] = Model({"main": tiny_files()})
    result = shell.download("tiny", HF_HOME=os.devnull)
    assert result.returncode == 1 and f"the cache {os.devnull}/hub cannot be written" in one_error_line(result.stderr)


def test_the_hub_is_asked_for_the_model_only_and_told_this_program_s_name_only(hub, shell, Model, tiny_files):
    hub.models["tiny"] = Model({"main": tiny_files()})
    assert shell.download("tiny").returncode == 0
    asked = {name for _, name, _ in hub.log}
    assert asked - tiny_files().keys() == {"/api/models/tiny/revision/main"}
    assert hub.agents and all(agent.startswith("tgi-py/") and "torch" not in agent for agent in hub.agents), hub.agents


def _pickled(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def test_bin_weights_are_converted_once(hub, shell, Model, tiny_files, one_error_line):
    files = tiny_files()
    del files["model.safetensors"]
    hub.models["old"] = Model({"main": files | {"pytorch_model.bin": _pickled({"w": torch.arange(8.0)})}})
    refused = shell.download("old", "--no-auto-convert")
    assert refused.returncode == 1 and "--no-auto-convert" in one_error_line(refused.stderr)
    assert hub.gets("pytorch_model.bin") == []

    done = shell.download("old")
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()].count("WARNING") == 2
    converted = shell.snapshot("old") / "model.safetensors"
    assert torch.equal(load_file(converted)["w"], torch.arange(8.0))
    written = converted.stat().st_mtime_ns
    assert PRESENT in shell.download("old").stdout
    assert converted.stat().st_mtime_ns == written


class _Payload:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return exec, (f"open({str(self.target)!r}, 'w').close()",)


def test_a_malicious_pickle_is_refused_and_does_not_run(hub, shell, Model, tiny_files, one_error_line, tmp_path):
    executed = tmp_path / "executed"
    files = tiny_files()
    del files["model.safetensors"]
    evil = _pickled({"w": torch.zeros(2), "x": _Payload(executed)})
    torch.load(io.BytesIO(evil), weights_only=False)  # proves that the payload runs when nothing prevents it
    assert executed.exists()
    executed.unlink()
    hub.models["evil"] = Model({"main": files | {"pytorch_model.bin": evil}})
    result = shell.download("evil")
    assert result.returncode == 1
    line = one_error_line(result.stderr)
    assert "pytorch_model.bin was refused" in line and "exec" in line
    assert not executed.exists()
    assert list(shell.snapshot("evil").glob("*.safetensors")) == []


def test_a_terminal_gets_a_bar_instead_of_lines(hub, shell, Model, tiny_files):
    hub.models["tiny"] = Model({"main": tiny_files()})
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    with shell.start("download-weights", "tiny", stderr=theirs) as process:
        out, _ = process.communicate(timeout=60)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert process.returncode == 0, shown
    assert "100%" in shown and "Download: [" not in out


@pytest.mark.parametrize("model_id", ["../escape", "owner/..", "a/b/c", "/no/such/directory", "na me"])
def test_names_that_lead_elsewhere_are_refused_before_any_request(model_id, tmp_path):
    with pytest.raises(WeightsError):
        resolve(model_id, None, HubAccess(cache_dir=tmp_path))


@pytest.mark.parametrize("revision", ["../../x", "a//b", "/abs", "a b"])
def test_revisions_that_lead_elsewhere_are_refused(revision, tmp_path):
    with pytest.raises(WeightsError, match="is not a revision"):
        resolve("tiny", revision, HubAccess(cache_dir=tmp_path))


def test_a_broken_file_of_a_local_model_is_one_line(shell, tiny_files, one_error_line, tmp_path):
    for name, content in tiny_files().items():
        (tmp_path / name).write_bytes(content)
    good = shell.download(str(tmp_path))
    assert good.returncode == 0 and PRESENT in good.stdout
    verify(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(tiny_files()["model.safetensors"][:-1])
    broken = shell.download(str(tmp_path))
    assert broken.returncode == 1 and f"{tmp_path / 'model.safetensors'} is broken" in one_error_line(broken.stderr)


def test_the_override_directory_wins_over_the_name(shell, tiny_files, tmp_path):
    for name, content in tiny_files().items():
        (tmp_path / name).write_bytes(content)
    result = shell.download("owner/anything", WEIGHTS_CACHE_OVERRIDE=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert shell.hub.log == []
