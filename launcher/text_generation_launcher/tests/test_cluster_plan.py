"""Which flags of fronts and replicas go together, and how GPUs are shared out."""

import pytest

from text_generation_common.errors import CommandError, CredentialsError
from text_generation_common.flags.cluster import ClusterFlags, Way
from text_generation_common.flags.declaration import with_flags
from text_generation_launcher.cluster_plan import resolve_cluster, shards_of_each, share_out, visible_devices
from text_generation_launcher.config import slices
from text_generation_launcher.errors import NotEnoughCUDADevices

ENGINE = {"engine_only": True, "engine_address": "10.0.0.1:0", "insecure_cluster": True}
RAY = {"ray": "auto", "replicas": 2, "insecure_cluster": True}
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


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (ENGINE | {"replicas": 2}, "--engine-only and --replicas exclude each other"),
        (ENGINE | {"engines": ("h:1",)}, "--engine-only and --engines exclude each other"),
        (FRONTS | {"replicas": 2}, "--engines and --replicas exclude each other"),
        (FRONTS | {"max_replicas": 2}, "--engines and --max-replicas exclude each other"),
        ({"max_replicas": 3, "replicas": 2}, "--replicas and --max-replicas exclude each other"),
        ({"max_replicas": 3, "min_replicas": 4}, "--min-replicas 4 is greater than --max-replicas 3"),
        ({"min_replicas": 2}, "--min-replicas needs --max-replicas"),
        ({"max_replicas": 65}, "one machine has at most 64"),
        (FRONTS | {"engines_dns": "n:1"}, "--engines and --engines-dns exclude each other"),
        (FRONTS | {"engines_file": "f"}, "--engines and --engines-file exclude each other"),
        ({"fronts_on_every_node": True, "replicas": 2}, "--fronts-on-every-node needs --ray"),
        ({"engines_file": "f", "replicas": 2}, "--engines-file and --replicas exclude each other"),
        (ENGINE | {"api_workers": 2}, "--api-workers and --engine-only exclude each other"),
        ({"engine_only": True}, "--engine-only needs --engine-address"),
        ({"engine_address": "h:1"}, "--engine-address is for --engine-only"),
        (FRONTS | {"engine_metrics_port": 1}, "--engine-metrics-port is for --engine-only and --ray"),
        (RAY | {"engine_metrics_tries": 2}, "--engine-metrics-tries is for --engine-only"),
        (RAY | {"engine_metrics_port": 65521}, "--engine-metrics-port 65521: with --ray engines share 16 ports"),
        ({"replicas": 1, "engine_address_file": "/x"}, "--engine-address-file is for --engine-only"),
        (ENGINE | {"engine_address_file": "/none/x"}, "its folder is missing"),
        (ENGINE | {"engine_address": "0.0.0.0:1"}, "every network of the machine"),
        (FRONTS | {"engines": ("h:0",)}, "port 0"),
        ({"resume_across_builds": True}, "--resume-across-builds is for fronts"),
        (FRONTS | {"tls_dir": "/none"}, "--tls-dir and --insecure-cluster exclude each other"),
        ({"engines": ("h:1",), "tls_dir": "/none"}, "/none is not a folder"),
        ({"replicas": 2, "insecure_cluster": True}, "--insecure-cluster is for ports between machines"),
        ({"tls_dir": "/tmp"}, "--tls-dir is for ports between machines"),
    ],
)
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
