"""Reading safetensors gives the right tensor, or an error of one line that names the wrong file or tensor."""

import json
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from text_generation_common.errors import WeightsError
from text_generation_common.file_names import missing_parts, pickle_names, safetensors_names, side_files
from text_generation_common.weights.headers import Stored, read_header, verify
from text_generation_server.weights.files import SafetensorsFiles

GOOD = save({"w": torch.arange(6.0)})


@pytest.fixture
def model(tmp_path):
    """A model of two parts and an index: a [4, 6] in one part, b [3] in the other."""
    save_file({"a": torch.arange(24.0).view(4, 6)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.arange(3.0)}, tmp_path / "model-00002-of-00002.safetensors", metadata={"b.tied": "b"})
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_tensors_are_found_in_whichever_file_holds_them(model):
    files = SafetensorsFiles(model)
    assert files.names == ["a", "b", "b.tied"]
    assert torch.equal(files.get("a"), torch.arange(24.0).view(4, 6))
    assert torch.equal(files.get("b"), torch.arange(3.0)) and torch.equal(files.get("b.tied"), torch.arange(3.0))
    with pytest.raises(WeightsError, match=r"has no tensor model\.norm\.weight"):
        files.get("model.norm.weight")


def test_slices_put_together_are_the_tensor(model):
    files, whole = SafetensorsFiles(model), torch.arange(24.0).view(4, 6)
    for dim in (0, 1):
        middle = whole.shape[dim] // 2
        parts = [files.get_slice("a", dim, 0, middle), files.get_slice("a", dim, middle, whole.shape[dim])]
        assert torch.equal(torch.cat(parts, dim), whole)
    for dim, start, stop in [(2, 0, 1), (0, 0, 5), (1, 3, 2), (-1, 0, 1)]:
        with pytest.raises(WeightsError, match="a has shape"):
            files.get_slice("a", dim, start, stop)


def test_a_good_model_is_verified(model):
    verify(model)


def _remove_part(path):
    (path / "model-00002-of-00002.safetensors").unlink()


def _dangling_part(path):
    _remove_part(path)
    (path / "model-00002-of-00002.safetensors").symlink_to(path / "gone")


def _truncate_part(path):
    file = path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def _swap_part(path):
    (path / "model-00002-of-00002.safetensors").write_bytes(GOOD)


def _index_leads_out(path):
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))


def _index_is_broken(path):
    (path / "model.safetensors.index.json").write_text("{")


def _no_config(path):
    (path / "config.json").unlink()


def _config_is_broken(path):
    (path / "config.json").write_text("[" * 100_000)


def _no_index_and_one_part_missing(path):
    (path / "model.safetensors.index.json").unlink()
    _remove_part(path)


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (_remove_part, "model-00002-of-00002.safetensors is missing"),
        (_dangling_part, "model-00002-of-00002.safetensors is missing"),
        (_truncate_part, "model-00002-of-00002.safetensors is broken"),
        (_swap_part, "model-00002-of-00002.safetensors has no tensor b"),
        (_index_leads_out, "names a file outside its directory"),
        (_index_is_broken, "model.safetensors.index.json is not valid JSON"),
        (_no_config, "has no config.json"),
        (_config_is_broken, "config.json is not valid JSON"),
        (_no_index_and_one_part_missing, "model-00002-of-00002.safetensors is missing"),
    ],
)
def test_a_broken_file_is_named_in_one_line(model, harm, named):
    harm(model)
    with pytest.raises(WeightsError, match=named) as refused:
        verify(model)
    assert "\n" not in str(refused.value)


def test_a_directory_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match=r"has no \.safetensors weights"):
        verify(tmp_path)


def test_no_shorter_file_is_taken_for_a_whole_one(tmp_path):
    file = tmp_path / "model.safetensors"
    for size in range(len(GOOD)):
        file.write_bytes(GOOD[:size])
        with pytest.raises(WeightsError, match="is broken"):
            read_header(file)
    file.write_bytes(GOOD)
    assert read_header(file).tensors == {"w": Stored("F32", (6,))}


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    header=st.one_of(
        st.binary(max_size=60),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["w", "__metadata__", "data_offsets", "dtype"]), inner, max_size=3)
            ),
            max_leaves=8,
        ).map(lambda value: json.dumps(value).encode()),
    )
)
def test_any_header_is_read_or_refused(tmp_path, header):
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    try:
        read_header(file)
    except WeightsError as refused:
        assert "\n" not in str(refused)


def test_the_files_to_serve_are_chosen_by_name():
    listing = ["model.safetensors", "adapter.safetensors", "training.bin", "pytorch_model.bin", "sub/x.safetensors"]
    assert safetensors_names(listing, None) == ["model.safetensors"]
    assert safetensors_names(
        ["b.safetensors", "a.safetensors", "training_args.safetensors", "x/c.safetensors"], None
    ) == [
        "a.safetensors",
        "b.safetensors",
    ]
    assert safetensors_names(listing, {"p2", "p1"}) == ["p1", "p2"]
    assert safetensors_names(["model-1-of-1.safetensors", "consolidated.safetensors"], None) == [
        "model-1-of-1.safetensors"
    ]
    assert safetensors_names(["consolidated.safetensors"], None) == ["consolidated.safetensors"]
    assert pickle_names(listing, None) == ["pytorch_model.bin"]
    assert pickle_names(["a.pt", "training_args.bin"], None) == ["a.pt"]
    assert side_files(["config.json", "tokenizer.json", "tokenizer.model"]) == ["config.json", "tokenizer.json"]
    assert side_files(["config.json", "tokenizer.model"]) == ["config.json", "tokenizer.model"]
    templates = ["additional_chat_templates/rag.jinja", "additional_chat_templates/tool_use.jinja"]
    assert side_files([*reversed(templates), "additional_chat_templates/x.md", "tokenizer.json"])[1:] == templates
    assert missing_parts(["m-00001-of-00003.bin", "m-00003-of-00003.bin", "x.bin"]) == ["m-00002-of-00003.bin"]


def test_a_set_of_parts_is_told_by_the_first_that_is_absent():
    assert missing_parts(["m-1-of-3.bin", "m-2-of-3.bin", "m-3-of-3.bin"]) == []
    assert missing_parts(["m-2-of-3.bin", "n-1-of-2.bin"]) == ["m-1-of-3.bin", "n-2-of-2.bin"]
    assert missing_parts(["m-099998-of-100000.bin"]) == ["m-000001-of-100000.bin"]


@pytest.mark.parametrize("total", ["100001", "999999999999", "9" * 200])
def test_a_name_that_claims_a_huge_set_is_refused(tmp_path, total):
    with pytest.raises(WeightsError, match="more than 100000 files") as refused:
        missing_parts([f"model-1-of-{total}.safetensors"])
    assert len(str(refused.value).splitlines()) == 1


def test_many_names_that_claim_large_sets_cost_no_more_than_their_number():
    names = [f"model-{number}-of-{total}.bin" for total in range(99_000, 100_000) for number in (1, 2)]
    assert len(missing_parts(names)) == 1000


def test_a_header_beyond_32_mib_is_refused_unread(tmp_path):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 32 * 2**20 + 1))
        file.truncate(2**30)  # a sparse file: takes no disk space
    with pytest.raises(WeightsError, match="has a header of 32 MiB, at most 32 MiB are read"):
        read_header(tmp_path / "model.safetensors")


def write_header(file, **tensors):
    """A file of 24 bytes behind its header. `tensors`: type, shape and place of each."""
    entries = {name: dict(zip(("dtype", "shape", "data_offsets"), each, strict=True)) for name, each in tensors.items()}
    header = json.dumps(entries).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(24))


GOOD_HEADER = {"b": ("F16", [3, 2], [0, 12]), "c": ("F4", [8, 2], [12, 20]), "a": ("F8_E4M3", [4], [20, 24])}
FOUR = ("F32", [4], [0, 16])


@pytest.mark.parametrize(
    ("lies", "told"),
    [
        ({"a": FOUR, "b": ("F32", [4], [8, 24])}, "the tensor b has the bytes 8 to 24, .* ask for 16 to 32"),
        ({"a": ("F32", [6], [0, 24]), "b": ("U8", [8], [8, 16])}, "the tensor b has the bytes 8 to 16"),
        ({"a": FOUR, "b": FOUR, "c": ("I64", [1], [16, 24])}, "tensor b has the bytes 0 to 16, .* ask for 16 to 32"),
        ({"a": FOUR, "b": ("F32", [1], [20, 24])}, "the tensor b has the bytes 20 to 24, .* ask for 16 to 20"),
        ({"a": ("U8", [20], [4, 24])}, "the tensor a has the bytes 4 to 24"),
        ({"a": ("BF16", [6], [0, 24])}, "the tensor a has the bytes 0 to 24, .* ask for 0 to 12"),
        ({"a": ("BF16", [2**60, 2**60], [0, 24])}, "the tensor a has the bytes 0 to 24"),
        ({"a": ("F8_E4M3", [24], [24, 0])}, "bytes where its header asks for"),
        ({"a": ("U8", [1] * 9 + [24], [0, 24])}, "its safetensors header cannot be read"),
        ({"a": ("U8", [24], [0, 24, 24])}, "its safetensors header cannot be read"),
        ({"a": ("U8", [24], [0.0, 24.0])}, "its safetensors header cannot be read"),
        ({"a": ("U8", [24], [0, 10**40])}, "its safetensors header cannot be read"),
    ],
)
def test_tensors_that_share_bytes_or_leave_some_or_have_others_than_their_shape_are_refused(tmp_path, lies, told):
    file = tmp_path / "model.safetensors"
    write_header(file, **GOOD_HEADER)
    assert read_header(file).tensors.keys() == set("abc")
    write_header(file, **lies)
    with pytest.raises(WeightsError, match=f"^{file} is broken: .*{told}.*; delete it and download") as refused:
        read_header(file)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400
