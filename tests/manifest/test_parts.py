"""Calls and parts: what is written comes back, what breaks a rule is refused, and other groups are left alone."""

from typing import Any

import msgpack
import pytest
from pydantic import ValidationError

from chunkstore.errors import FormatUnsupported
from chunkstore.memory import MemoryStore
from manifest.board import Board
from manifest.errors import ForeignStream, ManifestInvalid, Untrusted
from manifest.keys import attempt_key, chunk_key, part_key
from manifest.log import StreamInfo
from manifest.parts import Call, Part, ShardRef, layout_hash
from manifest.schema import ChunkRef, Stats
from manifest.sections import SectionRef, Sections
from manifest.settle import Patience
from manifest.signing import Signer
from tests.support.keys import make_signer
from tests.support.manifests import STREAM_ID, fixed_bytes

LAYOUT = layout_hash(bytes(32), 2, "run")
BASE = fixed_bytes("base")
ATTEMPT = fixed_bytes("attempt", length=16)
SHARD: dict[str, Any] = {
    "tensor": 0,
    "start": 3,
    "size": [2, 4],
    "stride": [8, 1],
    "base": 1,
    "digest": (1 << 64) - 1,
}


def a_call(**changes: Any) -> Call:
    fields: dict[str, Any] = {
        "stream": STREAM_ID, "version": 5, "attempt": ATTEMPT, "number": 1, "kind": "version", "base": BASE,
        "train_step": 9, "layout": LAYOUT, "whole": [], "reason": "",
    }  # fmt: skip
    return Call(**(fields | changes))


def a_part(**changes: Any) -> Part:
    section = SectionRef(tensor=0, start=3, stop=15, whole=False, changed=2)
    fields: dict[str, Any] = {
        "stream": STREAM_ID, "version": 5, "attempt": ATTEMPT, "writer": 1, "base": BASE, "train_step": 9,
        "layout": LAYOUT, "shards": [ShardRef(**SHARD)], "stats": Stats(),
        "chunks": [
            ChunkRef(
                key=chunk_key(5, ATTEMPT, 1, 0), nbytes=9, hash=bytes(32), sections=Sections.of([section])
            )
        ],
    }  # fmt: skip
    return Part(**(fields | changes))


def a_board(store: MemoryStore | None = None, layout: bytes = LAYOUT) -> Board:
    return Board(store or MemoryStore(), StreamInfo(STREAM_ID), layout, Patience(deadline=0))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"base": None}, "nil at version 0"),
        ({"version": 0, "train_step": None}, "nil at version 0"),
        ({"train_step": None}, "train step belongs"),
        ({"kind": "join"}, "train step belongs"),
        ({"version": 0, "base": None}, "train step belongs"),
        ({"whole": [1]}, "only a call that ends"),
        ({"kind": "abandoned", "train_step": None, "whole": [2, 1]}, "ascending"),
        ({"kind": "joined", "train_step": None, "whole": [1, 1]}, "ascending"),
        ({"kind": "perhaps"}, "Input should be"),
        ({"layout": bytes(31)}, "32 bytes"),
        ({"reason": "x" * 2001}, "at most 2000"),
        ({"more": 1}, "Extra inputs"),
    ],
)
def test_calls_that_contradict_themselves(changes: dict[str, Any], why: str) -> None:
    assert Call.from_bytes(a_call().data, name="x") == a_call()
    with pytest.raises(ManifestInvalid, match=why):
        Call.from_bytes(msgpack.packb(a_call().model_dump() | changes), name="x")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"size": [2, 4], "stride": [1, 8]}, "not nested"),
        ({"size": [2, 4], "stride": [3, 1]}, "not nested"),
        ({"size": [2], "stride": [8, 1]}, "not nested"),
        ({"size": [2, 4], "stride": [4, 1]}, "normal form"),
        ({"size": [2, 1], "stride": [8, 1]}, "greater than 1"),
        ({"size": [2] * 17, "stride": [1] * 17}, "at most 16"),
        ({"size": [1 << 39], "stride": [1 << 39]}, "beyond any tensor"),
        ({"base": 1 << 64}, "less than"),
        ({"digest": -1}, "greater than or equal"),
    ],
)
def test_shards_that_cannot_be(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        ShardRef(**(SHARD | changes))


@pytest.mark.parametrize(
    "key",
    [chunk_key(5, ATTEMPT, 2, 0), chunk_key(5, bytes(16), 1, 0), chunk_key(4, ATTEMPT, 1, 0), "chunks/x"],
)
def test_a_part_names_only_chunks_of_its_own(key: str) -> None:
    assert Part.from_bytes(a_part().data, name="x") == a_part()
    raw = a_part().model_dump()
    raw["chunks"][0]["key"] = key
    with pytest.raises(ManifestInvalid, match="is not under"):
        Part.from_bytes(msgpack.packb(raw), name="x")


def test_a_part_names_a_chunk_once() -> None:
    raw = a_part().model_dump()
    with pytest.raises(ManifestInvalid, match="named twice"):
        Part.from_bytes(msgpack.packb(raw | {"chunks": raw["chunks"] * 2}), name="x")


@pytest.mark.parametrize("record", [a_call(), a_part()], ids=["call", "part"])
def test_foreign_bytes_are_refused(record: Call | Part) -> None:
    raw = record.model_dump()
    with pytest.raises(ManifestInvalid, match="not msgpack"):
        type(record).from_bytes(record.data[:-1], name="x")
    with pytest.raises(FormatUnsupported, match="format 2"):
        type(record).from_bytes(msgpack.packb(raw | {"format": 2}), name="x")
    with pytest.raises(ManifestInvalid, match="canonical"):
        type(record).from_bytes(msgpack.packb(dict(reversed(raw.items()))), name="x")


def test_calls_of_one_s_own_group_and_base_in_order() -> None:
    board = a_board()
    assert board.calls(5, BASE) == []
    calls = [
        a_call(),
        a_call(attempt=bytes(16), number=3, kind="abandoned", train_step=None),
        a_call(attempt=bytes(15) + b"1", number=2),
        a_call(attempt=bytes(15) + b"2", number=9, layout=bytes(32)),
        a_call(attempt=bytes(15) + b"3", number=9, base=bytes(32)),
        a_call(attempt=bytes(15) + b"4", number=9, version=6),
    ]
    for call in calls:
        board.call(call)
    assert board.calls(5, BASE) == [calls[0], calls[2], calls[1]]
    assert board.calls(6, BASE) == [calls[5]]
    assert board.calls(5, BASE) == [calls[0], calls[2], calls[1]]
    assert board.find_call(5, ATTEMPT) == calls[0]
    assert board.find_call(5, calls[3].attempt) is None
    assert board.find_call(7, ATTEMPT) is None


def test_one_answer_per_writer() -> None:
    board = a_board()
    assert board.answered(5, ATTEMPT) == set()
    assert board.answer(a_part())
    assert board.answer(a_part())
    assert not board.answer(a_part(train_step=10))
    assert board.answer(a_part(writer=10, chunks=[]))
    assert board.answered(5, ATTEMPT) == {1, 10}
    assert board.part(5, ATTEMPT, 1) == a_part()


def test_records_that_were_copied_are_refused() -> None:
    store = MemoryStore()
    store.put(attempt_key(5, bytes(16)), a_call().data)
    with pytest.raises(ManifestInvalid, match="another key"):
        a_board(store).calls(5, BASE)
    store.put(part_key(5, ATTEMPT, 2), a_part().data)
    with pytest.raises(ManifestInvalid, match="another key"):
        a_board(store).part(5, ATTEMPT, 2)
    store.put(part_key(5, ATTEMPT, 1), a_part(stream=bytes(16)).data)
    with pytest.raises(ForeignStream):
        a_board(store).part(5, ATTEMPT, 1)


def test_other_objects_under_the_prefixes_are_ignored() -> None:
    store = MemoryStore()
    for key in ("attempts/00000000000000000005/x.msgpack", f"{attempt_key(5, ATTEMPT)}.more"):
        store.put(key, b"junk")
    for key in (f"{part_key(5, ATTEMPT, 1)}.more", part_key(5, ATTEMPT, 9999), part_key(5, ATTEMPT, 7)[:-5]):
        store.put(key, b"junk")
    assert a_board(store).calls(5, BASE) == []
    assert a_board(store).answered(5, ATTEMPT) == set()


@pytest.mark.parametrize(
    "other", [(bytes(32), 3, "run"), (bytes(31) + b"1", 2, "run"), (bytes(32), 2, "run2")]
)
def test_a_layout_is_of_one_catalog_world_size_and_run(other: tuple[bytes, int, str]) -> None:
    assert layout_hash(*other) != LAYOUT


def signed_board(store: MemoryStore, signer: Signer | None) -> Board:
    return Board(store, StreamInfo(STREAM_ID), LAYOUT, Patience(deadline=0), signer)


def test_writers_with_a_key_believe_each_other_and_no_stranger() -> None:
    store = MemoryStore()
    mine, stranger = signed_board(store, make_signer("a")), signed_board(store, make_signer("b"))
    mine.call(a_call())
    for number, board in enumerate((signed_board(store, None), stranger), start=2):
        forged = a_call(attempt=fixed_bytes(number, length=16), number=number)
        board.call(forged)
        with pytest.raises(Untrusted):
            mine.find_call(5, forged.attempt)
    assert [call.number for call in mine.calls(5, BASE)] == [1]
    assert mine.answer(a_part())
    assert mine.part(5, ATTEMPT, 1).chunks == a_part().chunks
    for board in (signed_board(store, None), stranger):
        store.delete(part_key(5, ATTEMPT, 1))
        assert board.answer(a_part())
        with pytest.raises(Untrusted, match=r"1\.part"):
            mine.part(5, ATTEMPT, 1)


def test_a_part_that_was_changed_is_no_longer_signed() -> None:
    store, signer = MemoryStore(), make_signer("a")
    part = a_part().signed(signer)
    store.put(part_key(5, ATTEMPT, 1), Part(**dict(part) | {"train_step": 10}).data)
    with pytest.raises(Untrusted, match="changed afterwards"):
        signed_board(store, signer).part(5, ATTEMPT, 1)
    call = a_call().model_dump() | {"signature": part.signature}
    store.put(attempt_key(5, ATTEMPT), Call(**call).data)
    with pytest.raises(Untrusted, match="changed afterwards"):
        signed_board(store, signer).find_call(5, ATTEMPT)
