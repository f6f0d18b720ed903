"""Chunk objects: many encoded sections in one immutable object (docs/FORMAT.md, "Chunk"). Pure.

Magic, format version, header length, msgpack header, zstd frames. The header is checked whole before anything
is decoded, and every size in it before anything is allocated, so the bytes may come from anywhere.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import msgpack

from chunkstore.dtypes import SPARSE, WIDTH
from chunkstore.encodings import EncodedSection, SectionInfo, decode_section, encode_section
from chunkstore.errors import CorruptObject, FormatUnsupported, LimitExceeded
from chunkstore.rice import MAX_RICE
from chunkstore.section import WINDOW, Encoding, Section, range_problem
from chunkstore.store import Buffer

__all__ = [
    "CHUNK_FORMAT",
    "MAX_CHUNK",
    "MAX_HEADER",
    "MAX_SECTIONS",
    "MAX_TENSOR",
    "WINDOW",
    "ChunkReader",
    "EncodedSection",
    "Encoding",
    "Section",
    "SectionInfo",
    "encode_section",
    "group_sections",
    "pack_chunk",
]

MAGIC: Final = b"dsychunk"
CHUNK_FORMAT: Final = 1
MAX_CHUNK: Final = 128 << 20  # bytes of one chunk object
MAX_HEADER: Final = 1 << 20  # bytes of its msgpack header
MAX_SECTIONS: Final = 4096  # sections of one chunk; their records always fit the header
MAX_TENSOR: Final = (1 << 20) - 1  # tensor ids
MAX_INDEX: Final = 1 << 40  # flat element indices

_PREFIX: Final = struct.Struct("<8sII")  # magic, format, header length
_COMMON: Final = {"tensor", "dtype", "start", "stop", "count", "encoding", "frames"}
_SPARSE: Final = _COMMON | {"rice"}
_KEYS: Final = {Encoding.DENSE: _COMMON, Encoding.ABSOLUTE: _SPARSE, Encoding.DELTA: _SPARSE}
_HINT: Final = "the object is damaged or was written by a faulty program; another copy or an anchor is needed"
_UPGRADE: Final = "upgrade deltasync on this side first: readers before writers"


def pack_chunk(sections: Sequence[EncodedSection]) -> bytes:
    """One chunk object of 1 to MAX_SECTIONS sections that do not overlap, in the given order.

    Raises ValueError if they overlap, LimitExceeded if they are too many or too large for one chunk.
    """
    if not 0 < len(sections) <= MAX_SECTIONS:
        raise LimitExceeded(f"a chunk holds 1 to {MAX_SECTIONS} sections, not {len(sections)}")
    overlap = _overlap([s.info for s in sections])
    if overlap:
        raise ValueError(overlap)
    records, end = [], 0
    for section in sections:
        frames = []
        for frame in section.frames:
            frames.append([end, len(frame)])
            end += len(frame)
        records.append(_record(section.info, frames))
    header = msgpack.packb({"sections": records})
    if _PREFIX.size + len(header) + end > MAX_CHUNK:
        raise LimitExceeded(f"a chunk of {end} bytes is over the limit of {MAX_CHUNK}")
    prefix = _PREFIX.pack(MAGIC, CHUNK_FORMAT, len(header))
    return b"".join([prefix, header, *(f for s in sections for f in s.frames)])


def group_sections(sections: Iterable[EncodedSection], target: int) -> Iterator[list[EncodedSection]]:
    """Group sections, in order, into chunks of about `target` bytes within the limits of `pack_chunk`."""
    group: list[EncodedSection] = []
    size = 0
    for section in sections:
        if group and (size + section.nbytes > target or len(group) == MAX_SECTIONS):
            yield group
            group, size = [], 0
        group.append(section)
        size += section.nbytes
    if group:
        yield group


class ChunkReader:
    """A chunk object whose whole header is checked; sections are decoded one by one, on demand.

    Raises, naming `name`: CorruptObject if the bytes break the format, LimitExceeded if a declared size is
    over a limit, FormatUnsupported if the format version or an encoding is unknown to this release.
    """

    def __init__(self, data: Buffer, *, name: str) -> None:
        self._name = name
        view = memoryview(data)
        header, body = self._split(view)
        records = self._parse(header)
        self._frames: list[list[memoryview]] = []
        self.sections: tuple[SectionInfo, ...] = tuple(
            self._section(record, i) for i, record in enumerate(records)
        )
        self._cut(records, body)
        overlap = _overlap(self.sections)
        if overlap:
            raise self._corrupt(overlap)

    def decode(self, i: int) -> Section:
        """Section `i` of `sections`. Raises CorruptObject if its frames are not what the header says."""
        info = self.sections[i]
        where = f"chunk {self._name}, section {i} (tensor {info.tensor}, elements {info.start}…{info.stop})"
        return decode_section(info, self._frames[i], where)

    def _split(self, view: memoryview) -> tuple[memoryview, memoryview]:
        if len(view) > MAX_CHUNK:
            raise LimitExceeded(f"chunk {self._name} has {len(view)} bytes, the limit is {MAX_CHUNK}")
        if len(view) < _PREFIX.size:
            raise self._corrupt(f"{len(view)} bytes are too few")
        magic, version, length = _PREFIX.unpack(view[: _PREFIX.size])
        if magic != MAGIC:
            raise self._corrupt("it does not begin with the magic of a chunk")
        if version != CHUNK_FORMAT:
            raise FormatUnsupported(
                f"chunk {self._name} has format {version}, this release reads {CHUNK_FORMAT}", hint=_UPGRADE
            )
        if length > MAX_HEADER:
            raise LimitExceeded(
                f"chunk {self._name} declares a header of {length} bytes, the limit is {MAX_HEADER}"
            )
        if length > len(view) - _PREFIX.size:
            raise self._corrupt("it ends inside the header")
        return view[_PREFIX.size : _PREFIX.size + length], view[_PREFIX.size + length :]

    def _parse(self, header: memoryview) -> list[dict[str, Any]]:
        try:
            root = msgpack.unpackb(
                header, strict_map_key=True, max_array_len=MAX_SECTIONS, max_map_len=32, max_ext_len=0
            )
        except (ValueError, msgpack.exceptions.UnpackException) as error:
            raise self._corrupt(f"the header is not msgpack within its limits: {error}") from error
        if not isinstance(root, dict) or set(root) != {"sections"}:
            raise self._corrupt("the header is not a map with the one key 'sections'")
        records = root["sections"]
        if not isinstance(records, list) or not records or not all(isinstance(r, dict) for r in records):
            raise self._corrupt("'sections' is not a list of maps")
        return records

    def _section(self, record: dict[str, Any], i: int) -> SectionInfo:
        if not isinstance(record.get("encoding"), str):
            raise self._corrupt(f"section {i} names no encoding")
        if record["encoding"] not in list(Encoding):
            raise FormatUnsupported(
                f"chunk {self._name}, section {i} has encoding {record['encoding']!r:.99}", hint=_UPGRADE
            )
        encoding = Encoding(record["encoding"])
        if set(record) != _KEYS[encoding]:
            raise self._corrupt(f"section {i} has keys {sorted(map(str, record))!r:.300}")
        tensor = self._integer(record, "tensor", i, MAX_TENSOR)
        start = self._integer(record, "start", i, MAX_INDEX)
        stop = self._integer(record, "stop", i, MAX_INDEX)
        count = self._integer(record, "count", i, WINDOW)
        r = self._integer(record, "rice", i, MAX_RICE) if encoding is not Encoding.DENSE else 0
        dtype = record["dtype"]
        if not isinstance(dtype, str) or dtype not in (WIDTH if encoding is Encoding.DENSE else SPARSE):
            raise self._corrupt(f"section {i} has dtype {dtype!r:.99} in encoding {encoding}")
        problem = range_problem(start, stop)
        if problem:
            raise self._corrupt(f"section {i}, elements {start}…{stop}: {problem}")
        least = stop - start if encoding is Encoding.DENSE else 1
        if not least <= count <= stop - start:
            raise self._corrupt(f"section {i} stores {count} of {stop - start} elements")
        return SectionInfo(tensor, dtype, start, stop, count, encoding, r)

    def _cut(self, records: list[dict[str, Any]], body: memoryview) -> None:
        """Cut the frames out of `body`: they lie one after another, from its start to its end."""
        end = 0
        for i, (info, record) in enumerate(zip(self.sections, records, strict=True)):
            table = record["frames"]
            if not isinstance(table, list) or len(table) != info.frame_count:
                raise self._corrupt(f"section {i} does not have {info.frame_count} frames")
            frames = []
            for entry in table:
                if not isinstance(entry, list) or len(entry) != 2 or any(type(x) is not int for x in entry):
                    raise self._corrupt(f"section {i} has a frame {entry!r:.99}, not [offset, length]")
                offset, length = entry
                if offset != end or not 0 <= length <= len(body) - end:
                    raise self._corrupt(
                        f"section {i} has a frame of {length} bytes at {offset}, expected at {end} of {len(body)}"
                    )
                frames.append(body[end : end + length])
                end += length
            self._frames.append(frames)
        if end != len(body):
            raise self._corrupt(f"{len(body) - end} bytes follow the last frame")

    def _integer(self, record: dict[str, Any], key: str, i: int, limit: int) -> int:
        value = record[key]
        if type(value) is not int or value < 0:
            raise self._corrupt(f"section {i}: {key!r} is {value!r:.99}, not an unsigned integer")
        if value > limit:
            raise LimitExceeded(f"chunk {self._name}, section {i}: {key!r} is {value}, the limit is {limit}")
        return value

    def _corrupt(self, problem: str) -> CorruptObject:
        return CorruptObject(f"chunk {self._name}: {problem}", hint=_HINT)


def _record(info: SectionInfo, frames: list[list[int]]) -> dict[str, Any]:
    record = {
        "tensor": info.tensor,
        "dtype": info.dtype,
        "start": info.start,
        "stop": info.stop,
        "count": info.count,
        "encoding": info.encoding.value,
        "frames": frames,
    }
    return record if info.whole else record | {"rice": info.rice}


def _overlap(sections: Sequence[SectionInfo]) -> str:
    """Names two sections that share elements, or the empty string."""
    ordered = sorted(sections, key=lambda s: (s.tensor, s.start))
    for a, b in pairwise(ordered):
        if a.tensor == b.tensor and b.start < a.stop:
            return f"sections {a.start}…{a.stop} and {b.start}…{b.stop} of tensor {a.tensor} overlap"
    return ""
