import hashlib

import pytest

from text_generation_router.errors import StartError
from text_generation_router.http.keys import digests_of, is_allowed

KEY = "Secret-Key-1"
DIGESTS = digests_of([KEY, "another"], None)


def test_every_key_is_compared():
    compared = []

    class Digests(list):
        def __iter__(self):
            for digest in super().__iter__():
                compared.append(digest)
                yield digest

    assert is_allowed(f"Bearer {KEY}".encode(), Digests(DIGESTS)) and len(compared) == len(DIGESTS)


def test_a_file_of_digests_is_read(tmp_path):
    keys = [b"one", b"two", b"three"]
    one, two, three = (hashlib.sha256(key).hexdigest() for key in keys)
    file = tmp_path / "keys"
    file.write_text(f"# people\n{one}\n\n  sha256:{two}  # the second\n{three.upper()}\n")
    digests = digests_of(["four"], str(file))
    assert len(digests) == 4
    assert all(is_allowed(b"Bearer " + key, digests) for key in (*keys, b"four"))
    assert not is_allowed(b"Bearer " + one.encode(), digests)


@pytest.mark.parametrize("line", ["secret", "sha256:" + "g" * 64, "a" * 63, "a" * 65, "md5:" + "a" * 64])
def test_a_bad_line_is_named_by_number_and_not_shown(tmp_path, line):
    file = tmp_path / "keys"
    file.write_text("#\n" + "a" * 64 + f"\n{line}\n")
    with pytest.raises(StartError, match=f"--api-key-file {file}, line 3: not a SHA-256 digest") as caught:
        digests_of([], str(file))
    assert line not in str(caught.value)


def test_files_without_keys_are_named(tmp_path):
    with pytest.raises(StartError, match="cannot be read"):
        digests_of([], str(tmp_path / "none"))
    (tmp_path / "empty").write_text("# nobody\n")
    with pytest.raises(StartError, match="has no keys"):
        digests_of([], str(tmp_path / "empty"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(StartError, match="cannot be read"):
        digests_of([], str(tmp_path / "binary"))


@pytest.mark.parametrize("key", ["", "two words", "sch\u00f6n", "line\n"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key):
    with pytest.raises(StartError, match="--api-key number 2 is empty or has characters") as caught:
        digests_of(["good", key], None)
    assert not key or key not in str(caught.value)
