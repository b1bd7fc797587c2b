"""The types of the gRPC service, which hatch_build.py writes."""

from pathlib import Path

from text_generation_proto import generate_pb2 as pb


def test_the_types_name_every_call_with_its_messages() -> None:
    types = Path(pb.__file__).with_name("generate_pb2_grpc.pyi").read_text()
    calls = pb.DESCRIPTOR.services_by_name["TextGenerationService"].methods
    assert len(calls) == types.count("UnaryUnaryMultiCallable[") == types.count("async def ")
    for call in calls:
        asked, answer = call.input_type.name, call.output_type.name
        assert f"    {call.name}: grpc.aio.UnaryUnaryMultiCallable[pb.{asked}, pb.{answer}]\n" in types
        assert f"    async def {call.name}(self, request: pb.{asked}, " in types
