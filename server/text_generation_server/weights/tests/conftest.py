"""A fake hub, and commands that reach it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from fake_hub import FakeHub, Model, running_hub
from safetensors.torch import save


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with running_hub() as fake:
        yield fake


@pytest.fixture
def asking_hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """The fake hub, which this process asks, too."""
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    return hub


@dataclass(frozen=True)
class Shell:
    """Runs `text-generation-server` commands with the fake hub and with a cache for this test."""

    hub: FakeHub
    home: Path

    @property
    def cache(self) -> Path:
        return self.home / "hub"

    def start(self, *arguments: str, stderr: int = subprocess.PIPE, **variables: str) -> "subprocess.Popen[str]":
        hidden = ("HF_", "HUGGINGFACE_", "WEIGHTS_CACHE", "RANK", "WORLD_SIZE", "MAX_TOTAL_TOKENS", "ROPE_")
        environment = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
        environment |= {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.home), "NO_PROXY": "127.0.0.1", **variables}
        return subprocess.Popen(
            [sys.executable, "-m", "text_generation_server.cli", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )

    def download(self, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        with self.start("download-weights", *arguments, **variables) as process:
            out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def snapshot(self, model_id: str, revision: str = "main") -> Path:
        commit = Model({}).commit(revision)
        return self.cache / f"models--{model_id.replace('/', '--')}" / "snapshots" / commit


@pytest.fixture
def shell(hub: FakeHub, tmp_path: Path) -> Shell:
    return Shell(hub, tmp_path / "home")


def one_error_line(stderr: str) -> str:
    lines = stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("Error: "), stderr
    return lines[0]


@pytest.fixture(name="one_error_line")
def one_error_line_fixture() -> object:
    return one_error_line


CONFIG = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 1,
    "num_attention_heads": 4,
}  # fmt: skip


def tiny_files(seed: int = 0) -> dict[str, bytes]:
    """Files of a model on the hub. The tensors depend on the seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": b'{"version": "1.0"}',
        "tokenizer_config.json": b"{}",
        "model.safetensors": save({"weight": torch.randn(64, 32, generator=generator)}),
    }


@pytest.fixture(name="tiny_files")
def tiny_files_fixture() -> object:
    return tiny_files


@pytest.fixture(name="Model")
def model_fixture() -> type[Model]:
    return Model
