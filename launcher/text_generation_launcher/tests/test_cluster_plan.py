"""Which flags of fronts and replicas go together, and how GPUs are shared out."""

import json
from pathlib import Path

import pytest

from text_generation_common.errors import CommandError, CredentialsError
from text_generation_common.flags.cluster import ClusterFlags, Way
from text_generation_common.flags.declaration import with_flags
from text_generation_launcher.cluster_plan import resolve_cluster, shards_of_each, share_out, visible_devices
from text_generation_launcher.config import slices
from text_generation_launcher.errors import NotEnoughCUDADevices

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

ENGINE = {"engine_only": True, "engine_address": "10.0.0.1:0", "insecure_cluster": True}
FRONTS = {"engines": ("10.0.0.1:1",), "insecure_cluster": True}


def resolved(**values: object) -> ClusterFlags:
    return resolve_cluster(with_flags(ClusterFlags(), **values))


@pytest.mark.parametrize(
    ("values", "way", "workers"),
    [
        ({}, Way.ROUTER, 0),
        ({"api_workers": 2}, Way.REPLICAS, 2),
        ({"replicas": 3}, Way.REPLICAS, 1),
        ({"max_replicas": 3}, Way.REPLICAS, 1),
        (FRONTS | {"api_workers": 4}, Way.FRONTS, 4),
        ({"engines_dns": "engines.svc:9000", "insecure_cluster": True}, Way.FRONTS, 1),
        ({"engines_file": "/run/engines", "insecure_cluster": True}, Way.FRONTS, 1),
        (ENGINE, Way.ENGINE, 0),
    ],
)
def test_flags_decide_what_one_launcher_starts(values, way, workers):
    found = resolved(**values)
    assert (found.way, found.api_workers) == (way, workers)


def test_addresses_may_stand_behind_each_other_with_commas():
    given = resolved(engines=("10.0.0.1:1,10.0.0.2:2", " h:3 ,"), insecure_cluster=True)
    assert given.engine_list.engines == ("10.0.0.1:1", "10.0.0.2:2", "h:3")


@pytest.mark.parametrize(("values", "why"), TABLES["contradictions"])
def test_what_does_not_go_together_is_refused_by_name(values, why):
    with pytest.raises(CommandError) as refused:
        resolved(**values)
    assert why in refused.value.reason


@pytest.mark.parametrize("values", [FRONTS, ENGINE, {"engines_dns": "n:1"}, {"engines_file": "f"}])
def test_ports_between_machines_need_certificates(values):
    with pytest.raises(CredentialsError, match="needs certificates"):
        resolved(**values | {"insecure_cluster": False})


def test_gpus_are_those_that_the_environment_names_or_all():
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "3, GPU-a"}, lambda: 9) == ("3", "GPU-a")
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}, lambda: 9) == ()
    assert visible_devices({"NVIDIA_VISIBLE_DEVICES": "5,6"}, lambda: 9) == ("0", "1")
    assert visible_devices({"NVIDIA_VISIBLE_DEVICES": "all"}, lambda: 2) == ("0", "1")
    assert visible_devices({}, lambda: 0) == ()


def test_a_number_that_follows_the_load_begins_with_the_least_and_has_room_for_the_greatest():
    assert [resolved(max_replicas=3, min_replicas=least).replicas for least in (None, 2, 3)] == [1, 2, 3]
    flags = resolved(max_replicas=3)
    share_out(flags, 2, tuple("012345"))
    with pytest.raises(NotEnoughCUDADevices, match="3 replicas of 2 shards need 6 GPUs, and 5 are visible"):
        share_out(flags, 2, tuple("01234"))


def test_gpus_are_shared_out_in_slices_and_too_few_are_refused(caplog):
    assert slices(("0", "1", "2", "3", "4"), 2) == [("0", "1"), ("2", "3")]
    assert slices(("0",), 2) == []
    assert [shards_of_each(3, devices) for devices in (8, 3, 0)] == [2, 1, 1]
    flags = with_flags(ClusterFlags(), replicas=3)
    share_out(flags, 2, tuple("012345"))
    with pytest.raises(NotEnoughCUDADevices, match="3 replicas of 2 shards need 6 GPUs, and 5 are visible"):
        share_out(flags, 2, tuple("01234"))
    assert not caplog.records
    share_out(flags, 10_000, ())
    assert "30000 shards share" in caplog.text
