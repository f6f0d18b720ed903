"""Follow elements through a second copy: pieces say where canonical elements lie in a temporary, a copy reads it.

Loaders join checkpoint tensors (`torch.cat`) and make contiguous copies before they write a parameter. Each such
temporary is flat memory that exists only as geometry; composing leads from the checkpoint straight to the parameter.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from chunkstore.regions import nested
from subscriber.sglang.boxes import Box

ZEROS: Final = -1
"""The tensor number of pieces that hold zeros instead of canonical elements."""

MAX_PARTS: Final = 4096
"""Most boxes that one copy may fall into: far more than any sensible join makes, far fewer than elements."""


class NotBoxes(ValueError):
    """A copy that cannot be said in few boxes; the message ends a sentence that begins with the tensor."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Element k⃗ of `size` goes from `source` + k⃗·`source_stride` to `target` + k⃗·`target_stride`."""

    source: int
    target: int
    size: tuple[int, ...]
    source_stride: tuple[int, ...]
    target_stride: tuple[int, ...]

    def cut(self, d: int, start: int, stop: int) -> "Copy":
        """The part from `start` to `stop` of dimension `d`."""
        return Copy(
            self.source + start * self.source_stride[d],
            self.target + start * self.target_stride[d],
            (*self.size[:d], stop - start, *self.size[d + 1 :]),
            self.source_stride,
            self.target_stride,
        )


def compose(pieces: Sequence[Box], copy: Copy, memory: int) -> list[Box]:
    """Where the canonical elements go that `copy` reads from the temporary which `pieces` describe.

    `pieces`: boxes whose targets are elements of the temporary and do not overlap. `copy`: at least one element.
    Returns boxes with targets in memory number `memory`. Raises NotBoxes.
    """
    out: list[Box] = []
    for piece, part, source, source_stride in _parts(pieces, copy):
        box = Box.of(piece.tensor, memory, source, part.target, part.size, source_stride, part.target_stride)
        if not box.target_region.nested or (box.tensor != ZEROS and not nested(box.size, box.source_stride)):
            raise NotBoxes("is spread so that one element lies in several places, or several in one")
        out.append(box)
        if len(out) > MAX_PARTS:
            raise NotBoxes(f"falls into more than {MAX_PARTS} boxes")
    return out


def _parts(pieces: Sequence[Box], copy: Copy) -> Iterator[tuple[Box, Copy, int, tuple[int, ...]]]:
    """Cut `copy` into parts that each read one piece: (piece, part, canonical source, canonical strides)."""
    rest = [copy]
    while rest:
        part = rest.pop()
        found = _inside_one(pieces, part)
        if found:
            yield found[0], part, *found[1:]
            continue
        for d in range(len(part.size)):
            length = _longest(pieces, part, d)
            if length:
                rest += [part.cut(d, length, part.size[d]), part.cut(d, 0, length)]
                break
        else:
            if prod(part.size) == 1:
                raise NotBoxes("is read where nothing was written")
            d = next(d for d, n in enumerate(part.size) if n > 1)
            half = part.size[d] // 2
            rest += [part.cut(d, half, part.size[d]), part.cut(d, 0, half)]


def _longest(pieces: Sequence[Box], part: Copy, d: int) -> int:
    """How far `part` may go along dimension `d` and read one piece only; 0 if not even a single step."""
    low, high = 0, part.size[d]
    while high - low > 1:
        middle = (low + high) // 2 if low else 1
        if _inside_one(pieces, part.cut(d, 0, middle)):
            low = middle
        elif not low:
            return 0
        else:
            high = middle
    return low


def _inside_one(pieces: Sequence[Box], part: Copy) -> tuple[Box, int, tuple[int, ...]] | None:
    for piece in pieces:
        found = _inside(piece, part)
        if found:
            return piece, *found
    return None


def _inside(piece: Box, part: Copy) -> tuple[int, tuple[int, ...]] | None:
    """Canonical source and strides of `part` if it is known to lie in `piece` wholly."""
    dims = sorted(zip(piece.size, piece.target_stride, piece.source_stride, strict=True), key=lambda d: -d[1])
    first = _digits(part.source - piece.target, dims)
    if first is None:
        return None
    ends, strides = first, []
    for n, stride in zip(part.size, part.source_stride, strict=True):
        step = _digits(stride, dims) if n > 1 else [0] * len(dims)
        if step is None:
            return None
        ends = [end + (n - 1) * digit for end, digit in zip(ends, step, strict=True)]
        strides.append(sum(digit * source for digit, (_, _, source) in zip(step, dims, strict=True)))
    if any(end >= n for end, (n, _, _) in zip(ends, dims, strict=True)):
        return None
    source = piece.source + sum(digit * stride for digit, (_, _, stride) in zip(first, dims, strict=True))
    return source, tuple(strides)


def _digits(offset: int, dims: list[tuple[int, int, int]]) -> list[int] | None:
    """`offset` as steps along the dimensions (size, stride, …), which are nested; None if it is no element."""
    out = []
    for n, stride, _ in dims:
        digit, offset = divmod(offset, stride)
        if not 0 <= digit < n:
            return None
        out.append(digit)
    return None if offset else out
