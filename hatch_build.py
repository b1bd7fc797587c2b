"""Makes the generated files whenever the package is built or installed: proto/text_generation_proto/ from the .proto
files and, if there is a C compiler, the CPU kernels.
"""

import re
import runpy
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # for running it by hand: `python hatch_build.py`
    BuildHookInterface = object  # type: ignore[assignment,misc]

ROOT = Path(__file__).parent
PROTOS = ("generate", "engine")


def generate_stubs() -> None:
    from grpc_tools import protoc

    package = ROOT / "proto" / "text_generation_proto"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text('"""Generated from ../*.proto by hatch_build.py."""\n')
    (package / "py.typed").touch()
    # The virtual folder makes the generated imports absolute: `from text_generation_proto import generate_pb2`.
    status = protoc.main(
        [
            "protoc",
            f"-Itext_generation_proto={ROOT / 'proto'}",
            f"--python_out={ROOT / 'proto'}",
            f"--pyi_out={ROOT / 'proto'}",
            f"--grpc_python_out={ROOT / 'proto'}",
            *(f"text_generation_proto/{name}.proto" for name in PROTOS),
        ]
    )
    if status:
        raise RuntimeError(f"protoc failed with status {status}")
    for name in PROTOS:
        types = service_types(name, (ROOT / "proto" / f"{name}.proto").read_text())
        (package / f"{name}_pb2_grpc.pyi").write_text(types)


# A call as grpc.aio sees it, by whether its request and its response are streams: the type of the client's side, and of
# what the servicer takes and returns.
CALLS = {
    ("", ""): ("UnaryUnary", "pb.{0}", "async def", "pb.{0}"),
    ("", "stream "): ("UnaryStream", "pb.{0}", "def", "AsyncIterator[pb.{0}]"),
    ("stream ", "stream "): ("StreamStream", "AsyncIterator[pb.{0}]", "def", "AsyncIterator[pb.{0}]"),
}


def service_types(name: str, proto: str) -> str:
    """Source text of the types of the client and the servicer of NAME.proto, which protoc does not write."""
    (service,) = re.findall(r"^service (\w+) {", proto, re.MULTILINE)
    calls = re.findall(r"^  rpc (\w+)\((stream )?(\w+)\) returns \((stream )?(\w+)\);", proto, re.MULTILINE)
    lines = ["from collections.abc import AsyncIterator", ""] if any(call[3] for call in calls) else []
    lines += ["import grpc.aio", "", f"from text_generation_proto import {name}_pb2 as pb", "", f"class {service}Stub:"]
    lines += ["    def __init__(self, channel: grpc.aio.Channel) -> None: ..."]
    for call, in_stream, asked, out_stream, answer in calls:
        kind = CALLS[in_stream, out_stream][0]
        lines += [f"    {call}: grpc.aio.{kind}MultiCallable[pb.{asked}, pb.{answer}]"]
    lines += ["", f"class {service}Servicer:"]
    for call, in_stream, asked, out_stream, answer in calls:
        _, taken, define, given = CALLS[in_stream, out_stream]
        context = f"grpc.aio.ServicerContext[pb.{asked}, pb.{answer}]"
        head = f"    {define} {call}(self, request: {taken.format(asked)}, context: {context})"
        lines += [f"{head} -> {given.format(answer)}: ..."]
    lines += [
        "",
        f"def add_{service}Servicer_to_server(servicer: {service}Servicer, server: grpc.aio.Server) -> None: ...",
    ]
    return "\n".join(lines) + "\n"


def compile_kernels(every_target: bool) -> list[str]:
    """Compiles the CPU kernels, for every target or for this machine's processor alone. Returns the targets that now
    have libraries. Exits with the compiler's output if csrc does not compile.
    """
    features = runpy.run_path(str(ROOT / "common/text_generation_common/cpu_features.py"))
    here = [name for name in features["NEEDS"] if not features["lacking"](name, features["processor_flags"]())]
    script = runpy.run_path(str(ROOT / "server/text_generation_server/kernels/cpu/build.py"))
    script["main"]([] if every_target else here)
    built: list[str] = script["built_targets"]()
    return built


class CustomBuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        generate_stubs()
        if self.target_name == "wheel" and compile_kernels(every_target=version != "editable"):
            build_data["pure_python"] = False
            build_data["infer_tag"] = True


if __name__ == "__main__":
    generate_stubs()
    compile_kernels(every_target=True)
