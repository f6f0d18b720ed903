"""The sections that a chunk reference names, as columns: a manifest of a large model names hundreds of thousands."""

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Annotated, Any, Final, Self, overload

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, core_schema

from chunkstore.codec import WINDOW
from manifest.catalog import MAX_TENSORS

Columns = npt.NDArray[np.int64]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class SectionRef(BaseModel):
    """Part of one tensor inside a chunk: flat element indices `start` ≤ i < `stop` of tensor id `tensor`.

    A section lies inside one window (chunkstore.codec.WINDOW) and stores at least one element.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    tensor: Annotated[int, Field(ge=0, lt=MAX_TENSORS)]
    start: Count
    stop: Count
    whole: bool  # True: every element of the range is stored; False: only changed ones
    changed: Annotated[int, Field(ge=1, le=WINDOW)]  # elements stored

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.start < self.stop or self.changed > self.stop - self.start:
            raise ValueError(
                f"section range {self.start}…{self.stop} with {self.changed} elements is impossible"
            )
        if self.whole and self.changed != self.stop - self.start:
            raise ValueError("a whole section stores every element of its range")
        if self.start // WINDOW != (self.stop - 1) // WINDOW:
            raise ValueError(f"section range {self.start}…{self.stop} crosses a multiple of {WINDOW}")
        return self


_FIELDS: Final = tuple(SectionRef.model_fields)
_TYPES: Final = (int, int, int, bool, int)
_row: Final = itemgetter(*_FIELDS)


class Sections(Sequence[SectionRef]):
    """Sections, each as SectionRef demands, in the chunk's order; 40 bytes apiece.

    `columns`: int64, one row per field of SectionRef, one column per section; not to be written.
    """

    __slots__ = ("columns",)

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    @classmethod
    def of(cls, given: object) -> Self:
        """From a list of SectionRef or of maps of their fields. Raises ValueError naming the first that is wrong."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, list) or not given:
            raise ValueError("a list of at least one section is wanted")
        columns = _columns(given)
        if columns is None or not _sound(columns):
            # SectionRef says what a section is, and what is wrong with one; the above only says it faster.
            columns = _columns([dict(_checked(number, section)) for number, section in enumerate(given)])
            assert columns is not None, "what SectionRef accepts has columns"
        return cls(columns)

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.of, serialization=core_schema.plain_serializer_function_ser_schema(cls.as_maps)
        )

    @staticmethod
    def joined(parts: "Iterable[Sections]") -> Columns:
        """The columns of all `parts`, one after the other."""
        return np.concatenate(
            [part.columns for part in parts] or [np.empty((len(_FIELDS), 0), np.int64)], axis=1
        )

    def as_maps(self) -> list[dict[str, Any]]:
        """The wire form."""
        tensor, start, stop, _, changed = self.columns.tolist()
        whole = (self.columns[3] != 0).tolist()
        return [
            {"tensor": t, "start": i, "stop": j, "whole": w, "changed": n}
            for t, i, j, w, n in zip(tensor, start, stop, whole, changed, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.columns[0])

    @overload
    def __getitem__(self, index: int) -> SectionRef: ...
    @overload
    def __getitem__(self, index: slice) -> list[SectionRef]: ...
    def __getitem__(self, index: int | slice) -> SectionRef | list[SectionRef]:
        if isinstance(index, slice):
            return list(Sections(self.columns[:, index]))
        return next(iter(Sections(self.columns[:, [index]])))

    def __iter__(self) -> Iterator[SectionRef]:
        return (SectionRef.model_construct(**fields) for fields in self.as_maps())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sections) and np.array_equal(self.columns, other.columns)

    def __hash__(self) -> int:
        return hash(self.columns.tobytes())

    def __repr__(self) -> str:
        return f"Sections({self.as_maps()!r:.200})"


def _checked(number: int, section: object) -> SectionRef:
    try:
        return SectionRef.model_validate(dict(section) if isinstance(section, SectionRef) else section)
    except ValidationError as error:
        raise ValueError(f"section {number}: {error}") from error


def _columns(raw: list[Any]) -> Columns | None:
    """The columns of maps in wire form: the fields of a section, each of its type and below 2⁶³; else None."""
    if set(map(type, raw)) != {dict} or set(map(tuple, raw)) != {_FIELDS}:
        return None
    columns = list(zip(*map(_row, raw), strict=True))
    if any(set(map(type, column)) != {kind} for column, kind in zip(columns, _TYPES, strict=True)):
        return None
    try:
        return np.array(columns, np.int64)
    except OverflowError:
        return None


def _sound(columns: Columns) -> bool:
    """Whether every column is what SectionRef accepts."""
    tensor, start, stop, whole, changed = columns
    length = stop - start  # cannot overflow once neither is negative
    return bool(
        columns.min() >= 0
        and tensor.max() < MAX_TENSORS
        and changed.max() <= WINDOW
        and (changed >= 1).all()
        and (start < stop).all()
        and (changed <= length).all()
        and ((whole == 0) | (changed == length)).all()
        and (start // WINDOW == (stop - 1) // WINDOW).all()
    )
