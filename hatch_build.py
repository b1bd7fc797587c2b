"""Makes the generated files whenever the package is built or installed: proto/text_generation_proto/ from
proto/generate.proto and, if there is a C compiler, the CPU kernels.
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


def generate_stubs() -> None:
    from grpc_tools import protoc

    package = ROOT / "proto" / "text_generation_proto"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text('"""Generated from ../generate.proto by hatch_build.py."""\n')
    (package / "py.typed").touch()
    # The virtual folder makes the generated imports absolute: `from text_generation_proto import generate_pb2`.
    status = protoc.main(
        [
            "protoc",
            f"-Itext_generation_proto={ROOT / 'proto'}",
            f"--python_out={ROOT / 'proto'}",
            f"--pyi_out={ROOT / 'proto'}",
            f"--grpc_python_out={ROOT / 'proto'}",
            "text_generation_proto/generate.proto",
        ]
    )
    if status:
        raise RuntimeError(f"protoc failed with status {status}")
    service = service_types((ROOT / "proto" / "generate.proto").read_text())
    (package / "generate_pb2_grpc.pyi").write_text(service)


def service_types(proto: str) -> str:
    """Source text of the types of the service's client and servicer, which protoc does not write. All calls have one
    request and one response.
    """
    (service,) = re.findall(r"^service (\w+) {", proto, re.MULTILINE)
    calls = re.findall(r"^  rpc (\w+)\((\w+)\) returns \((\w+)\);", proto, re.MULTILINE)
    lines = ["import grpc.aio", "", "from text_generation_proto import generate_pb2 as pb", "", f"class {service}Stub:"]
    lines += ["    def __init__(self, channel: grpc.aio.Channel) -> None: ..."]
    lines += [f"    {name}: grpc.aio.UnaryUnaryMultiCallable[pb.{asked}, pb.{answer}]" for name, asked, answer in calls]
    lines += ["", f"class {service}Servicer:"]
    for name, asked, answer in calls:
        context = f"grpc.aio.ServicerContext[pb.{asked}, pb.{answer}]"
        lines += [f"    async def {name}(self, request: pb.{asked}, context: {context}) -> pb.{answer}: ..."]
    lines += [
        "",
        f"def add_{service}Servicer_to_server(servicer: {service}Servicer, server: grpc.aio.Server) -> None: ...",
    ]
    return "\n".join(lines) + "\n"


def compile_kernels() -> list[str]:
    """Compiles the CPU kernels. Returns the targets that now have libraries. Exits with the compiler's output if csrc
    does not compile.
    """
    script = runpy.run_path(str(ROOT / "server/text_generation_server/kernels/cpu/build.py"))
    script["main"]([])
    built: list[str] = script["built_targets"]()
    return built


class CustomBuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        generate_stubs()
        if compile_kernels():
            build_data["pure_python"] = False
            build_data["infer_tag"] = True


if __name__ == "__main__":
    generate_stubs()
    compile_kernels()
