"""Two of the official clients against a server; `make test-clients` runs all of them."""

import sys
from pathlib import Path

import pytest
from server_process import ServerProcess

from text_generation_common.model_files import demo_directory

sys.path.insert(0, str(Path(__file__).parent / "clients"))

import run_clients

CLIENTS = [client for client in run_clients.CLIENTS if client.name in ("openai-3", "text-generation")]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_every_call_of_an_official_client_works(client: run_clients.OfficialClient, server: ServerProcess) -> None:
    try:
        assert run_clients.check(client, server.url, demo_directory()), "see the lines with FAIL"
    except run_clients.NoRegistry as unreachable:
        pytest.skip(f"{unreachable}; with the registry of packages in reach this test runs")
