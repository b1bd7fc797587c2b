"""The types of the gRPC services, which hatch_build.py writes."""

from pathlib import Path

import pytest

from text_generation_proto import engine_pb2, generate_pb2

# The type of a call, and the word before its name in the servicer, by whether its request and response are streams.
KINDS = {
    (False, False): ("UnaryUnary", "async def"),
    (False, True): ("UnaryStream", "def"),
    (True, True): ("StreamStream", "def"),
}


@pytest.mark.parametrize(
    ("pb", "name", "service"),
    [(generate_pb2, "generate", "TextGenerationService"), (engine_pb2, "engine", "EngineService")],
)
def test_the_types_name_every_call_with_its_messages(pb, name, service) -> None:
    types = Path(pb.__file__).with_name(f"{name}_pb2_grpc.pyi").read_text()
    calls = pb.DESCRIPTOR.services_by_name[service].methods
    assert len(calls) == types.count("MultiCallable[")
    for call in calls:
        asked, answer = call.input_type.name, call.output_type.name
        kind, define = KINDS[call.client_streaming, call.server_streaming]
        taken = f"AsyncIterator[pb.{asked}]" if call.client_streaming else f"pb.{asked}"
        assert f"    {call.name}: grpc.aio.{kind}MultiCallable[pb.{asked}, pb.{answer}]\n" in types
        assert f"    {define} {call.name}(self, request: {taken}, " in types
