"""Which GGUF file of a repository is meant: ids, labels in names, parts, and what is never chosen."""

import pytest

from text_generation_common.errors import WeightsError
from text_generation_common.gguf.choice import model_in
from text_generation_common.gguf.hub_choice import HubName, cached_file, chosen_files, hub_name, is_fetched_as_gguf

LISTING = [
    "README.md", "config.json", "imatrix.dat", "m-imatrix-Q4_K_M.gguf", "mmproj-m-Q4_K_M.gguf", "m-Q4_K_M.gguf",
    "m-UD-Q4_K_XL.gguf", "m.IQ4_XS.gguf", "m-f16.gguf", "BF16/m-BF16-00001-of-00002.gguf",
    "BF16/m-BF16-00002-of-00002.gguf",
]  # fmt: skip


@pytest.mark.parametrize(
    "model_id, meant",
    [
        ("org/name", HubName("org/name")),
        ("gpt2", HubName("gpt2")),
        ("org/name:Q4_K_M", HubName("org/name", "Q4_K_M")),
        ("hf.co/org/name:q8_0", HubName("org/name", "q8_0")),
        ("hf.co/org/name", HubName("org/name")),
        ("org/name:UD-Q4_K_XL", HubName("org/name", "UD-Q4_K_XL")),
        ("org/name:m-f16.gguf", HubName("org/name", "m-f16.gguf")),
        ("org/name:MXFP4_MOE", HubName("org/name", "MXFP4_MOE")),
        *((other, None) for other in (
            "llama3.2:3b", "llama3.2:Q4_K_M", "user/llama3.2:1b-q4_0", "user/llama3.2:latest", "library/a/b:Q4_K_M",
            "org/..:Q4_0", "hf.co/name", "org/name:", "org/name:../x.gguf", "https://hf.co/org/name:Q4_K_M", "",
            ":Q4_0",
        )),
    ],
)  # fmt: skip
def test_an_id_names_a_repository_and_perhaps_a_file(model_id, meant):
    assert hub_name(model_id) == meant


@pytest.mark.parametrize(
    "tag, files",
    [
        (None, ["m-Q4_K_M.gguf"]),
        ("q4_k_m", ["m-Q4_K_M.gguf"]),
        ("UD-Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
        ("IQ4_XS", ["m.IQ4_XS.gguf"]),
        ("F16", ["m-f16.gguf"]),
        ("m-f16.gguf", ["m-f16.gguf"]),
        ("BF16", ["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"]),
    ],
)
def test_a_label_or_a_file_name_chooses_one_model_with_all_its_parts(tag, files):
    assert chosen_files(HubName("org/name", tag), LISTING) == files


@pytest.mark.parametrize(
    "tag, listing, error",
    [
        ("Q2_K", LISTING, "of Q2_K: pass --model-id org/name:BF16, or one of BF16, IQ4_XS, Q4_K_M, UD-Q4_K_XL, f16"),
        (None, ["m-Q8_0.gguf"], "no GGUF file of Q4_K_M: pass --model-id org/name:Q8_0, or one of Q8_0"),
        ("mmproj-m-Q4_K_M.gguf", LISTING, "no GGUF file of mmproj-m-Q4_K_M.gguf"),
        ("Q4_0", ["a-Q4_0.gguf", "b-Q4_0.gguf"], "several GGUF files of Q4_0: pass --model-id org/name:a-Q4_0.gguf"),
        ("Q4_0", ["model.gguf"], "pass --model-id org/name:model.gguf, or one of model.gguf"),
        ("Q4_0", ["README.md", "mmproj-Q4_0.gguf"], "has no GGUF file of a model"),
    ],
)  # fmt: skip
def test_no_file_or_several_are_an_error_of_one_line_that_lists_the_files(tag, listing, error):
    with pytest.raises(WeightsError) as refused:
        chosen_files(HubName("org/name", tag), listing)
    assert error in str(refused.value) and "\n" not in str(refused.value)


def test_safetensors_are_meant_where_a_repository_has_both_and_no_tag_is_given():
    both = [*LISTING, "model.safetensors"]
    assert is_fetched_as_gguf(HubName("org/name"), LISTING) and not is_fetched_as_gguf(HubName("org/name"), both)
    assert is_fetched_as_gguf(HubName("org/name", "Q4_K_M"), both)
    assert not is_fetched_as_gguf(HubName("org/name"), ["README.md", "mmproj.gguf"])


@pytest.mark.parametrize(
    "names, is_other",
    [
        (["model.safetensors"], True),
        (["pytorch_model.bin", "training_args.bin"], True),
        (["consolidated.safetensors"], True),
        (["training_args.bin", "optimizer_args.pt"], False),
        (["adapter_model.safetensors"], False),
        (["onnx/model.bin", "original/consolidated.00.pth", "checkpoint-3/model.safetensors"], False),
        (["mmproj-m-Q4_K_M.gguf", "imatrix.dat", "README.md"], False),
    ],
)
def test_what_training_leaves_behind_is_not_another_form_of_the_weights(tmp_path, names, is_other):
    """In a repository and in a folder."""
    listing = ["m-Q4_K_M.gguf", *names]
    assert is_fetched_as_gguf(HubName("org/name"), listing) is not is_other
    for name in listing:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert model_in(tmp_path) == (tmp_path if is_other else tmp_path / "m-Q4_K_M.gguf")


def test_the_folder_of_an_adapter_is_not_the_file_beside_it(tmp_path):
    for name in ("adapter_config.json", "adapter_model.safetensors", "adapter-f16.gguf"):
        (tmp_path / name).touch()
    assert model_in(tmp_path) == tmp_path


def test_a_file_in_the_cache_is_found_when_all_its_parts_are_there(tmp_path):
    folder = tmp_path / "models--org--name"
    parts = [folder / "snapshots" / "abc" / "BF16" / f"m-BF16-0000{part}-of-00002.gguf" for part in (1, 2)]
    parts[0].parent.mkdir(parents=True)
    parts[0].touch()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    name = HubName("org/name", "BF16")
    assert cached_file(tmp_path, name, None) is None
    parts[1].touch()
    assert cached_file(tmp_path, name, None) == cached_file(tmp_path, name, "abc") == parts[0]
    assert cached_file(tmp_path, HubName("org/name"), None) is None
    assert cached_file(tmp_path, name, "other") is None
    assert cached_file(tmp_path, HubName("org/other", "BF16"), None) is None
