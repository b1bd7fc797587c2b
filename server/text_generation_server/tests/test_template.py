"""What a template does with the memory of a shard, by the launcher's order for the next one."""

import os
import socket

import pytest

from text_generation_server import template
from text_generation_server.device.kept import KeptMemory
from text_generation_server.template import TemplateLoop


def test_keys_of_a_shard_are_kept_by_order_only_and_without_it_its_adapters_are_forgotten_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template, "fork_below", lambda *_: True)  # as in the template itself
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kept, forgotten, found = KeptMemory(), list[str](), list[int]()
    loop, order = TemplateLoop(its, os.getppid(), kept, lambda: forgotten.append(order)), ""
    output, report = os.pipe()
    for order in ("1 0", "2 0 keeps", "3 0", "4 2 keeps", "5 0 keep"):
        kept.rename(8, old=7)
        socket.send_fds(ours, [order.encode()], [output, report])
        assert loop._fork_one() is None
        found.append(sum(map(kept.has, (7, 8))))
    assert found == [0, 2, 0, 2, 0] and forgotten == ["3 0", "5 0 keep"]
    for fd in (output, report, *loop._reports):
        os.close(fd)
    for end in (ours, its):
        end.close()
