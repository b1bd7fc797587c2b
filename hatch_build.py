"""Generates proto/text_generation_proto/ from proto/generate.proto whenever the package is built or installed."""

import sys
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand: `python hatch_build.py`
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


class CustomBuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        generate_stubs()


if __name__ == "__main__":
    sys.exit(generate_stubs())
