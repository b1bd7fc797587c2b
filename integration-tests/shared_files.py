"""Runs pytest with files of tests that several processes share: each takes the last file from a list when it has run
its last one, or the first file if that is one of FIRST. `python -P shared_files.py LIST FIRST ARGUMENTS_OF_PYTEST`.

pytest-xdist would collect all tests in each of its processes, and send every report of a test to one more process."""

import fcntl
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest


class UnreadModule(pytest.Module):
    """A file whose tests are not known before a process takes it."""

    is_taken = False

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        return super().collect() if self.is_taken else []


class SharedFiles:
    """pytest's plugin. `paths`: a file of paths, one a line. `first`: ends of paths that this process takes from the
    beginning."""

    def __init__(self, paths: Path, first: Sequence[str]) -> None:
        self._paths = paths
        self._first = tuple(first)
        self._modules: dict[str, UnreadModule] = {}

    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> pytest.Module:
        module = self._modules[str(module_path)] = UnreadModule.from_parent(parent, path=module_path)
        return module

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        count = 0
        for path in self._taken():
            items = self._items(session, self._modules.pop(path))
            count += len(items)
            # Behind the last test of a file, if it has any, all fixtures end that are not the session's.
            for item, following in zip(items, [*items[1:], session], strict=False):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        session.testscollected = count
        return True

    def _items(self, session: pytest.Session, module: UnreadModule) -> list[pytest.Item]:
        """The chosen tests of a file, as pytest collects them."""
        module.is_taken = True
        session.items = [*session.genitems(module)]
        session.config.hook.pytest_collection_modifyitems(session=session, config=session.config, items=session.items)
        session.config.hook.pytest_collection_finish(session=session)
        return session.items

    def _taken(self) -> Iterator[str]:
        while path := self._take():
            yield path

    def _take(self) -> str:
        """The next path; empty if none is left."""
        with self._paths.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            paths = file.read().split("\n")
            taken = paths.pop(0 if paths[0].endswith(self._first) else -1)
            file.seek(0)
            file.truncate()
            file.write("\n".join(paths))
        return taken


if __name__ == "__main__":
    del __file__  # multiprocessing would run this file in each process that it spawns, which would import pytest
    raise SystemExit(pytest.main(sys.argv[3:], plugins=[SharedFiles(Path(sys.argv[1]), sys.argv[2].split())]))
