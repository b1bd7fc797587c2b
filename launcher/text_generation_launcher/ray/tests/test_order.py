"""What actors are told to run."""

from dataclasses import replace
from pathlib import Path

import pytest

from text_generation_common.flags.cluster import ClusterFlags, SecurityFlags
from text_generation_common.flags.http import AccessFlags, HttpFlags
from text_generation_common.flags.kinds import LoadFormat
from text_generation_common.flags.model import CacheFlags, ComputeFlags, FileFlags, ShardFlags
from text_generation_common.flags.process import ProcessFlags
from text_generation_common.flags.requests import RequestFlags, SchedulingFlags, TokenFlags
from text_generation_launcher.config import LaunchPlan
from text_generation_launcher.ray.order import engine_order

PLAN = LaunchPlan(
    model_id="/models/m",
    num_shard=1,
    load_format=LoadFormat.auto,
    files=FileFlags(),
    cache=CacheFlags(),
    compute=ComputeFlags(),
    shard=ShardFlags(),
    requests=RequestFlags(),
    tokens=TokenFlags(),
    scheduling=SchedulingFlags(),
    http=HttpFlags(),
    cluster=ClusterFlags(security=SecurityFlags(tls_dir="tls")),
    access=AccessFlags(api_key=("secret-of-clients",), admin_api_key="secret-of-admins"),
    process=ProcessFlags(),
)


def test_paths_hold_in_an_actor_s_working_directory_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    files, cache = FileFlags(tokenizer_config_path="chat.json"), CacheFlags(weights_cache_override="weights")
    words = engine_order(replace(PLAN, files=files, cache=cache)).argv
    following = {word: words[place + 1] for place, word in enumerate(words[:-1])}
    assert following["--tls-dir"] == str(tmp_path / "tls")
    assert following["--tokenizer-config-path"] == str(tmp_path / "chat.json")
    assert following["--weights-cache-override"] == str(tmp_path / "weights")


def test_keys_of_clients_are_not_in_it() -> None:
    assert "secret" not in engine_order(PLAN).text()
