"""Which suspects an engine takes: of one group at a time (fleet/suspects.py). All its fronts share the trial."""


class Trial:
    def __init__(self) -> None:
        self._group = ""
        self._count = 0  # suspects of the group that have neither made a token here nor ended

    def takes(self, group: str) -> bool:
        """Whether a request of this group may come. An empty name: it is not a suspect."""
        return not group or not self._count or group == self._group

    def enter(self, group: str, count: int) -> None:
        """Takes `count` suspects of a group that `takes` has let in."""
        assert self.takes(group)
        self._group = group
        self._count += count

    def leave(self) -> None:
        """One of the suspects is not one any more."""
        self._count -= 1
