"""Field types of both APIs: integers of a width, single-precision floats, strict objects.

Integers accept JSON integers only; floats accept any JSON number and are rounded to single precision before checks.
"""

import math
import struct
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from reference_server.router.decoder import JsonObject

_F32 = struct.Struct("f")


class ApiModel(BaseModel):
    """An object in a request: unknown keys are ignored, and a known key may occur once, under one of its names."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_repeated_keys(cls, data: Any) -> Any:
        if isinstance(data, JsonObject) and data.repeated:
            known = data.repeated & cls._wire_names()
            if known:
                raise ValueError(f"duplicate field `{min(known)}`")
        return data

    @classmethod
    def _wire_names(cls) -> frozenset[str]:
        return frozenset(cls.model_fields)


def narrow(value: float) -> float:
    """`value` as the nearest single-precision number. Raises `ValueError` if that is not finite.

    >>> narrow(0.99999999)
    1.0
    """
    try:
        narrowed: float = _F32.unpack(_F32.pack(value))[0]
    except OverflowError:
        raise ValueError("number out of range") from None
    if not math.isfinite(narrowed):
        raise ValueError("number out of range")
    return narrowed


F32 = Annotated[float, AfterValidator(narrow)]
U32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
U64 = Annotated[int, Field(ge=0, le=2**64 - 1)]
I32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
