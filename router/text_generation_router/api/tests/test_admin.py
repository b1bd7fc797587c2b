"""The administrators' routes: which keys open them, and what their answers contain."""

import hashlib
from typing import Any

import pytest

from text_generation_common.link import ReplicaNote, ReplicaReport, ReplicaState
from text_generation_router.errors import ScalingError
from text_generation_router.openapi.document import document_of
from text_generation_router.openapi.native_answers import ReplicasJson
from text_generation_router.openapi.operation_json import Interface

ADMIN, CLIENT = hashlib.sha256(b"admin").digest(), hashlib.sha256(b"client").digest()
KEY = {"authorization": "Bearer admin"}
NOTE = ReplicaNote("Replica 0", ReplicaState.READY, "unix:///e")


class PretendedLauncher:
    def __init__(self, report: ReplicaReport | None = ReplicaReport(1, (NOTE,))) -> None:  # noqa: B008
        self.report = report

    async def scale(self, wanted: int) -> None:
        if wanted > 8:
            raise ScalingError(f"{wanted} replicas are more than 8")
        self.report = ReplicaReport(wanted, (NOTE,))


@pytest.fixture
def server(make_server: Any) -> Any:
    return make_server(replicas=PretendedLauncher(), admin_key_digest=ADMIN, api_keys={CLIENT: ""})


def test_replicas_are_told_and_scaled_with_the_administrators_key(server):
    told = server.get("/admin/replicas", headers=KEY)
    assert (told.status, told.json["wanted"]) == (200, 1)
    ReplicasJson.model_validate(told.json)
    scaled = server.post("/admin/replicas", {"replicas": 3}, KEY)
    assert (scaled.status, scaled.json["wanted"]) == (200, 3)
    refused = server.post("/admin/replicas", {"replicas": 9}, KEY)
    assert (refused.status, refused.json["error"]) == (409, "9 replicas are more than 8")


@pytest.mark.parametrize("key", ["", "Bearer client", "Bearer ", "Basic admin", "Bearer admin2"])
def test_other_keys_do_not_open_the_routes_nor_this_one_others(server, key):
    headers = {"authorization": key} if key else {}
    assert server.get("/admin/replicas", headers=headers).status == 401
    assert server.post("/admin/replicas", {"replicas": 3}, headers).status == 401
    assert server.services.replicas.report.wanted == 1
    assert server.post("/generate", {"inputs": "Hi"}, KEY).status == 401


def test_without_the_administrators_key_there_are_no_such_routes(make_server):
    server = make_server(replicas=PretendedLauncher())
    assert server.get("/admin/replicas", headers=KEY).status == 404
    assert server.post("/admin/replicas", {"replicas": 3}, KEY).status == 404
    assert "/admin/replicas" not in server.get("/openapi.json").json["paths"]


@pytest.mark.parametrize("launcher", [None, PretendedLauncher(None)])
def test_a_server_without_replicas_says_so(make_server, launcher):
    server = make_server(replicas=launcher, admin_key_digest=ADMIN)
    for answer in (server.get("/admin/replicas", headers=KEY), server.post("/admin/replicas", {"replicas": 3}, KEY)):
        assert (answer.status, answer.json["error_type"]) == (409, "scaling")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        ([], 422),
        ({}, 422),
        ({"replicas": True}, 422),
        ({"replicas": 3.0}, 422),
        ({"replicas": "3"}, 422),
        ({"replicas": 3, "force": True}, 422),
        (b" " * 5000, 413),
    ],
)
def test_other_bodies_are_refused(server, body, status):
    assert server.post("/admin/replicas", body, KEY).status == status
    assert server.services.replicas.report.wanted == 1


def test_the_document_has_the_routes_of_a_server_that_has_them(server):
    document = server.get("/openapi.json").json
    assert document == document_of(Interface(version="1.2.3", has_keys=True, has_admin=True))
    for method in ("get", "post"):
        operation = document["paths"]["/admin/replicas"][method]
        assert operation["security"] == [{"admin_key": []}]
        assert {"200", "401", "409"} <= set(operation["responses"])
    schemas = document["components"]["schemas"]
    fields = [schemas[name]["properties"] for name in ("ScaleRequest", "ReplicasJson", "ReplicaJson")]
    assert all(value.get("description") for each in fields for value in each.values())
