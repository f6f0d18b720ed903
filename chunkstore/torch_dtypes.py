"""torch's dtypes by their wire names, and the integer dtypes that show their bits.

A module of its own, since the rest of this package works without torch.
"""

from collections.abc import Mapping
from typing import Final

import torch

TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64, "BOOL": torch.bool,
    "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16, "I32": torch.int32,
    "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64,
}  # fmt: skip
"""torch dtype of each wire dtype that a catalog can name."""

DTYPE_NAMES: Final[Mapping[torch.dtype, str]] = {dtype: name for name, dtype in TORCH_DTYPES.items()}

BIT_DTYPES: Final[Mapping[int, torch.dtype]] = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}
"""torch dtype to view bit patterns with, by width in bytes; signed, since torch indexes few unsigned ones."""
