import hashlib

import pytest

from text_generation_router.errors import StartError
from text_generation_router.http.keys import allowed_digest, names_of_keys

KEY = "Secret-Key-1"
DIGESTS = names_of_keys([KEY, "another"], None)


def test_every_key_is_compared():
    compared = []

    class Digests(list):
        def __iter__(self):
            for digest in super().__iter__():
                compared.append(digest)
                yield digest

    assert allowed_digest(f"Bearer {KEY}".encode(), Digests(DIGESTS)) and len(compared) == len(DIGESTS)


def test_a_file_of_digests_is_read(tmp_path):
    keys = [b"one", b"two", b"three"]
    one, two, three = (hashlib.sha256(key).hexdigest() for key in keys)
    file = tmp_path / "keys"
    file.write_text(f"# people\n{one}\n\n  sha256:{two}  # the second\n{three.upper()}\n")
    digests = names_of_keys(["four"], str(file))
    assert len(digests) == 4
    assert all(allowed_digest(b"Bearer " + key, digests) for key in (*keys, b"four"))
    assert not allowed_digest(b"Bearer " + one.encode(), digests)


@pytest.mark.parametrize(
    "line",
    [
        "secret",
        "sha256:" + "g" * 64,
        "a" * 63,
        "a" * 65,
        "md5:" + "a" * 64,
        "a" * 64 + " other",
        "b" * 64 + " two names",
        "c" * 64 + " n\u00e9e",
        "d" * 64 + " " + "n" * 65,
    ],
)
def test_a_bad_line_is_named_by_number_and_not_shown(tmp_path, line):
    file = tmp_path / "keys"
    file.write_text("#\n" + "a" * 64 + f"\n{line}\n")
    with pytest.raises(StartError, match=f"--api-key-file {file}, line 3: not a SHA-256 digest") as caught:
        names_of_keys([], str(file))
    assert line not in str(caught.value)


def test_a_name_may_stand_beside_a_digest(tmp_path):
    file = tmp_path / "keys"
    file.write_text(
        f"{'a' * 64} team-A_1.x # a comment\nsha256:{'B' * 64}\t{'n' * 64}\n{'c' * 64}\n{'a' * 64} team-A_1.x\n"
    )
    names = {b"\xaa" * 32: "team-A_1.x", b"\xbb" * 32: "n" * 64, b"\xcc" * 32: ""}
    assert names_of_keys([], str(file)) == names
    file.write_text(f"{'a' * 64} one\n{'a' * 64} two\n")
    with pytest.raises(StartError, match="line 2: the key has another name above"):
        names_of_keys([], str(file))


def test_files_without_keys_are_named(tmp_path):
    with pytest.raises(StartError, match="cannot be read"):
        names_of_keys([], str(tmp_path / "none"))
    (tmp_path / "empty").write_text("# nobody\n")
    with pytest.raises(StartError, match="has no keys"):
        names_of_keys([], str(tmp_path / "empty"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(StartError, match="cannot be read"):
        names_of_keys([], str(tmp_path / "binary"))


@pytest.mark.parametrize("key", ["", "two words", "sch\u00f6n", "line\n"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key):
    with pytest.raises(StartError, match="--api-key number 2 is empty or has characters") as caught:
        names_of_keys(["good", key], None)
    assert not key or key not in str(caught.value)
