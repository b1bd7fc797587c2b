"""Where the key of the block hashes comes from."""

from pathlib import Path

import pytest

from text_generation_common.cluster.block_key import FILE, VARIABLE, new_key, parse_key, read_key, with_key
from text_generation_common.errors import CredentialsError

KEY = "0123456789abcdef" * 4


def write(folder: Path, text: str, mode: int = 0o600) -> None:
    (folder / FILE).write_text(text)
    (folder / FILE).chmod(mode)


def test_the_variable_is_a_key_of_32_bytes_or_empty() -> None:
    assert parse_key(KEY) == bytes.fromhex(KEY) and parse_key("") is None
    for wrong in (KEY[1:], KEY + "0", "g" + KEY[1:], f"{KEY}\n"):
        with pytest.raises(ValueError, match="BLOCK_HASH_KEY in the environment is not a key: give 64") as error:
            parse_key(wrong)
        assert wrong not in str(error.value)


def test_a_key_that_is_given_is_kept_and_otherwise_that_of_the_folder_is_taken(tmp_path: Path) -> None:
    write(tmp_path, f"{KEY}\n")
    assert with_key({"A": "b"}, tmp_path, is_insecure=False) == {"A": "b", VARIABLE: KEY}
    other = new_key()
    assert with_key({VARIABLE: other}, tmp_path, is_insecure=False) == {VARIABLE: other}
    with pytest.raises(CredentialsError, match="is not a key: give 64"):
        with_key({VARIABLE: "key"}, tmp_path, is_insecure=False)


def test_a_folder_without_a_key_gives_none_and_no_folder_gives_one_of_this_start(tmp_path: Path) -> None:
    assert read_key(tmp_path) is None and with_key({}, tmp_path, is_insecure=False) == {}
    first, second = (with_key({}, None, is_insecure=False)[VARIABLE] for _ in range(2))
    assert first != second and parse_key(first)


def test_an_insecure_cluster_has_the_same_key_on_all_machines() -> None:
    first, second = (with_key({}, None, is_insecure=True)[VARIABLE] for _ in range(2))
    assert first == second and parse_key(first)


def test_a_key_that_other_users_can_read_or_that_is_wrong_is_refused(tmp_path: Path) -> None:
    write(tmp_path, KEY, 0o644)
    with pytest.raises(CredentialsError, match="open to other users"):
        read_key(tmp_path)
    for wrong in ("", "no key", KEY[1:], "\xff" * 64):
        write(tmp_path, wrong)
        with pytest.raises(CredentialsError, match="is not a key of 64 hexadecimal digits: copy it"):
            read_key(tmp_path)
