"""Writes other projects' files, and their licences, into the router's package. Needs npm. For a newer version: change
the version and the hashes in PACKAGES, and run

PYTHONPATH=tools python -m vendored.fetch
"""

import gzip
import hashlib
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROUTER = Path(__file__).parent.parent.parent / "router" / "text_generation_router"
DOCS, PAGE = ROUTER / "openapi" / "static", ROUTER / "page" / "static"


@dataclass(frozen=True)
class VendoredFile:
    """A file of an npm package. `path`: where it is written; a name that ends with .gz is that of a compressed file."""

    member: str
    sha256: str
    path: Path

    def check(self, content: bytes) -> bytes:
        found = hashlib.sha256(content).hexdigest()
        if found != self.sha256:
            raise SystemExit(f"{self.member} has the SHA-256 {found}, not {self.sha256}")
        return content

    def write(self, content: bytes) -> None:
        packed = gzip.compress(content, mtime=0) if self.path.suffix == ".gz" else content
        self.path.write_bytes(packed)

    def read(self) -> bytes:
        content = self.path.read_bytes()
        return gzip.decompress(content) if self.path.suffix == ".gz" else content


# By the name and version of the npm package.
PACKAGES = {
    "swagger-ui-dist@5.35.0": (
        VendoredFile(
            "swagger-ui-bundle.js",
            "e6a898692f2d768e807c3ba4626068a69a2c5dd960dd6c76f3e4d3a3de180af2",
            DOCS / "swagger-ui-bundle.js.gz",
        ),
        VendoredFile(
            "swagger-ui.css",
            "5ed08757e53da3e026d6cbecc61fe5d43585c9560b302d534ad56692519a273d",
            DOCS / "swagger-ui.css.gz",
        ),
        VendoredFile(
            "swagger-ui-bundle.js.LICENSE.txt",
            "37eb6e7e59aed57b2c1acf076574b818ea07b74265717e0bd67b59e0baf9abbb",
            DOCS / "swagger-ui-bundle.js.LICENSE.txt",
        ),
        VendoredFile(
            "LICENSE",
            "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30",
            DOCS / "swagger-ui.LICENSE",
        ),
        VendoredFile(
            "NOTICE",
            "0d20d1adef18aee3f40dd258172155521ce702ac445cb5f7b7d60ed32dad2fb2",
            DOCS / "swagger-ui.NOTICE",
        ),
    ),
    # The file contains htm, preact and preact's hooks.
    "htm@3.1.1": (
        VendoredFile(
            "preact/standalone.module.js",
            "72284e8e9079c87817145df1110f74e8a2aa040b2fc384922e18dfcb46fc1fd7",
            PAGE / "preact.js",
        ),
        VendoredFile(
            "LICENSE", "740725f7252e750af735d0028cc534970772f513331e9f68150fede8fb3ce00f", PAGE / "htm.LICENSE"
        ),
    ),
    "preact@10.29.8": (
        VendoredFile(
            "LICENSE", "1fe6958409c8c257a70c587a18b6f7f412b179b456630790d30b2ec9a8e4b7d4", PAGE / "preact.LICENSE"
        ),
    ),
    "uplot@1.6.32": (
        VendoredFile(
            "dist/uPlot.iife.min.js",
            "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
            PAGE / "uplot.js",
        ),
        VendoredFile(
            "dist/uPlot.min.css",
            "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
            PAGE / "uplot.css",
        ),
        VendoredFile(
            "LICENSE", "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd", PAGE / "uplot.LICENSE"
        ),
    ),
}


def packed(package: str, folder: str) -> Path:
    """The npm package as an archive in `folder`."""
    subprocess.run(["npm", "pack", "--silent", "--pack-destination", folder, package], check=True)
    [archive] = Path(folder).glob("*.tgz")
    return archive


def main() -> None:
    for package, files in PACKAGES.items():
        with tempfile.TemporaryDirectory() as folder, tarfile.open(packed(package, folder)) as archive:
            for file in files:
                member = archive.extractfile(f"package/{file.member}")
                assert member is not None
                file.write(file.check(member.read()))


if __name__ == "__main__":
    main()
