import gzip
import hashlib

import pytest
from swagger_ui.fetch import COMPRESSED, FOLDER, HASHES, written_name


@pytest.mark.parametrize("name", HASHES)
def test_a_file_of_swagger_ui_is_the_one_that_was_published(name):
    content = (FOLDER / written_name(name)).read_bytes()
    content = gzip.decompress(content) if name in COMPRESSED else content
    assert hashlib.sha256(content).hexdigest() == HASHES[name]
