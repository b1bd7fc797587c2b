"""The types of request fields: TGI's integer widths, 32-bit reals, strictly typed JSON."""

import struct
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


class Body(BaseModel):
    """Integers are JSON integers, booleans are no numbers, and fields we do not know are left alone."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


def to_f32(value: float) -> float:
    """The nearest float32, so that 0.99999999 is 1.0 as it is for the shards."""
    try:
        (narrow,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError as error:
        raise ValueError("Input should fit a 32-bit float") from error
    return float(narrow)


def one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


F32 = Annotated[float, Field(allow_inf_nan=False), AfterValidator(to_f32)]
I32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
U32 = Annotated[int, Field(ge=0, lt=2**32)]
U64 = Annotated[int, Field(ge=0, lt=2**64)]
Texts = Annotated[list[str], BeforeValidator(one_or_many, json_schema_input_type=str | list[str])]
