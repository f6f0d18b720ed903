"""How one section becomes zstd frames and comes back (docs/FORMAT.md, "Encodings"). Pure.

dense:     one frame per byte plane of the values, least significant byte first.
absolute:  frames `low`, `high`, `escapes` of the Rice-split gaps (`chunkstore.rice`), then the byte planes.
A stream of no bytes is stored as a frame of length 0; every other frame declares its content size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import zstandard

from chunkstore import rice
from chunkstore.dtypes import Bits, bits_dtype
from chunkstore.errors import CorruptObject
from chunkstore.section import Encoding, Section
from chunkstore.store import Buffer

LEVEL: Final = 1  # higher levels gain under 1 % on weights and cost several times the time
_RICE_FRAMES: Final = 3
_HINT: Final = "the object is damaged or was written by a faulty program; another copy or an anchor is needed"


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
        return self.width if self.encoding is Encoding.DENSE else _RICE_FRAMES + self.width


@dataclass(frozen=True, slots=True)
class EncodedSection:
    """A section ready to be packed into a chunk."""

    info: SectionInfo
    frames: tuple[bytes, ...]

    @property
    def encoding(self) -> Encoding:
        return self.info.encoding

    @property
    def nbytes(self) -> int:
        """Size of the frames, in bytes; the chunk's header adds about a hundred per section."""
        return sum(len(f) for f in self.frames)


def encode_section(section: Section) -> EncodedSection:
    """Encode with the smallest encoding that applies: `dense` if whole, else `absolute`.

    Raises ValueError if the section breaks its own rules (see `Section`).
    """
    section.check()
    whole = section.offsets is None
    encoding = Encoding.DENSE if whole else Encoding.ABSOLUTE
    streams: list[Buffer] = []
    r = 0
    if section.offsets is not None:
        split = rice.encode_offsets(section.offsets)
        r = split.r
        streams += [split.low, split.high, split.escapes]
    streams += _planes(section.values)
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    frames = tuple(compressor.compress(s) if len(s) else b"" for s in streams)
    count = len(section.values)
    info = SectionInfo(section.tensor, section.dtype, section.start, section.stop, count, encoding, r)
    return EncodedSection(info, frames)


def decode_section(info: SectionInfo, frames: Sequence[Buffer], where: str) -> Section:
    """The inverse of `encode_section`. Allocates no more than the checked `info` implies.

    `where` names the section in errors. Raises CorruptObject if the frames are not what `info` calls for.
    """
    offsets = None if info.whole else _decode_offsets(info, frames, where)
    planes = frames[len(frames) - info.width :]
    octets = np.empty((info.count, info.width), dtype=np.uint8)
    for j, frame in enumerate(planes):
        octets[:, j] = np.frombuffer(_decompress(frame, info.count, where), dtype=np.uint8)
    values: Bits = octets.reshape(-1).view(bits_dtype(info.dtype))
    return Section(info.tensor, info.dtype, info.start, info.stop, offsets, values)


def _decode_offsets(info: SectionInfo, frames: Sequence[Buffer], where: str) -> npt.NDArray[np.uint32]:
    low = _decompress(frames[0], rice.low_size(info.count, info.rice), where)
    high = _decompress(frames[1], info.count, where)
    escapes = _decompress(frames[2], 4 * rice.escape_count(high), where)
    offsets = rice.decode_offsets(info.rice, low, high, escapes, info.stop - info.start)
    if offsets is None:
        raise CorruptObject(f"{where}: offsets reach beyond the section's range", hint=_HINT)
    return offsets


def _planes(values: Bits) -> list[Buffer]:
    octets = np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.itemsize)
    return [octets[:, j].tobytes() for j in range(values.itemsize)]


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
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptObject(f"{where}: a frame does not decompress: {error}", hint=_HINT) from error
