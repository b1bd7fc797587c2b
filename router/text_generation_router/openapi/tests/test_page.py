import gzip
import re

import pytest

from text_generation_router.openapi.routes import FILES, STATIC, takes_gzip


def test_the_page_loads_only_files_that_the_server_has(server):
    for path in ("/docs", "/docs/"):
        page = server.get(path)
        assert page.status == 200 and page.headers["content-type"].startswith("text/html")
        loaded = re.findall(r'(?:src|href)="([^"]+)"', page.body.decode())
        assert len(loaded) == 4 and set(loaded) - {"data:,"} == {file.path for file in FILES}
    assert all(server.get(file.path).status == 200 for file in FILES)
    assert server.get("/api-doc/openapi.json").body == server.get("/openapi.json").body


def test_the_page_has_no_script_or_style_of_its_own_and_its_policy_allows_none(server):
    page = server.get("/docs")
    assert re.search(rb"<script[^>]*>[^<]|<style|\son\w+=|style=", page.body) is None
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy
    assert "unsafe" not in policy and "http" not in policy and "*" not in policy


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_is_compressed_for_clients_that_take_it(server, file):
    plain = server.get(file.path)
    assert "content-encoding" not in plain.headers
    packed = server.get(file.path, headers={"accept-encoding": "gzip, deflate, br, zstd"})
    assert plain.headers["content-type"] == packed.headers["content-type"] == f"{file.media_type}; charset=utf-8"
    if file.name.endswith(".gz"):
        assert packed.headers["content-encoding"] == "gzip" and len(packed.body) < len(plain.body) / 3
        assert gzip.decompress(packed.body) == plain.body
    else:
        assert packed.body == plain.body


@pytest.mark.parametrize(
    ("header", "takes"),
    [
        ("", False),
        ("gzip", True),
        ("br, GZIP;q=0.5", True),
        ("*", True),
        ("br", False),
        ("gzip;q=0", False),
        ("gzip; q=0.000, *", False),
        ("*;q=0", False),
        ("identity", False),
    ],
)
def test_accept_encoding_is_obeyed(header, takes):
    assert takes_gzip(header) is takes


def test_the_licences_are_beside_the_files():
    assert "Apache License" in (STATIC / "swagger-ui.LICENSE").read_text()
    assert (STATIC / "swagger-ui.NOTICE").read_text()
    assert "MIT License" in (STATIC / "swagger-ui-bundle.js.LICENSE.txt").read_text()


def test_the_page_needs_a_key_only_if_all_routes_do(make_server):
    for file in ("/docs", *(file.path for file in FILES)):
        assert make_server(api_keys={b"0" * 32: ""}).get(file).status == 200
        assert make_server(api_keys={b"0" * 32: ""}, closed_routes=True).get(file).status == 401
