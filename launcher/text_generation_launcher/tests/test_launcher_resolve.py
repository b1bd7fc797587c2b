"""Which configs are refused before a start, with which messages, and which values are derived."""

import json
import logging
import os
from pathlib import Path

import pytest

from text_generation_common.errors import CommandError
from text_generation_common.flags import process
from text_generation_common.flags.cluster import Way
from text_generation_common.flags.declaration import flag_name, with_flags
from text_generation_common.flags.kinds import KvCacheDtype, Quantize, RopeScalingKind, Standby, TrueFalse, UsageStats
from text_generation_common.flags.process import TracingFlags
from text_generation_common.models.fitting import Heads
from text_generation_launcher import commands
from text_generation_launcher.checks import unread_flags
from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.errors import NotEnoughCUDADevices
from text_generation_launcher.model import locate, model_config
from text_generation_launcher.resolve import count_devices, resolve, resolve_rope, shard_count, with_prefill_budget

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())


@pytest.fixture
def config(tmp_path) -> LauncherConfig:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    return with_flags(LauncherConfig(), model_id=str(tmp_path))


def error_of(config, environ=None, **changes) -> str:
    with pytest.raises(CommandError) as caught:
        resolve(with_flags(config, **changes), environ or {})
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"speculate": 2}, "--speculate"),
        ({"ngrok": True}, "--ngrok"),
        ({"ngrok_authtoken": "secret"}, "--ngrok-authtoken"),
        ({"ngrok_edge": "edge"}, "--ngrok-edge"),
        ({"trust_remote_code": True}, "--trust-remote-code"),
    ],
)
def test_a_flag_without_its_feature_is_refused_by_name(config, changes, flag):
    assert error_of(config, **changes) == f"{flag} is not supported yet: start without it"


def test_traces_are_refused_before_a_process_starts_where_they_cannot_be_sent_and_else_the_router_makes_them(
    config, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    named = with_flags(config, otlp_service_name="mine")
    monkeypatch.setattr(process, "MODULES", ("no_such_package.trace",))
    assert "is not installed" in error_of(named, otlp_endpoint="http://localhost:4317")
    assert "is not an address" in error_of(named, otlp_endpoint="localhost")
    monkeypatch.setattr(process, "MODULES", ())
    assert resolve(with_flags(named, otlp_endpoint="http://h:1"), {}).tracing == TracingFlags(
        otlp_endpoint="http://h:1", otlp_service_name="mine"
    )
    assert "--otlp-service-name has no effect" not in caplog.text


OTHERS = " or ".join(value for value in Quantize if value not in ("exl2", "marlin"))


@pytest.mark.parametrize(
    ("changes", "instead"),
    [
        ({"quantize": Quantize.exl2}, f"--quantize exl2 is not supported yet: use {OTHERS}"),
        (
            {"kv_cache_dtype": KvCacheDtype.fp8_e5m2},
            "--kv-cache-dtype fp8_e5m2 is not supported yet: use fp8_e4m3fn or int8",
        ),
    ],
)
def test_a_value_without_its_feature_is_refused_by_name(config, changes, instead):
    assert error_of(config, **changes) == f"{instead}, or start without"


@pytest.mark.parametrize(
    "changes",
    [
        {"quantize": Quantize.int8},
        {"kv_cache_dtype": KvCacheDtype.fp8_e4m3fn},
        {"speculate": 0},
        {"lora_adapters": ""},
        {"num_shard": 1},
        {"sharded": TrueFalse.false},
        {"disable_grammar_support": True},
        {"trust_remote_code": False},
    ],
)
def test_a_neutral_value_asks_for_nothing(config, changes):
    assert resolve(with_flags(config, **changes), {}).num_shard == 1


@pytest.mark.parametrize(
    ("queries", "keys", "fitting"),
    [
        (12, 4, [1, 2, 4, 12]),
        (32, 8, [1, 2, 4, 8, 16, 32]),
        (71, 1, [1, 71]),
        (24, 6, [1, 2, 3, 6, 12, 24]),
        (9, 9, [1, 3, 9]),
        (14, 2, [1, 2, 14]),
        (20, 10, [1, 2, 5, 10, 20]),
    ],
)
def test_shards_fit_that_get_the_same_number_of_heads_each(queries, keys, fitting):
    refused = {shards: Heads(queries, keys).refusal(shards) for shards in range(1, queries + 1)}
    assert [shards for shards, reason in refused.items() if reason is None] == fitting
    told = f"choose one of {', '.join(map(str, fitting))}"
    assert all(reason is None or reason.endswith(told) for reason in refused.values())


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"prometheus_port": 9000}, "--prometheus-port"),
        ({"usage_stats": UsageStats.off}, "--usage-stats"),
        ({"disable_custom_kernels": True}, "--disable-custom-kernels"),
        ({"otlp_service_name": "mine"}, "--otlp-service-name"),
        ({"master_addr": "10.0.0.1"}, "--master-addr"),
        ({"master_port": 29501}, "--master-port"),
    ],
)
def test_a_flag_without_effect_is_mentioned_once(config, caplog, changes, flag):
    caplog.set_level(logging.INFO)
    resolve(with_flags(config, **changes), {})
    assert [flag in message for message in caplog.messages] == [True]


ENGINE = {"engine_only": True, "engine_address": "10.0.0.1:7000", "insecure_cluster": True}
FRONTS = {"engines": ("10.0.0.1:7000",), "insecure_cluster": True}


@pytest.mark.parametrize(("way", "changes", "told"), TABLES["other_launchers"])
def test_a_flag_that_another_launcher_reads_is_mentioned(config, caplog, way, changes, told):
    caplog.set_level(logging.INFO)
    resolve(with_flags(config, **way, **changes), {})
    found = {message.split()[0] for message in caplog.messages if "has no effect" in message}
    assert found == set(told)


def test_flags_that_are_mentioned_are_not_given_to_engines_and_fronts_on_the_machines_of_ray(config):
    plan = resolve(with_flags(config, standby=Standby.off), {})
    for way, words in ((Way.ENGINE, commands.engine_only(plan, 1)), (Way.FRONTS, commands.fronts_only(plan))):
        assert unread_flags(way) and not {flag_name(name) for name in unread_flags(way)} & {*words}
        assert words[words.index("--standby") + 1] == "off", "both have templates"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        *TABLES["contradictions"],
        ({"waiting_served_ratio": float("nan")}, "`waiting_served_ratio` must be a finite number"),
        ({"sharded": TrueFalse.true, "num_shard": 1}, "`sharded` is true but `num_shard` <= 1"),
    ],
)
def test_contradictions_are_reported_in_tgi_s_words(config, changes, text):
    assert error_of(config, **changes) == text


def test_limits_that_just_fit_are_accepted(config):
    resolved = resolve(
        with_flags(
            config,
            max_input_tokens=7,
            max_total_tokens=8,
            max_batch_prefill_tokens=4,
            max_batch_total_tokens=8,
            max_batch_size=1,
        ),
        {},
    )
    assert resolved.tokens.max_batch_prefill_tokens == 4  # a longer prompt is cut into chunks


def test_too_few_devices_has_tgi_s_name(config):
    with pytest.raises(NotEnoughCUDADevices, match="`sharded` is true but only found 1 CUDA devices"):
        resolve(with_flags(config, sharded=TrueFalse.true), {"CUDA_VISIBLE_DEVICES": "0"})


@pytest.mark.parametrize(
    ("changes", "environ", "shards"),
    [
        ({}, {"CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"sharded": TrueFalse.true}, {"CUDA_VISIBLE_DEVICES": "0,1,2"}, 3),
        ({"num_shard": 4}, {}, 4),
        ({"num_shard": 4, "sharded": TrueFalse.true}, {}, 4),
    ],
)
def test_the_number_of_shards_is_given_or_that_of_visible_devices_on_cpus_too(config, changes, environ, shards):
    assert resolve(with_flags(config, **changes), environ).num_shard == shards


def test_a_key_is_part_of_no_message(config):
    assert "sec" not in error_of(config, api_key=["sec ret"])


@pytest.mark.parametrize(
    ("sharded", "num_shard", "devices", "shards"),
    [
        (TrueFalse.true, None, 4, 4),
        (TrueFalse.true, 3, 4, 3),
        (TrueFalse.false, 3, 4, 3),
        (TrueFalse.false, None, 4, 1),
        (None, None, 4, 4),
        (None, None, 0, 1),
        (None, 3, 4, 3),
    ],
)
def test_shard_count_follows_tgi_s_table(sharded, num_shard, devices, shards):
    assert shard_count(sharded, num_shard, lambda: devices) == shards


@pytest.mark.parametrize(
    ("environ", "devices"),
    [
        ({}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,2"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "1", "NVIDIA_VISIBLE_DEVICES": "0,1"}, 1),
        ({"NVIDIA_VISIBLE_DEVICES": "0,1,2"}, 3),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, 8),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, 8),
        ({"ZE_AFFINITY_MASK": "0,1"}, 2),
    ],
)
def test_devices_are_counted_from_the_environment(environ, devices):
    assert count_devices(environ, count_cards=lambda: 8) == devices


@pytest.mark.parametrize(
    ("given", "derived"),
    [
        ((None, None), (None, None)),
        ((RopeScalingKind.dynamic, None), (RopeScalingKind.dynamic, 1.0)),
        ((None, 2.0), (RopeScalingKind.linear, 2.0)),
        ((RopeScalingKind.dynamic, 2.0), (RopeScalingKind.dynamic, 2.0)),
    ],
)
def test_rope_scaling_and_factor_complete_each_other(given, derived):
    assert resolve_rope(*given) == derived


@pytest.mark.parametrize("hostname", ["localhost", "4f2a9c1d", ""])
def test_a_hostname_that_is_not_an_address_becomes_every_address(config, caplog, hostname):
    assert resolve(with_flags(config, hostname=hostname), {}).http.hostname == "0.0.0.0"
    assert len(caplog.messages) == 1 and "and has no effect" in caplog.messages[0]


@pytest.mark.parametrize("hostname", ["127.0.0.1", "::1", "::"])
def test_an_address_stays_as_it_is(config, caplog, hostname):
    assert resolve(with_flags(config, hostname=hostname), {}).http.hostname == hostname
    assert caplog.messages == []


@pytest.mark.parametrize(("given", "model_config", "budget"), TABLES["prefill_budgets"])
def test_prefill_budget_is_the_context_within_bounds(config, given, model_config, budget):
    plan = with_flags(resolve(config, {}), **given)
    assert with_prefill_budget(plan, model_config).tokens.max_batch_prefill_tokens == budget


def test_local_directories_become_absolute_and_hub_ids_stay(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    assert resolve(with_flags(config, model_id=tmp_path.name), {}).model_id == str(tmp_path)
    assert resolve(with_flags(config, model_id="org/some-model_1.5"), {}).model_id == "org/some-model_1.5"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "has no config.json: is it the directory of a model?"),
        (b"{", "is not valid JSON"),
        (b"[]", "does not hold a JSON object"),
    ],
)
def test_a_directory_without_a_readable_config_is_refused(config, tmp_path, content, told):
    (tmp_path / "config.json").unlink()
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    error = error_of(config)
    assert told in error
    assert str(tmp_path) in error
    assert "\n" not in error


def test_a_quantized_model_is_refused_by_its_format_wherever_it_lies(config, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "aqlm"}}))
    for changes in ({"model_id": str(other)}, {"weights_cache_override": str(other)}):
        error = error_of(config, **changes)
        assert "quantized as aqlm, which is not supported: quantize the model again" in error and "\n" not in error


def test_a_config_that_is_a_pipe_is_refused_at_once(config, tmp_path):
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    assert "not a regular file" in error_of(config)


def test_cuda_graphs_are_numbers_of_rows_and_zero_means_no_graphs(config):
    for right in ("1,2,32", "0", "0,0"):
        assert resolve(with_flags(config, cuda_graphs=right), {}).shard.cuda_graphs == right
    for wrong in ("1,", "-1", "1 2", "x"):
        assert "is not a list of batch sizes" in error_of(config, cuda_graphs=wrong)


def test_the_context_of_a_hub_model_is_read_from_the_cache(config, tmp_path):
    repository = tmp_path / "models--org--m"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    plan = with_flags(resolve(config, {}), model_id="org/m", huggingface_hub_cache=str(tmp_path))
    assert model_config(plan) == {}
    (snapshot / "config.json").write_text('{"max_position_embeddings": 512}')
    assert model_config(plan) == {"max_position_embeddings": 512}
    assert model_config(with_flags(plan, revision="other")) == {}


@pytest.mark.parametrize("model_id", ["hf.co/org/name:Q4_K_M", "org/name:Q4_K_M"])
def test_a_file_of_the_hub_has_one_name_for_all_programs(model_id: str) -> None:
    assert locate(model_id, None) == "org/name:Q4_K_M"
