import hashlib

import pytest
from vendored.fetch import PACKAGES, PAGE, VendoredFile

FILES = [file for files in PACKAGES.values() for file in files]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.path.name)
def test_a_file_of_another_project_is_the_one_that_was_published(file: VendoredFile):
    assert hashlib.sha256(file.read()).hexdigest() == file.sha256


def test_the_licences_of_the_page_are_beside_its_files():
    assert "Apache License" in (PAGE / "htm.LICENSE").read_text()
    assert all("MIT License" in (PAGE / name).read_text() for name in ("preact.LICENSE", "uplot.LICENSE"))
