"""Says which numbers of shards can serve a model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers of heads of the whole model."""

    queries: int
    keys: int  # each with values

    def fit(self, shards: int) -> bool:
        """Whether all shards get the same number of heads. Several shards may have the same key head."""
        return self.queries % shards == 0 and (self.keys % shards == 0 or shards % self.keys == 0)

    def refusal(self, shards: int) -> str | None:
        """One line with the numbers of shards that fit, or None if `shards` does."""
        if self.fit(shards):
            return None
        fitting = ", ".join(str(count) for count in range(1, self.queries + 1) if self.fit(count))
        return (
            f"--num-shard {shards} cannot divide the {self.queries} attention heads and {self.keys} key and value heads"
            f" of this model evenly: choose one of {fitting}"
        )


def one_shard_only(model_type: str, shards: int) -> str:
    """Refuses several shards for a model that transformers computes."""
    return (
        f"--num-shard {shards} is not supported for model type {ascii(model_type)[1:-1][:60]}, which transformers"
        " computes, in one process: choose --num-shard 1"
    )
