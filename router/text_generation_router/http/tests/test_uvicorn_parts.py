"""What the server uses of uvicorn's own parts is checked at the start, and the check knows all that is used."""

import inspect
import re

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from text_generation_router.errors import StartError
from text_generation_router.http import closing, cycles, protocol, server, sse, uvicorn_parts
from text_generation_router.http.protocol import Connection
from text_generation_router.http.server import Server


def test_the_installed_uvicorn_has_all_parts():
    uvicorn_parts.check_uvicorn()


@pytest.mark.parametrize("owner", [HttpToolsProtocol, RequestResponseCycle, uvicorn.Server])
def test_a_uvicorn_without_one_part_is_refused_by_name(monkeypatch, owner):
    names = (*uvicorn_parts.PARTS[owner], "renamed")
    monkeypatch.setitem(uvicorn_parts.PARTS, owner, names)
    with pytest.raises(StartError, match=rf"uvicorn 9 has no {owner.__name__}\.renamed, .*install"):
        uvicorn_parts.check_uvicorn("9")


@pytest.mark.parametrize(("ours", "theirs"), [(Connection, HttpToolsProtocol), (Server, uvicorn.Server)])
def test_every_method_that_is_overridden_is_checked(ours, theirs):
    overridden = {name for name in vars(ours) if hasattr(theirs, name) and not name.startswith("__")}
    assert overridden <= set(uvicorn_parts.PARTS[theirs])


def test_every_field_of_a_cycle_that_is_used_is_checked():
    source = "".join(map(inspect.getsource, (closing, cycles, protocol, server, sse)))
    used = set(re.findall(r"\b(?:cycle|unread|self\._unread)\.(\w+)", source))
    assert used and used <= set(uvicorn_parts.PARTS[RequestResponseCycle])
