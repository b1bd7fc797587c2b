"""Checks the flags of fronts and replicas, and shares out this machine's GPUs."""

import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from text_generation_common.cluster.endpoints import TcpEndpoint, parse_endpoint
from text_generation_common.errors import ArgumentValidation, CredentialsError
from text_generation_common.flags.cluster import (
    MAX_LOCAL_REPLICAS,
    RAY_METRICS_PORTS,
    ClusterFlags,
    EngineListFlags,
    Way,
)
from text_generation_common.flags.declaration import flag_name
from text_generation_common.memory import usable_cores
from text_generation_launcher.errors import NotEnoughCUDADevices

logger = logging.getLogger("text_generation_launcher")

# Flags that ask for one way to serve, and exclude those of the others.
_WAYS = (("engine_only",), ("engines", "engines_dns", "engines_file"), ("replicas", "max_replicas", "ray"))


def resolve_cluster(flags: ClusterFlags) -> ClusterFlags:
    """The flags with their defaults. Raises ArgumentValidation or CredentialsError."""
    flags = replace(flags, engine_list=_with_addresses_apart(flags.engine_list))
    _check_ways(flags)
    flags = _with_least_replicas(flags)
    for endpoint in _endpoints(flags):
        if isinstance(endpoint, TcpEndpoint) and flags.security.tls_dir is None and not flags.security.insecure_cluster:
            raise CredentialsError(
                f"{endpoint.target} needs certificates, because other machines can reach it",
                "give --tls-dir (`text-generation-launcher certs` makes them), or --insecure-cluster in a private"
                " network",
            )
    _check_security(flags)
    _check_metrics_port(flags)
    _check_ray(flags)
    has_fronts = flags.way in (Way.REPLICAS, Way.FRONTS, Way.RAY)
    return replace(flags, api_workers=max(1, flags.api_workers) if has_fronts else 0)


def _with_addresses_apart(flags: EngineListFlags) -> EngineListFlags:
    """Each address by itself; on a command line there may be several with commas between."""
    addresses = (address.strip() for given in flags.engines for address in given.split(","))
    return replace(flags, engines=tuple(filter(None, addresses)))


def _check_ways(flags: ClusterFlags) -> None:
    given = _given(flags)
    ways = [[name for name in names if name in given] for names in _WAYS]
    asked = [names[0] for names in ways if names]
    if len(asked) > 1:
        raise ArgumentValidation(
            f"{flag_name(asked[0])} and {flag_name(asked[1])} exclude each other", "leave one of them out"
        )
    if len(ways[1]) > 1:
        first, second, *_ = map(flag_name, ways[1])
        raise ArgumentValidation(f"{first} and {second} exclude each other", "leave one of them out")
    if flags.way is Way.ENGINE:
        if "engine_address" not in given:
            raise ArgumentValidation("--engine-only needs --engine-address", "give HOST:PORT, as fronts reach it")
        if flags.api_workers:
            raise ArgumentValidation("--api-workers and --engine-only exclude each other", "leave one of them out")
    for name in ("engine_address", "engine_address_file", "engine_metrics_tries", "end_without_fronts"):
        if name in given and flags.way is not Way.ENGINE:
            raise ArgumentValidation(f"{flag_name(name)} is for --engine-only: leave it out, or add --engine-only")
    if "resume_across_builds" in given and flags.way in (Way.ENGINE, Way.ROUTER):
        raise ArgumentValidation("--resume-across-builds is for fronts: leave it out here")
    file = flags.engine.engine_address_file
    if file is not None and not os.access(Path(file).absolute().parent, os.W_OK):
        raise ArgumentValidation(f"--engine-address-file {file}: its folder is missing or not writable: check the path")


def _with_least_replicas(flags: ClusterFlags) -> ClusterFlags:
    """With the number of replicas at the start, if it follows the load."""
    least, most = flags.min_replicas, flags.max_replicas
    if most is None:
        if least is not None:
            raise ArgumentValidation("--min-replicas needs --max-replicas", "give both, or --replicas alone")
        return flags
    if flags.replicas is not None:
        raise ArgumentValidation(
            "--replicas and --max-replicas exclude each other", "give --min-replicas for the start"
        )
    if least is not None and least > most:
        raise ArgumentValidation(f"--min-replicas {least} is greater than --max-replicas {most}", "swap them")
    return replace(flags, replicas=least or 1)


def _given(flags: ClusterFlags) -> set[str]:
    values: dict[str, object] = {
        "replicas": flags.replicas,
        "max_replicas": flags.max_replicas,
        "ray": flags.on_ray.ray,
        "engine_only": flags.engine.engine_only,
        "engine_address": flags.engine.engine_address,
        "engine_address_file": flags.engine.engine_address_file,
        "engine_metrics_port": flags.engine.engine_metrics_port,
        "engine_metrics_tries": flags.engine.engine_metrics_tries > 1,
        "end_without_fronts": flags.engine.end_without_fronts,
        "engines": flags.engine_list.engines,
        "engines_dns": flags.engine_list.engines_dns,
        "engines_file": flags.engine_list.engines_file,
        "resume_across_builds": flags.engine_list.resume_across_builds,
    }
    return {name for name, value in values.items() if value not in (None, False, (), 0)}


def _endpoints(flags: ClusterFlags) -> list[object]:
    listening = [flags.engine.engine_address] if flags.way is Way.ENGINE else []
    others = [*flags.engine_list.engines, flags.engine_list.engines_dns]
    found: list[object] = [parse_endpoint(text, listens=True) for text in listening if text]
    return found + [parse_endpoint(text) for text in others if text]


def _check_security(flags: ClusterFlags) -> None:
    security = flags.security
    if security.tls_dir is not None and security.insecure_cluster:
        raise ArgumentValidation("--tls-dir and --insecure-cluster exclude each other", "leave one of them out")
    if flags.way in (Way.ROUTER, Way.REPLICAS) and (security.tls_dir is not None or security.insecure_cluster):
        name = "--insecure-cluster" if security.insecure_cluster else "--tls-dir"
        raise ArgumentValidation(f"{name} is for ports between machines, and this server opens none: leave it out")
    if flags.engine_list.engines_file is not None and security.tls_dir is None and not security.insecure_cluster:
        raise CredentialsError(
            "--engines-file needs certificates, because other machines can reach its engines",
            "give --tls-dir (`text-generation-launcher certs` makes them), or --insecure-cluster in a private network",
        )
    if security.tls_dir is not None and not Path(security.tls_dir).is_dir():
        raise ArgumentValidation(f"--tls-dir {security.tls_dir} is not a folder: check the path")


def _check_metrics_port(flags: ClusterFlags) -> None:
    first, greatest = flags.engine.engine_metrics_port, 65536 - RAY_METRICS_PORTS
    if first is None:
        return
    if flags.way not in (Way.ENGINE, Way.RAY):
        raise ArgumentValidation(
            "--engine-metrics-port is for --engine-only and --ray: leave it out, or add one of them"
        )
    if flags.way is Way.RAY and first > greatest:
        raise ArgumentValidation(
            f"--engine-metrics-port {first}: with --ray engines share {RAY_METRICS_PORTS} ports from it on, and the"
            " last port is 65535",
            f"give {greatest} or less",
        )


def _check_ray(flags: ClusterFlags) -> None:
    if flags.way is Way.RAY:
        if flags.on_ray.ray != "auto":
            parse_endpoint(flags.on_ray.ray or "")
        if flags.security.tls_dir is None and not flags.security.insecure_cluster:
            raise CredentialsError(
                "the engines of --ray need certificates, because other machines can reach them",
                "give --tls-dir (`text-generation-launcher certs` makes it), the same on each machine, or"
                " --insecure-cluster in a private network",
            )
        if importlib.util.find_spec("ray") is None:
            raise ArgumentValidation("--ray needs the package ray: install tgi-py[ray] on each machine of the cluster")
    elif flags.on_ray.fronts_on_every_node:
        raise ArgumentValidation("--fronts-on-every-node needs --ray: add --ray auto, or leave it out")
    elif flags.on_ray.replica_cores is not None:
        raise ArgumentValidation("--replica-cores is for --ray: leave it out here")
    elif (flags.replica_limit or 1) > MAX_LOCAL_REPLICAS:
        raise ArgumentValidation(
            f"{flags.replica_limit} replicas: one machine has at most {MAX_LOCAL_REPLICAS}; see --ray"
        )


def share_out(flags: ClusterFlags, num_shard: int, devices: tuple[str, ...]) -> None:
    """Checks that the replicas find room. Raises NotEnoughCUDADevices."""
    replicas = flags.replica_limit or 1
    needed = replicas * num_shard
    if devices and len(devices) < needed:
        raise NotEnoughCUDADevices(
            f"{replicas} replicas of {num_shard} shards need {needed} GPUs, and {len(devices)} are visible",
            "choose fewer replicas or a smaller --num-shard, or set CUDA_VISIBLE_DEVICES",
        )
    if not devices and needed > (cores := usable_cores()):
        logger.warning("%d shards share %d cores: steps wait for each other", needed, cores)


def shards_of_each(replicas: int, num_devices: int) -> int:
    """Number of a replica's shards when --num-shard is not given: GPUs are shared out."""
    return max(1, num_devices // replicas)


def visible_devices(environ: Mapping[str, str], count_cards: Callable[[], int]) -> tuple[str, ...]:
    """The GPUs that this launcher sees, as CUDA_VISIBLE_DEVICES names them. `count_cards` is called only if no variable
    names them."""
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        value = environ.get(name)
        if value is not None and value not in ("all", "void"):
            named = tuple(device.strip() for device in value.split(",") if device.strip())
            # Inside a container with NVIDIA_VISIBLE_DEVICES=2,3 the two cards have the numbers 0 and 1.
            return named if name == "CUDA_VISIBLE_DEVICES" else tuple(map(str, range(len(named))))
    return tuple(map(str, range(count_cards())))
