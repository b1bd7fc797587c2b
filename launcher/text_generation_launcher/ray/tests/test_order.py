"""The command lines that actors run on their machines."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from text_generation_common.errors import ArgumentValidation
from text_generation_common.flags.cluster import ClusterFlags, EngineListFlags, EngineOnlyFlags, SecurityFlags, Way
from text_generation_common.flags.http import AccessFlags, HttpFlags
from text_generation_common.flags.model import CacheFlags, FileFlags
from text_generation_common.flags.process import ProcessFlags
from text_generation_common.flags.requests import TokenFlags
from text_generation_common.json_values import as_json
from text_generation_launcher import checks
from text_generation_launcher.cli import command_line
from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.ray.replica import engine_order, front_order
from text_generation_launcher.ray.values import LAUNCHER
from text_generation_launcher.tests.test_launcher_commands import PLAIN

PLAN = replace(
    PLAIN,
    tokens=TokenFlags(),
    cluster=ClusterFlags(security=SecurityFlags(tls_dir="tls")),
    access=AccessFlags(api_key=("secret-of-clients",), admin_api_key="secret-of-admins"),
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
    assert b"secret" not in as_json(engine_order(PLAN))
    assert b"secret" not in as_json(front_order(PLAN, 3000))
    with pytest.raises(ArgumentValidation, match="--api-key to other machines"):
        checks.check_keys_elsewhere(PLAN.access, fronts_on_every_node=True)
    checks.check_keys_elsewhere(AccessFlags(api_key_file="keys"), fronts_on_every_node=True)


def parsed(words: Sequence[str]) -> LauncherConfig:
    """The flags as the launcher on the other machine understands them."""
    found: list[LauncherConfig] = []
    with pytest.raises(SystemExit) as ended:
        command_line(lambda config: found.append(config) or 0, {})(args=list(words))
    assert ended.value.code == 0
    return found[0]


def test_a_launcher_of_fronts_gets_the_command_s_flags_and_what_the_machine_has_for_it() -> None:
    http = HttpFlags(port=0, max_connections=7, graceful_termination_timeout=5.0)
    cluster = replace(PLAN.cluster, api_workers=2, engine_list=EngineListFlags(resume_across_builds=True))
    plan = replace(PLAN, http=http, cluster=cluster, access=AccessFlags(api_key_file="keys"))
    order = front_order(plan, 3456)
    config = parsed(order.command("10.0.0.4", Path("/run/f"))[len(LAUNCHER) :])
    assert config.cluster.way is Way.FRONTS
    assert config.cluster.engine_list == EngineListFlags(engines_file="/run/f/engines", resume_across_builds=True)
    assert (config.cluster.api_workers, config.cluster.security) == (2, SecurityFlags(tls_dir=os.path.abspath("tls")))
    assert config.http == replace(http, port=3456)
    assert config.access.api_key_file == os.path.abspath("keys")
    assert (config.model.model_id, config.shard_uds_path) == ("/models/m", "/run/f/s")


@pytest.mark.parametrize(
    ("given", "elsewhere"), [("0.0.0.0", "0.0.0.0"), ("::", "::"), ("10.0.0.3", "10.0.0.4"), ("127.0.0.1", "10.0.0.4")]
)
def test_fronts_listen_on_all_networks_or_on_the_address_of_their_machine(given: str, elsewhere: str) -> None:
    order = front_order(replace(PLAN, http=HttpFlags(hostname=given)), 3000)
    assert parsed(order.command("10.0.0.4", Path("/f"))[len(LAUNCHER) :]).http.hostname == elsewhere


def test_the_launcher_of_an_engine_understands_its_order() -> None:
    order = engine_order(replace(PLAN, num_shard=2))
    config = parsed(order.command("fd00::1", Path("/f"))[len(LAUNCHER) :])
    assert (config.cluster.way, config.num_shard) == (Way.ENGINE, 2)
    assert (config.cluster.engine.engine_address, config.cluster.engine.engine_address_file) == (
        "[fd00::1]:0",
        "/f/address",
    )


def test_an_engine_has_the_first_free_port_for_its_metrics_of_those_that_the_command_has_for_all() -> None:
    cluster = replace(PLAN.cluster, engine=EngineOnlyFlags(engine_metrics_port=9000))
    order = engine_order(replace(PLAN, cluster=cluster))
    engine = parsed(order.command("10.0.0.4", Path("/f"))[len(LAUNCHER) :]).cluster.engine
    assert (engine.engine_metrics_port, engine.engine_metrics_tries) == (9000, 16)
    assert not any("metrics" in word for word in engine_order(PLAN).argv)


def test_engines_and_fronts_on_other_machines_log_as_the_command_does() -> None:
    for process in (ProcessFlags(), ProcessFlags(json_output=True)):
        plan = replace(PLAN, process=process)
        for order in (engine_order(plan), front_order(plan, 3000)):
            assert parsed(order.command("10.0.0.4", Path("/f"))[len(LAUNCHER) :]).process == process
