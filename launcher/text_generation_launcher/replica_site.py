"""What is a replica's own on this machine: its place, its name, its GPUs."""

from dataclasses import dataclass

from text_generation_common.places import ServerPlace


@dataclass(frozen=True, slots=True)
class ReplicaSite:
    """The first replica's site is also that of a server without replicas."""

    place: ServerPlace
    number: int = 0
    is_one_of_several: bool = False
    devices: tuple[str, ...] = ()  # GPUs, as CUDA_VISIBLE_DEVICES names them; (): all that the launcher sees

    @property
    def suffix(self) -> str:
        """What tells this replica's processes from those of others, in names within log lines."""
        return f" {self.number}" if self.is_one_of_several else ""

    @property
    def log_fields(self) -> dict[str, object]:
        return {"replica": self.number} if self.is_one_of_several else {}


def slices(devices: tuple[str, ...], num_shard: int) -> list[tuple[str, ...]]:
    """The GPUs of each replica; a rest too small for a replica is left out."""
    return [devices[start : start + num_shard] for start in range(0, len(devices) - num_shard + 1, num_shard)]
