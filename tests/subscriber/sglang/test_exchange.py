"""Canonical updates through orders into every rank's live memory, and old bits back."""

import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chunkstore.dtypes import Bits
from chunkstore.errors import DeltasyncError
from manifest.catalog import Catalog, TensorSpec
from manifest.merge import Update
from subscriber.errors import StagedLost, VerificationFailed
from subscriber.sglang import exchange as exchange_module
from subscriber.sglang import live
from subscriber.sglang.boxes import Box, BoxMap, Layout, Memory
from subscriber.sglang.exchange import Exchange
from subscriber.sglang.wire import RankFiles, file_hash
from subscriber.staging import StagedUpdate, StagingWriter
from tests.support.manifests import make_manifest

CATALOG = Catalog.of(
    [
        TensorSpec("down", "BF16", (6, 8)),
        TensorSpec("gate", "BF16", (4, 6)),
        TensorSpec("norm", "F32", (5,)),
        TensorSpec("up", "BF16", (4, 6)),
    ]
)
DOWN, GATE, NORM, UP = range(4)


def tensor_parallel(rank: int) -> BoxMap:
    """gate and up fused by rows, transposed; down split by columns; norm on both ranks."""
    memories = (Memory("gate_up", "BF16", 24 + 3), Memory("norm", "F32", 5), Memory("down", "BF16", 24))
    boxes = (
        Box.of(DOWN, 2, 4 * rank, 0, (6, 4), (8, 1), (4, 1)),
        Box.of(GATE, 0, 12 * rank, 3, (2, 6), (6, 1), (1, 4)),
        Box.of(NORM, 1, 0, 0, (5,), (1,), (1,)),
        Box.of(UP, 0, 12 * rank, 5, (2, 6), (6, 1), (1, 4)),
    )
    return BoxMap(CATALOG.hash, memories, boxes)


MAPS = [tensor_parallel(rank) for rank in range(2)]
LAYOUT = Layout(CATALOG, MAPS)
HASHES = [file_hash(map_.to_bytes()) for map_ in MAPS]


def dense(weights: list[Bits], rank: int) -> list[torch.Tensor]:
    """What a rank's memories hold once these weights have been loaded, told without boxes."""
    down, gate, norm, up = (bits.copy() for bits in weights)
    fused = np.zeros(27, np.uint16)
    grid = fused[3:].reshape(6, 4)
    grid[:, :2] = gate.reshape(4, 6)[2 * rank : 2 * rank + 2].T
    grid[:, 2:] = up.reshape(4, 6)[2 * rank : 2 * rank + 2].T
    columns = np.ascontiguousarray(down.reshape(6, 8)[:, 4 * rank : 4 * rank + 4]).ravel()
    return [torch.from_numpy(x) for x in (fused.view("i2"), norm.view("i4"), columns.view("i2"))]


def random_weights(seed: int) -> list[Bits]:
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, 1 << (32 if spec.dtype == "F32" else 16), spec.numel).astype(
            np.uint32 if spec.dtype == "F32" else np.uint16
        )
        for spec in CATALOG.tensors
    ]


def staged_from(
    path: Path, old: list[Bits], new: list[Bits], cuts: list[int], whole: set[int]
) -> StagedUpdate:
    """What differs, in windows cut at `cuts`; tensors in `whole` are given whole."""
    with StagingWriter(path, CATALOG, None, make_manifest(0)) as writer:
        for number, (before, after) in enumerate(zip(old, new, strict=True)):
            edges = sorted({0, len(after), *(cut % len(after) for cut in cuts)})
            for start, stop in pairwise(edges):
                part = after[start:stop]
                if number in whole:
                    writer.add(Update(number, start, stop, None, part))
                    continue
                at = np.flatnonzero(before[start:stop] != part).astype(np.uint32)
                writer.add(Update(number, start, stop, at, part[at]))
        return writer.finish()


def rank_files(directory: Path, exchange: Exchange) -> list[RankFiles]:
    return [
        RankFiles.load(directory, rank, order, MAPS[rank].memories)
        for rank, order in enumerate(exchange.orders)
    ]


def read_old(files: RankFiles, memories: list[torch.Tensor]) -> None:
    with files.writer("old") as writer:
        for piece, targets in zip(files.order.pieces, files.open_targets(), strict=True):
            writer.add(live.gather(memories[piece.memory], piece, targets))


def write_new(files: RankFiles, memories: list[torch.Tensor]) -> None:
    targets, new = files.open_targets(), files.open_values("new")
    for number, piece in enumerate(files.order.pieces):
        blocks = live.cut(piece, targets[number], new[number], on_host=True)
        assert live.write(memories[piece.memory], piece, blocks)
        assert live.holds(memories[piece.memory], piece, blocks)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000),
    share=st.floats(0, 1),
    cuts=st.lists(st.integers(0, 47), max_size=4),
    whole=st.sets(st.integers(0, 3)),
)
def test_every_rank_ends_as_a_dense_load_would_leave_it(
    seed: int, share: float, cuts: list[int], whole: set[int], tmp_path: Path
) -> None:
    rng = np.random.default_rng(seed)
    old, other = random_weights(seed), random_weights(seed + 1)
    new = [np.where(rng.random(len(a)) < share, b, a) for a, b in zip(old, other, strict=True)]
    shutil.rmtree(tmp_path / "case", ignore_errors=True)
    staged = staged_from(tmp_path / "case" / "staged", old, new, cuts, whole)
    directory = tmp_path / "case" / "orders"
    exchange = Exchange(directory, staged, MAPS, HASHES, LAYOUT, lambda: None)
    memories = [dense(old, rank) for rank in range(2)]
    files = rank_files(directory, exchange)
    for rank in range(2):
        read_old(files[rank], memories[rank])
    gather = exchange.gather()
    for update in staged.updates():
        (bits,) = gather(update)
        at = slice(None) if update.offsets is None else update.offsets
        assert np.array_equal(bits, old[update.tensor][update.start : update.stop][at])
    exchange.write(staged)
    for rank in range(2):
        write_new(files[rank], memories[rank])
        for memory, expected in zip(memories[rank], dense(new, rank), strict=True):
            assert torch.equal(memory, expected)


@pytest.fixture
def case(tmp_path: Path) -> tuple[Path, Exchange, StagedUpdate]:
    staged = staged_from(tmp_path / "staged", random_weights(0), random_weights(1), [], {DOWN})
    directory = tmp_path / "orders"
    return directory, Exchange(directory, staged, MAPS, HASHES, LAYOUT, lambda: None), staged


def test_ranks_that_disagree_are_found(case: tuple[Path, Exchange, StagedUpdate]) -> None:
    directory, exchange, staged = case
    memories = [dense(random_weights(0), rank) for rank in range(2)]
    memories[1][1][0] += 1  # the norm of rank 1
    for rank, files in enumerate(rank_files(directory, exchange)):
        read_old(files, memories[rank])
    gather = exchange.gather()
    with pytest.raises(VerificationFailed, match="'norm'"):
        list(map(gather, staged.updates()))


@pytest.mark.parametrize("kind", ["order", "targets", "new"])
@pytest.mark.parametrize("harm", ["flip", "truncate", "extend", "remove"])
def test_a_damaged_file_is_found_before_it_is_used(
    kind: str, harm: str, case: tuple[Path, Exchange, StagedUpdate]
) -> None:
    directory, exchange, staged = case
    exchange.write(staged)
    path = directory / f"1.{kind}"
    data = path.read_bytes()
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    if harm == "remove":
        path.unlink()
    else:
        path.write_bytes({"flip": bytes(flipped), "truncate": data[:-1], "extend": data + b"\0"}[harm])
    memories = dense(random_weights(0), 1)
    with pytest.raises(StagedLost) as caught:
        write_new(rank_files(directory, exchange)[1], memories)
    assert isinstance(caught.value, DeltasyncError)


def test_boxes_of_one_memory_are_read_and_written_as_one_piece(
    case: tuple[Path, Exchange, StagedUpdate],
) -> None:
    directory, exchange, _ = case
    for files in rank_files(directory, exchange):
        assert [piece.memory for piece in files.order.pieces] == [0, 1, 2]


@pytest.mark.parametrize(("window", "span"), [(6, 1 << 32), (1 << 22, 9), (6, 9)])
def test_pieces_stay_within_a_window_and_what_uint32_reaches(
    window: int, span: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where both are small; a single box's part of one update is never cut, and reaches further in no known layout."""
    monkeypatch.setattr(exchange_module, "WINDOW", window)
    monkeypatch.setattr(exchange_module, "_SPAN", span)
    old, new = random_weights(0), random_weights(1)
    cuts = list(range(0, 48, 4))
    staged = staged_from(tmp_path / "staged", old, new, cuts, set())
    exchange = Exchange(tmp_path / "orders", staged, MAPS, HASHES, LAYOUT, lambda: None)
    exchange.write(staged)
    for rank, files in enumerate(rank_files(tmp_path / "orders", exchange)):
        memories = dense(old, rank)
        write_new(files, memories)
        assert all(map(torch.equal, memories, dense(new, rank)))
        for piece, targets in zip(files.order.pieces, files.open_targets(), strict=True):
            assert piece.elements <= window
            assert int(targets.max()) - piece.base < span or piece.count <= 4


@pytest.mark.parametrize("part", [1 << 18, 4, 1])
def test_digests_of_boxes_add_up_to_those_of_tensors(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from chunkstore.digest import digest

    monkeypatch.setattr(live, "_PART", part)
    weights = random_weights(3)
    sums = [0] * 4
    for rank, map_ in enumerate(MAPS):
        memories = dense(weights, rank)
        for number, box in enumerate(map_.boxes):
            place = next(p for p in LAYOUT.places[box.tensor] if (p.rank, p.box) == (rank, number))
            if place.owner:
                sums[box.tensor] += live.digest(CATALOG.tensors[box.tensor].name, memories[box.memory], box)
    for spec, total, bits in zip(CATALOG.tensors, sums, weights, strict=True):
        assert total & ((1 << 64) - 1) == digest(spec.name, bits)
