"""Putting parts together: what fits adds up, what does not is refused by name."""

from typing import Any

import numpy as np
import pytest

from manifest.catalog import Catalog, TensorSpec
from manifest.keys import chunk_key
from manifest.parts import Call, Part, ShardRef
from manifest.schema import ChunkRef, Stats
from manifest.sections import SectionRef, Sections
from publisher.combine import combine
from publisher.errors import WritersDisagree

CATALOG = Catalog.of(
    [TensorSpec("a", "BF16", (100,)), TensorSpec("b", "BF16", (4, 6)), TensorSpec("none", "BF16", (0, 3))]
)
HALF = 1 << 63
COMMITTED = np.array([5, 7, 0], np.uint64)
CALL = Call(
    stream=bytes(16), version=3, attempt=bytes(16), number=1, kind="version", base=bytes(32), train_step=8,
    layout=bytes(32), whole=[], reason="",
)  # fmt: skip


def shard(tensor: int, start: int, size: list[int], stride: list[int], base: int, digest: int) -> ShardRef:
    return ShardRef(tensor=tensor, start=start, size=size, stride=stride, base=base, digest=digest)


def chunk(writer: int, tensor: int, start: int, stop: int, changed: int) -> ChunkRef:
    section = SectionRef(
        tensor=tensor, start=start, stop=stop, whole=changed == stop - start, changed=changed
    )
    return ChunkRef(
        key=chunk_key(3, bytes(16), writer, 0), nbytes=10, hash=bytes(32), sections=Sections.of([section])
    )


def part(writer: int, **changes: Any) -> Part:
    """Writer 0 has a[:60] and the left half of b's columns, writer 1 the rest."""
    mine = (
        [shard(0, 0, [60], [1], HALF + 1, HALF + 2), shard(1, 0, [4, 3], [6, 1], 3, 30)],
        [shard(0, 60, [40], [1], HALF + 4, HALF + 8), shard(1, 3, [4, 3], [6, 1], 4, 40)],
    )
    fields: dict[str, Any] = {
        "stream": bytes(16), "version": 3, "attempt": bytes(16), "writer": writer, "base": bytes(32), "train_step": 8,
        "layout": bytes(32), "shards": mine[writer], "chunks": [chunk(writer, 0, 60 * writer, 60 * writer + 9, 2)],
        "stats": Stats(elements=124, changed=2, bytes_by_encoding={"delta": 7}, seconds={"seal": 1.0 + writer}),
    }  # fmt: skip
    return Part(**(fields | changes))


def test_digests_and_counts_add_up() -> None:
    together = combine(CALL, CATALOG, [part(0), part(1)], COMMITTED)
    assert together.digests.tolist() == [10, 70, 0]
    assert together.stale == []
    assert len(together.chunks) == 2
    wanted: dict[str, Any] = {
        "changed": 4,
        "bytes_by_encoding": {"delta": 14},
        "seconds": {"seal": 2.0},
        "elements": 124,
    }
    assert together.stats == Stats(**wanted)


def test_what_does_not_build_on_the_base_is_stale_unless_it_is_whole() -> None:
    committed = COMMITTED + np.array([1, 0, 0], np.uint64)
    assert combine(CALL, CATALOG, [part(0), part(1)], committed).stale == [0]
    whole = [part(0, chunks=[chunk(0, 0, 0, 60, 60)]), part(1, chunks=[chunk(1, 0, 60, 100, 40)])]
    assert combine(CALL, CATALOG, whole, committed).stale == []
    assert combine(CALL, CATALOG, [whole[0], part(1)], committed).stale == [0]
    assert combine(CALL, CATALOG, whole, None).stale == [1]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"train_step": 9}, "writer 1 answers with train_step 9, the call is for 8"),
        ({"base": bytes(31) + b"1"}, "writer 1 answers with base"),
        ({"layout": bytes(31) + b"1"}, "writer 1 answers with layout"),
        ({"shards": part(1).shards[:1]}, "b: nobody has elements 3…6"),
        ({"shards": part(1).shards[1:], "chunks": []}, "a: nobody has elements 60…100"),
        ({"shards": [*part(1).shards, shard(1, 5, [], [], 0, 0)]}, "b: writer 1 and writer 1 both have"),
        ({"shards": [*part(1).shards, shard(0, 59, [], [], 0, 0)]}, "a: writer 0 and writer 1 both have"),
        ({"shards": [*part(1).shards, shard(2, 0, [], [], 0, 0)]}, "none: writer 1 has element 0, beyond"),
        ({"shards": [*part(1).shards, shard(3, 0, [], [], 0, 0)]}, "tensor 3, the catalog has fewer"),
        (
            {"chunks": [chunk(1, 0, 59, 70, 2)]},
            "writer 1 sends elements 59…70 of tensor 0, which it does not own",
        ),
        ({"chunks": [chunk(1, 2, 0, 1, 1)]}, "elements 0…1 of tensor 2, which it does not own"),
    ],
)
def test_refusals_name_writers_and_elements(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(WritersDisagree, match=problem):
        combine(CALL, CATALOG, [part(0), part(1, **changes)], COMMITTED)


def test_parts_in_another_order_are_refused() -> None:
    with pytest.raises(WritersDisagree, match="part 0 is of writer 1"):
        combine(CALL, CATALOG, [part(1), part(0)], COMMITTED)
