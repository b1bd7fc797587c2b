"""The C sources: each name has one meaning, and Python reads arguments.h as the compiler does."""

import re
from collections import defaultdict

import pytest

from text_generation_server.kernels.cpu.build import CONSTANTS, KERNELS, SOURCES, BuildError, read_declarations

FUNCTION = r"^(?!#|typedef)[A-Za-z][\w *]*?[ *](\w+)\([^;{}]*\) \{"
STRUCT = r"^struct (?:__attribute__\(\(\w+\)\) )?(\w+) \{"
MACRO = r"^#define (\w+)"


def test_no_function_struct_or_macro_has_the_name_of_another() -> None:
    files: dict[str, set[str]] = defaultdict(set)
    for path in sorted(SOURCES.glob("*.[ch]")):
        for pattern in (FUNCTION, STRUCT, MACRO):
            for name in re.findall(pattern, path.read_text(), re.MULTILINE):
                files[name].add(f"{path.name} {pattern}")
    assert {"gemm", "score_keys", "attend_tile_by_type", "tile_config", "query_block", "LANES"} <= files.keys()
    assert {name: places for name, places in files.items() if len(places) > 1} == {}


def test_arguments_are_read_in_order_and_by_kind() -> None:
    text = """
    enum type { F32 = 0, BF16 = 1 }; /* NOT = 7 */
    enum { MAX_ARGUMENTS = 16 };
    /* struct old_arguments { long gone; }; */
    struct scale_arguments {
      const float *x; /* [T]; or null */
      long tokens;
      double factor;
      void *out;
    };
    """
    kernels, constants = read_declarations(text)
    assert constants == {"F32": 0, "BF16": 1, "MAX_ARGUMENTS": 16}
    assert list(kernels["scale"].items()) == [("x", "P"), ("tokens", "q"), ("factor", "d"), ("out", "P")]
    assert list(kernels) == ["scale"]


@pytest.mark.parametrize("field", ["int tokens", "float eps", "long a, b", "enum type type", "long numbers[2]"])
def test_arguments_that_do_not_take_8_bytes_are_refused(field: str) -> None:
    with pytest.raises(BuildError, match=re.escape(field)):
        read_declarations(f"struct scale_arguments {{\n  {field};\n}};")


def test_every_exported_kernel_has_declared_arguments() -> None:
    sources = "".join(path.read_text() for path in SOURCES.glob("*.c"))
    assert set(re.findall(r"^EXPORT void (\w+)\(const void \*arguments", sources, re.MULTILINE)) == set(KERNELS)
    assert max(map(len, KERNELS.values())) <= CONSTANTS["MAX_ARGUMENTS"]
