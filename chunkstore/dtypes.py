"""Element types on the wire, by their safetensors names, and their bit patterns as unsigned integers."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.unsignedinteger[Any]]
"""Bit patterns of elements: uint8, uint16, uint32 or uint64, one entry per element."""

WIDTH: Final[dict[str, int]] = {
    "BF16": 2, "F16": 2, "F32": 4, "F64": 8, "BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4,
    "I64": 8, "U64": 8,
}  # fmt: skip
"""Bytes per element of each dtype a catalog may name."""

SPARSE: Final[frozenset[str]] = frozenset({"BF16", "F16"})
"""Dtypes whose changes may be sent element by element; all others are compared by digest and sent whole."""

BITS: Final[dict[int, np.dtype[Any]]] = {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}
"""numpy dtype of the bit pattern for each width in bytes."""


def bits_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype that holds the bit patterns of wire dtype `dtype`. Raises KeyError for an unknown dtype."""
    return BITS[WIDTH[dtype]]
