"""How one section becomes zstd frames and comes back (docs/FORMAT.md, "Encodings"). Pure.

dense:     one frame per byte plane of the values, least significant byte first.
absolute:  frames `low`, `high`, `escapes` of the Rice-split gaps (`chunkstore.rice`), then the byte planes.
delta:     the same of the gaps, then `signs`, `codes` and the byte planes of the escapes (`chunkstore.difference`).
A stream of no bytes is stored as a frame of length 0; every other frame declares its content size.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zstandard

from chunkstore import difference, rice
from chunkstore.dtypes import BITS, Bits, bits_dtype
from chunkstore.errors import CorruptObject
from chunkstore.section import Encoding, Section
from chunkstore.store import Buffer

# Level 1 with a match finder that sees little: in skewed bytes, short matches that happen to be there cost more than
# their Huffman codes. Against plain level 1: up to 15 % smaller and three times as fast; repetition is found as before.
PARAMETERS: Final = zstandard.ZstdCompressionParameters.from_level(1, hash_log=6, min_match=7)
_RICE_FRAMES: Final = 3
_DELTA_FRAMES: Final = _RICE_FRAMES + 4
Frames = tuple[bytes, ...]

_HINT: Final = "the object is damaged or was written by a faulty program; another copy or an anchor is needed"


class _Zstd(threading.local):
    """Contexts of one thread: they cost more to make than a small frame does."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=PARAMETERS)
        self.decompressor = zstandard.ZstdDecompressor()


_ZSTD: Final = _Zstd()


@dataclass(frozen=True, slots=True)
class SectionInfo:
    """What a chunk's header says about one section.

    `count`: elements stored. `rice`: r of the Rice split, 0 where unused.
    """

    tensor: int
    dtype: str
    start: int
    stop: int
    count: int
    encoding: Encoding
    rice: int = 0

    @property
    def whole(self) -> bool:
        """True if every element of the range is stored."""
        return self.encoding is Encoding.DENSE

    @property
    def width(self) -> int:
        """Bytes per element."""
        return bits_dtype(self.dtype).itemsize

    @property
    def frame_count(self) -> int:
        if self.encoding is Encoding.DELTA:
            return _DELTA_FRAMES
        return self.width if self.whole else _RICE_FRAMES + self.width


@dataclass(frozen=True, slots=True)
class EncodedSection:
    """A section ready to be packed into a chunk."""

    info: SectionInfo
    frames: Frames

    @property
    def encoding(self) -> Encoding:
        return self.info.encoding

    @property
    def nbytes(self) -> int:
        """Size of the frames, in bytes; the chunk's header adds about a hundred per section."""
        return _size(self.frames)


def encode_section(section: Section) -> EncodedSection:
    """Encode with the smallest encoding that applies: `dense` if whole, else `absolute` or, where there are old
    values, `delta`.

    Raises ValueError if the section breaks its own rules (see `Section`).
    """
    section.check()
    if section.offsets is None:
        return _encoded(section, Encoding.DENSE, _compress(_planes(section.values)))
    split = rice.encode_offsets(section.offsets)
    gaps = _compress([split.low, split.high, split.escapes])
    if section.relative:
        return _encoded(section, Encoding.DELTA, gaps + _compress_differences(section.values), split.r)
    delta = None
    if section.old is not None:
        delta = _compress_differences(difference.difference(section.values, section.old))
    absolute = _compress_below(_planes(section.values), None if delta is None else _size(delta))
    if absolute is not None:
        return _encoded(section, Encoding.ABSOLUTE, gaps + absolute, split.r)
    assert delta is not None, "only a limit is exceeded"
    return _encoded(section, Encoding.DELTA, gaps + delta, split.r)


def decode_section(info: SectionInfo, frames: Sequence[Buffer], where: str) -> Section:
    """The inverse of `encode_section`. Allocates no more than the checked `info` implies.

    `where` names the section in errors. Raises CorruptObject if the frames are not what `info` calls for.
    """
    offsets = None if info.whole else _decode_offsets(info, frames, where)
    values: Bits
    if info.encoding is Encoding.DELTA:
        values = _decode_differences(info.count, frames[_RICE_FRAMES:], where)
    else:
        planes = frames[len(frames) - info.width :]
        values = _join_planes(planes, info.count, bits_dtype(info.dtype), where)
    relative = info.encoding is Encoding.DELTA
    return Section(info.tensor, info.dtype, info.start, info.stop, offsets, values, relative)


def _encoded(section: Section, encoding: Encoding, frames: Frames, r: int = 0) -> EncodedSection:
    count = len(section.values)
    info = SectionInfo(section.tensor, section.dtype, section.start, section.stop, count, encoding, r)
    return EncodedSection(info, frames)


def _compress(streams: Iterable[Buffer]) -> Frames:
    return tuple(_ZSTD.compressor.compress(s) if len(s) else b"" for s in streams)


def _compress_below(streams: Iterable[Buffer], limit: int | None) -> Frames | None:
    """All frames, or None as soon as they have more than `limit` bytes together."""
    frames: Frames = ()
    for stream in streams:
        frames += _compress([stream])
        if limit is not None and _size(frames) > limit:
            return None
    return frames


def _compress_differences(differences: Bits) -> Frames:
    split = difference.encode_differences(differences)
    return _compress([split.signs, split.codes, *_planes(split.escapes)])


def _size(frames: Frames) -> int:
    return sum(len(f) for f in frames)


def _decode_offsets(info: SectionInfo, frames: Sequence[Buffer], where: str) -> npt.NDArray[np.uint32]:
    low = _decompress(frames[0], rice.low_size(info.count, info.rice), where)
    high = _decompress(frames[1], info.count, where)
    escapes = _decompress(frames[2], 4 * rice.escape_count(high), where)
    offsets = rice.decode_offsets(info.rice, low, high, escapes, info.stop - info.start)
    if offsets is None:
        raise CorruptObject(f"{where}: offsets reach beyond the section's range", hint=_HINT)
    return offsets


def _decode_differences(count: int, frames: Sequence[Buffer], where: str) -> Bits:
    signs = _decompress(frames[0], difference.signs_size(count), where)
    codes = difference.decode_codes(_decompress(frames[1], difference.codes_size(count), where), count)
    escaped = int(np.count_nonzero(codes == difference.ESCAPE))
    escapes = _join_planes(frames[2:], escaped, BITS[2], where)
    differences = difference.decode_differences(signs, codes, escapes)
    if differences is None:
        raise CorruptObject(f"{where}: a difference is beyond 16 bits", hint=_HINT)
    return differences


def _join_planes(planes: Sequence[Buffer], count: int, dtype: np.dtype[Any], where: str) -> Bits:
    octets = np.empty((count, len(planes)), dtype=np.uint8)
    for j, frame in enumerate(planes):
        octets[:, j] = np.frombuffer(_decompress(frame, count, where), dtype=np.uint8)
    values: Bits = octets.reshape(-1).view(dtype)
    return values


def _planes(values: Bits) -> Iterator[Buffer]:
    octets = np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.itemsize)
    for j in range(values.itemsize):  # one at a time, to be compressed before the next one is made
        yield octets[:, j].tobytes()


def _decompress(frame: Buffer, size: int, where: str) -> bytes:
    """The `size` bytes that one zstd frame must hold, and nothing else. Allocates nothing larger."""
    if size == 0 or len(frame) == 0:
        if size == len(frame):
            return b""
        raise CorruptObject(f"{where}: a frame of {len(frame)} bytes cannot hold {size}", hint=_HINT)
    try:
        declared = zstandard.get_frame_parameters(frame).content_size
        if declared != size:
            raise CorruptObject(f"{where}: a frame declares {declared} bytes, not {size}", hint=_HINT)
        # raises unless the content has exactly the declared size
        return _ZSTD.decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptObject(f"{where}: a frame does not decompress: {error}", hint=_HINT) from error
