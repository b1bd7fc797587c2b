"""The flags and environment variables that the children get."""

import json
import stat
from pathlib import Path

import pytest

from text_generation_common.flags.declaration import with_flags
from text_generation_common.flags.http import AccessFlags, HttpFlags
from text_generation_common.flags.kinds import AdmissionMode, CpuTarget, Dtype, LoadFormat, RopeScalingKind
from text_generation_common.flags.model import CacheFlags, ComputeFlags, FileFlags, ShardFlags
from text_generation_common.flags.process import ProcessFlags
from text_generation_common.flags.requests import RequestFlags, SchedulingFlags, TokenFlags
from text_generation_common.places import ServerPlace
from text_generation_common.secret_values import is_secret
from text_generation_launcher import commands
from text_generation_launcher.commands import Programs
from text_generation_launcher.config import LaunchPlan, ReplicaSite

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

PROGRAMS = Programs("/bin/server", "/bin/router")
PLACE = ServerPlace("/run/shard", None, "")
SITE = ReplicaSite(PLACE)
PLAIN = LaunchPlan(
    model_id="/models/m",
    num_shard=1,
    load_format=LoadFormat.auto,
    files=FileFlags(),
    cache=CacheFlags(),
    compute=ComputeFlags(),
    shard=ShardFlags(),
    requests=RequestFlags(),
    tokens=TokenFlags(max_batch_prefill_tokens=2048),
    scheduling=SchedulingFlags(),
    http=HttpFlags(),
    access=AccessFlags(),
    process=ProcessFlags(),
)


def options(command, skip: int) -> dict[str, object]:
    """`--a 1 --b --a 2` as {"--a": ["1", "2"], "--b": []}. Words before the first flag are skipped."""
    found: dict[str, list[str]] = {}
    for word in command.argv[skip:]:
        if word.startswith("--"):
            values = found.setdefault(word, [])
        else:
            values.append(word)
    return found


def test_download_gets_tgi_s_command_line():
    command = commands.download(with_flags(PLAIN, revision="main"), PROGRAMS, {})
    assert command.argv[:3] == ("/bin/server", "download-weights", "/models/m")
    assert options(command, 3) == {
        "--extension": [".safetensors"],
        "--logger-level": ["INFO"],
        "--json-output": [],
        "--revision": ["main"],
        "--progress-interval": ["0.5"],
    }


def test_download_and_shards_get_the_flag_for_random_weights():
    config = with_flags(PLAIN, load_format=LoadFormat.dummy)
    told = (commands.download(config, PROGRAMS, {}), commands.shard(config, PROGRAMS, {}, SITE, 0, 1, cores=2))
    assert [options(command, 3)["--load-format"] for command in told] == [["dummy"], ["dummy"]]


def test_shard_gets_no_flags_beyond_the_given_values():
    command = commands.shard(PLAIN, PROGRAMS, {"HOME": "/h", "LOG_LEVEL": "debug"}, SITE, rank=0, epoch=1, cores=6)
    assert command.argv[:3] == ("/bin/server", "serve", "/models/m")
    assert options(command, 3) == {
        "--uds-path": ["/run/shard"], "--logger-level": ["DEBUG"], "--json-output": [], "--activations": ["model"]
    }  # fmt: skip
    assert command.env == {
        "HOME": "/h",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "TGI_EPOCH": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "6",
        "GOMP_SPINCOUNT": "1000",
        "CUDA_MEMORY_FRACTION": "1.0",
        "MAX_LORAS": "64",
        "MAX_CPU_LORAS": "64",
        "MAX_LORA_RANK": "256",
    }


def test_shard_gets_all_given_values():
    config = with_flags(
        PLAIN,
        num_shard=2,
        dtype=Dtype.float32,
        revision="r1",
        max_input_tokens=10,
        max_total_tokens=20,
        max_batch_size=3,
        rope_scaling=RopeScalingKind.dynamic,
        rope_factor=2.0,
        watermark_gamma=0.25,
        watermark_delta=1.5,
        cuda_graphs="1,2,4",
        cuda_memory_fraction=0.5,
        cpu_target=CpuTarget.avx2,
        huggingface_hub_cache="/cache",
        weights_cache_override="/override",
    )
    command = commands.shard(config, PROGRAMS, {"HF_API_TOKEN": "t"}, SITE, rank=1, epoch=4, cores=7)
    flags = options(command, 3)
    assert flags["--sharded"] == []
    assert (flags["--dtype"], flags["--revision"], flags["--max-input-tokens"]) == (["float32"], ["r1"], ["10"])
    expected = TABLES["shard_env"]
    assert {name: command.env.get(name) for name in expected} == expected
    assert "MAX_BATCH_SIZE" not in command.env, "the router alone limits the batch"
    assert command.log_fields == {"rank": 1}


def test_router_gets_its_flags_and_the_bound_socket():
    config = with_flags(
        PLAIN, max_input_tokens=10, cors_allow_origin=("http://a", "http://b"), disable_grammar_support=True
    )
    command = commands.router(config, PROGRAMS, {"LOG_LEVEL": "debug"}, PLACE, listen_fd=7, port=3001, launcher_fd=9)
    assert command.pass_fds == (7, 9)
    assert command.env == {"LOG_LEVEL": "debug"}
    assert options(command, 1) == TABLES["router_flags"]


def test_scheduling_flags_override_the_router_s_environment():
    config = with_flags(PLAIN, prefix_caching=False, admission=AdmissionMode.RESERVE, max_queued_tokens=5)
    environ = {"PREFIX_CACHING": "true", "ADMISSION": "peak"}
    flags = options(commands.router(config, PROGRAMS, environ, PLACE, listen_fd=7, port=1, launcher_fd=9), 1)
    assert flags["--no-prefix-caching"] == [] and "--prefix-caching" not in flags
    assert (flags["--admission"], flags["--max-queued-tokens"]) == (["reserve"], ["5"])


@pytest.mark.parametrize(("given", "cores", "threads"), [("5", 8, "5"), (None, 8, "2"), (None, 2, "1")])
def test_shards_share_the_cores_unless_the_user_says_otherwise(given, cores, threads):
    environ = {"OMP_NUM_THREADS": given} if given else {}
    command = commands.shard(with_flags(PLAIN, num_shard=4), PROGRAMS, environ, SITE, rank=0, epoch=1, cores=cores)
    assert command.env["OMP_NUM_THREADS"] == threads


def test_the_key_of_the_block_hashes_reaches_fronts_and_engines_by_the_environment_only():
    key = "0123456789abcdef" * 4
    environ = {"BLOCK_HASH_KEY": key}
    plan = with_flags(PLAIN, api_workers=1)
    with_it = [
        commands.front(plan, PROGRAMS, environ, PLACE, 0, listen_fd=3, port=1, launcher_fd=4),
        commands.engine(plan, PROGRAMS, environ, SITE, "unix:///e", launcher_fd=5),
    ]
    without = [
        commands.shard(plan, PROGRAMS, environ, SITE, rank=0, epoch=1, cores=1),
        commands.download(plan, PROGRAMS, environ),
    ]
    assert all(command.env["BLOCK_HASH_KEY"] == key for command in with_it)
    assert all("BLOCK_HASH_KEY" not in command.env for command in without)
    assert not any(key in word for command in (*with_it, *without) for word in command.argv)


def test_the_key_of_the_digests_reaches_fronts_by_the_environment_only():
    environ, plan = {"USAGE_KEY": "usage-key"}, with_flags(PLAIN, api_workers=1)
    front = commands.front(plan, PROGRAMS, environ, PLACE, 0, listen_fd=3, port=1, launcher_fd=4)
    others = [
        commands.engine(plan, PROGRAMS, environ, SITE, "unix:///e", launcher_fd=5),
        commands.shard(plan, PROGRAMS, environ, SITE, rank=0, epoch=1, cores=1),
        commands.download(plan, PROGRAMS, environ),
    ]
    assert front.env["USAGE_KEY"] == "usage-key" and is_secret("USAGE_KEY")
    assert not any("usage-key" in [*other.env.values(), *other.argv] for other in others)
    assert "usage-key" not in front.argv


def test_keys_reach_the_router_s_environment_and_nothing_else():
    config = with_flags(PLAIN, api_key=("key-1", "key-2"), api_key_file="/keys", closed_routes=True)
    environ = {"API_KEY": "of the environment", "ADMIN_API_KEY": "of administrators"}
    router = commands.router(config, PROGRAMS, environ, PLACE, listen_fd=7, port=1, launcher_fd=9)
    assert router.env["API_KEY"] == "key-1 key-2"
    assert "key-1" not in " ".join(router.argv)
    flags = options(router, 1)
    assert (flags["--api-key-file"], flags["--closed-routes"]) == (["/keys"], [])
    others = [
        commands.download(config, PROGRAMS, environ),
        commands.shard(config, PROGRAMS, environ, SITE, rank=0, epoch=1, cores=1),
        commands.engine(config, PROGRAMS, environ, SITE, "unix:///e", launcher_fd=5),
        commands.ray_driver(config, environ, port=1, launcher_fd=5),
    ]
    assert not any(other.env.keys() & {"API_KEY", "ADMIN_API_KEY"} for other in others)
    assert "API_KEY" not in commands.router(PLAIN, PROGRAMS, {"API_KEY": ""}, PLACE, 7, 1, 9).env


def test_faults_reach_the_children_of_a_launcher_with_the_testing_flag():
    environ = {"FAILPOINTS": "shard.step:kill"}

    def children(config):
        yield commands.shard(config, PROGRAMS, environ, SITE, rank=0, epoch=1, cores=1)
        yield commands.router(config, PROGRAMS, environ, PLACE, listen_fd=7, port=1, launcher_fd=9)

    for child in children(PLAIN):
        assert "--testing" not in child.argv and "FAILPOINTS" not in child.env
    for child in children(with_flags(PLAIN, testing=True)):
        assert "--testing" in child.argv and child.env["FAILPOINTS"] == "shard.step:kill"


def test_a_limit_of_zero_is_passed_on_and_not_dropped():
    command = commands.router(
        with_flags(PLAIN, max_waiting_tokens=0), PROGRAMS, {}, PLACE, listen_fd=7, port=1, launcher_fd=9
    )
    assert options(command, 1)["--max-waiting-tokens"] == ["0"]


def test_the_older_token_name_wins_for_every_child():
    environ = {"HF_TOKEN": "new", "HF_API_TOKEN": "old"}
    assert commands.download(PLAIN, PROGRAMS, environ).env["HF_TOKEN"] == "old"
    assert commands.router(PLAIN, PROGRAMS, environ, PLACE, 3, 1, 4).env["HF_TOKEN"] == "old"
    assert commands.router(PLAIN, PROGRAMS, {"HF_TOKEN": "new"}, PLACE, 3, 1, 4).env["HF_TOKEN"] == "new"


@pytest.mark.parametrize(
    ("log_level", "level"),
    [
        ("info", "INFO"),
        ("warn", "WARNING"),
        ("trace", "DEBUG"),
        ("error,text_generation_router=info", "INFO"),
        ("info,text_generation_router=debug", "DEBUG"),
        ("", "INFO"),
    ],
)
def test_shards_log_at_the_most_verbose_level_of_the_filter(log_level, level):
    assert commands.most_verbose(log_level) == level


def test_programs_beside_the_interpreter_come_before_path(tmp_path: Path):
    for folder in ("own", "path"):
        (tmp_path / folder).mkdir()
        for name in ("text-generation-server", "text-generation-router"):
            (tmp_path / folder / name).touch(mode=stat.S_IRWXU)
    own = tmp_path / "own"
    assert commands.find_programs([own], str(tmp_path / "path")).server == str(own / "text-generation-server")
    (own / "text-generation-server").unlink()
    found = commands.find_programs([own], str(tmp_path / "path"))
    assert found.server == str(tmp_path / "path" / "text-generation-server")
    assert found.router == str(own / "text-generation-router")


@pytest.mark.parametrize("is_off", [False, True])
def test_a_shard_learns_that_there_are_no_grammars(is_off):
    config = with_flags(PLAIN, disable_grammar_support=is_off)
    command = commands.shard(config, PROGRAMS, {}, SITE, rank=0, epoch=1, cores=2)
    assert ("--disable-grammar-support" in command.argv) == is_off
