"""Writes Swagger UI's files, compressed, and its licences into the router's package. Needs npm. For a newer version:
change VERSION and the hashes, and run

PYTHONPATH=tools python -m swagger_ui.fetch
"""

import gzip
import hashlib
import subprocess
import tarfile
import tempfile
from pathlib import Path

VERSION = "5.35.0"
# SHA-256 of each file in the npm package swagger-ui-dist.
HASHES = {
    "swagger-ui-bundle.js": "e6a898692f2d768e807c3ba4626068a69a2c5dd960dd6c76f3e4d3a3de180af2",
    "swagger-ui.css": "5ed08757e53da3e026d6cbecc61fe5d43585c9560b302d534ad56692519a273d",
    "swagger-ui-bundle.js.LICENSE.txt": "37eb6e7e59aed57b2c1acf076574b818ea07b74265717e0bd67b59e0baf9abbb",
    "LICENSE": "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30",
    "NOTICE": "0d20d1adef18aee3f40dd258172155521ce702ac445cb5f7b7d60ed32dad2fb2",
}
COMPRESSED = ("swagger-ui-bundle.js", "swagger-ui.css")
ROUTER = Path(__file__).parent.parent.parent / "router" / "text_generation_router"
FOLDER = ROUTER / "openapi" / "static"


def written_name(name: str) -> str:
    if name in COMPRESSED:
        return f"{name}.gz"
    return name if name.startswith("swagger-ui") else f"swagger-ui.{name}"


def packed(folder: str) -> Path:
    """The npm package as an archive in `folder`."""
    command = ["npm", "pack", "--silent", "--pack-destination", folder, f"swagger-ui-dist@{VERSION}"]
    subprocess.run(command, check=True)
    [archive] = Path(folder).glob("*.tgz")
    return archive


def checked(name: str, content: bytes) -> bytes:
    found = hashlib.sha256(content).hexdigest()
    if found != HASHES[name]:
        raise SystemExit(f"{name} of swagger-ui-dist {VERSION} has the SHA-256 {found}, not {HASHES[name]}")
    return content


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, tarfile.open(packed(folder)) as archive:
        for name in HASHES:
            member = archive.extractfile(f"package/{name}")
            assert member is not None
            content = checked(name, member.read())
            (FOLDER / written_name(name)).write_bytes(
                gzip.compress(content, mtime=0) if name in COMPRESSED else content
            )


if __name__ == "__main__":
    main()
