"""How child processes start and end, and how their output becomes lines."""

import asyncio
import errno
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from text_generation_common.forked import BROKEN_STATUS
from text_generation_launcher import process
from text_generation_launcher.commands import Command
from text_generation_launcher.process import MAX_LINE_BYTES, Child, LineReader
from text_generation_launcher.router_template import RouterTemplate
from text_generation_launcher.standby import ForkedChild, ForkedProcess, Templates


def split(*chunks: bytes) -> list[str]:
    lines: list[str] = []

    async def read() -> None:
        reader = LineReader(lines.append)
        for chunk in chunks:
            reader.data_received(chunk)
        reader.connection_lost(None)

    asyncio.run(read())
    return lines


def test_lines_are_whole_however_the_pipe_cuts_them():
    text = "first\nsecond: ähnlich\n\nlast without an end".encode()
    expected = ["first", "second: ähnlich", "last without an end"]
    assert split(text) == expected
    assert split(*(text[i : i + 1] for i in range(len(text)))) == expected


def test_a_line_without_end_does_not_grow_for_ever():
    lines = split(*[b"x" * 65536] * 8)
    assert sum(map(len, lines)) == 8 * 65536
    assert max(map(len, lines)) <= MAX_LINE_BYTES + 65536
    assert len(lines) > 1


def test_bytes_that_are_not_utf_8_are_shown():
    assert split(b"\xff\xfe ok\n") == ["\ufffd\ufffd ok"]


def python(code: str) -> Command:
    return Command("child", (sys.executable, "-S", "-c", code), dict(os.environ))


def test_a_program_that_cannot_run_leaves_no_open_file():
    async def run() -> tuple[int, int]:
        before = len(os.listdir("/dev/fd"))
        with pytest.raises(FileNotFoundError):
            await Child.start(Command("child", ("/no/such/program",), {}))
        await asyncio.sleep(0)  # a transport closes its file in the loop's next turn
        return before, len(os.listdir("/dev/fd"))

    before, after = asyncio.run(run())
    assert after == before


def test_a_child_s_status_comes_with_all_its_output():
    async def run() -> tuple[int, str]:
        child = await Child.start(python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(5)"))
        return await child.exited, child.last_lines

    status, lines = asyncio.run(run())
    assert status == 5
    assert sorted(lines.splitlines()) == ["err", "out"]


def test_output_that_comes_just_after_a_child_s_end_is_read(monkeypatch):
    monkeypatch.setattr(process, "DRAIN_S", 60.0)  # a busy machine may delay the output

    async def run() -> str:
        code = "import os, time\nif os.fork() == 0: time.sleep(0.2); print('late')"
        child = await Child.start(python(code))
        await child.exited
        return child.last_lines

    assert asyncio.run(run()) == "late"


def test_a_grandchild_that_holds_the_pipe_does_not_hold_the_launcher():
    async def run() -> int:
        child = await Child.start(python("import os, time\nif os.fork() == 0: time.sleep(60)\nprint(os.getpid())"))
        group = child.pid
        try:
            return await asyncio.wait_for(child.exited, 20)
        finally:
            os.killpg(group, signal.SIGKILL)

    assert asyncio.run(run()) == 0


def test_a_signal_to_an_ended_child_reaches_no_other_process():
    async def run() -> None:
        child = await Child.start(python("pass"))
        await child.exited
        child.send(signal.SIGKILL)
        assert await child.stop(1.0)

    asyncio.run(run())


def error_after(code: str, caplog, seen: Path | None = None) -> tuple[str, str]:
    """The error of a child that runs `code`, and what it said besides. The file `seen` is made when it is passed on."""

    async def run() -> str:
        child = await Child.start(python(f"import sys, os, time\nsay = lambda t: print(t, flush=True)\n{code}"))
        while seen is not None and not caplog.messages:
            await asyncio.sleep(0.01)
        if seen is not None:
            seen.touch()
        await child.exited
        return child.error

    with caplog.at_level("INFO"):
        return asyncio.run(run()), " ".join(caplog.messages)


def test_a_last_line_that_is_an_error_is_kept_for_the_launcher_s_report(caplog):
    assert error_after("say('one'); say('Error: the disk is full')", caplog) == ("the disk is full", "one")


def test_an_error_that_is_not_the_last_line_is_passed_on(caplog):
    said = "Error: tried in vain two"
    assert error_after("say('Error: tried in vain'); say('two')", caplog) == ("", said)


def test_an_error_is_passed_on_after_a_while_and_stays_the_error_however_long_the_exit_takes(
    caplog, monkeypatch, tmp_path
):
    monkeypatch.setattr(process, "HELD_S", 0.0)
    told, seen = ("tried in vain", "Error: tried in vain"), tmp_path / "seen"
    code = f"say('Error: tried in vain')\nwhile not os.path.exists({str(seen)!r}): time.sleep(0.01)"
    assert error_after(code, caplog, seen) == told


@pytest.fixture
def no_orphans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of the tests adopts none."""
    for module in ("router_template", "standby"):
        monkeypatch.setattr(f"text_generation_launcher.{module}.adopt_orphans", lambda: None)


def program_of(folder: Path, script: str) -> str:
    program = folder / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    return str(program)


@pytest.mark.usefixtures("no_orphans")
def test_where_a_template_cannot_fork_all_that_wait_for_it_start_without_it(tmp_path: Path) -> None:
    forked: list[int] = []

    async def run() -> list[int]:
        template = RouterTemplate(Child.start, lambda child: child, forked.append)
        program, own = program_of(tmp_path, "exit 71"), python("raise SystemExit(3)")
        children = await asyncio.gather(*(template.start_child(own, program) for _ in range(3)))
        assert not template.stands_by
        return [await child.exited for child in children]

    assert asyncio.run(run()) == [3, 3, 3] and forked == []


@pytest.mark.usefixtures("no_orphans")
def test_a_child_that_is_ended_before_it_is_forked_is_not_started_another_way(tmp_path: Path) -> None:
    added: list[Child] = []

    def add(child: Child) -> Child:
        added.append(child)
        return child

    async def run() -> int:
        template, program = RouterTemplate(Child.start, add, lambda pid: None), program_of(tmp_path, "exec sleep 60")
        starting = asyncio.create_task(template.start_child(python("raise SystemExit(3)"), program))
        while not added:
            await asyncio.sleep(0.001)
        added[0].send(signal.SIGTERM)
        assert await starting is added[0]
        return await added[0].exited

    assert asyncio.run(run()) == -signal.SIGTERM


class PretendedTemplates:
    """Processes that sleep; this one forks the shards in their place, which sleep as well."""

    def __init__(self) -> None:
        self.controls: list[socket.socket] = []  # one for each template that was started
        self.orders: list[str] = []
        self.children: list[Child] = []

    async def start(self, command: Command) -> Child:
        self.controls.append(socket.socket(fileno=os.dup(int(command.env["TEMPLATE_FD"]))))
        self.children.append(await Child.start(python("import time; time.sleep(60)")))
        return self.children[-1]

    async def shard_of(self, templates: Templates, script: str = "sleep 60", **variables: str) -> Child:
        """Starts the shard of rank 0, and answers the order that comes of it with a process that runs `script`."""
        command = Command("shard", ("serve",), {"OMP_NUM_THREADS": "1", **variables}, log_fields={"rank": 0})
        starting = asyncio.create_task(templates.start_shard(command, 0, 0))
        while not (_is_readable(self.controls)):
            await asyncio.sleep(0.001)
        order, (output, report), _, _ = socket.recv_fds(self.controls[-1], 4096, 2)
        self.orders.append(order.decode())
        shard = subprocess.Popen(["sh", "-c", f"ulimit -c 0; {script}"], start_new_session=True)
        os.write(report, b"%d\n" % shard.pid)
        shard.returncode = 0  # Child reads its status.
        for fd in (output, report):
            os.close(fd)
        self.children.append(child := await starting)
        await child.begun.wait()
        return child

    async def end(self) -> None:
        for child in self.children:
            child.send(signal.SIGKILL)
            await child.exited
        for control in self.controls:
            control.close()


def _is_readable(controls: list[socket.socket]) -> bool:
    """Whether the newest template has an order."""
    return bool(select.select(controls[-1:], [], [], 0)[0])


@pytest.mark.usefixtures("no_orphans")
def test_a_template_forks_shards_of_another_epoch_and_number_of_replicas_and_of_nothing_else() -> None:
    async def run() -> list[int]:
        pretended, numbers = PretendedTemplates(), list[int]()
        templates = Templates(pretended.start, lambda child: child, lambda pid: None)
        try:
            for variables in (
                {"TGI_EPOCH": "1"},
                {"TGI_EPOCH": "2", "MACHINE_SHARDS": "2"},
                {"TGI_EPOCH": "3", "MACHINE_SHARDS": "3"},
                {"TGI_EPOCH": "4", "MAX_LORAS": "1"},
            ):
                await pretended.shard_of(templates, **variables)
                numbers.append(len(pretended.controls))
        finally:
            await pretended.end()
        assert pretended.orders == ["1 0", "2 2", "3 3", "4 0"]
        return numbers

    assert asyncio.run(run()) == [1, 1, 1, 2]


@pytest.mark.usefixtures("no_orphans")
@pytest.mark.parametrize(
    ("status", "are_kept"),
    [
        *[(-signal.SIGKILL, True), (BROKEN_STATUS, True), (0, False), (1, False), (os.EX_CONFIG, False)],
        *[(-number, False) for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT)],
        (-signal.SIGTERM, False),
    ],
)
def test_the_next_shard_has_the_keys_of_one_that_was_killed_or_gave_up_and_of_no_other(
    status: int, are_kept: bool
) -> None:
    async def run() -> list[str]:
        pretended = PretendedTemplates()
        templates = Templates(pretended.start, lambda child: child, lambda pid: None)
        try:
            end = f"exit {status}" if status >= 0 else f"kill {status} $$"
            first = await pretended.shard_of(templates, end, TGI_EPOCH="1")
            assert await first.exited == status
            await pretended.shard_of(templates, TGI_EPOCH="2")
        finally:
            await pretended.end()
        return pretended.orders

    assert asyncio.run(run()) == ["1 0", "2 0 keeps" if are_kept else "2 0"]


@pytest.mark.usefixtures("no_orphans")
@pytest.mark.parametrize("num_pipes", [0, 1])
def test_a_child_that_cannot_be_ordered_for_lack_of_files_leaves_none_and_no_task(
    monkeypatch: pytest.MonkeyPatch, num_pipes: int
) -> None:
    """`num_pipes`: number of pipes that the system gives."""

    async def run() -> None:
        template, own_pipe = await Child.start(python("import time; time.sleep(60)")), os.pipe
        control, its = socket.socketpair()
        files, tasks, given = len(os.listdir("/dev/fd")), asyncio.all_tasks(), iter(range(num_pipes))

        def pipe() -> tuple[int, int]:
            if next(given, None) is None:
                raise OSError(errno.EMFILE, "Too many open files")
            return own_pipe()

        monkeypatch.setattr(os, "pipe", pipe)
        with pytest.raises(OSError, match="Too many"):
            await ForkedChild.order(python("pass"), ForkedProcess(template, lambda pid: None), control, "1 0")
        monkeypatch.undo()
        await asyncio.sleep(0.01)  # a transport closes its file in a later turn of the loop
        assert (len(os.listdir("/dev/fd")), asyncio.all_tasks()) == (files, tasks)
        for end in (control, its):
            end.close()
        template.send(signal.SIGKILL)
        await template.exited

    asyncio.run(run())
