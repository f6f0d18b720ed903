"""Shards that hold a box of a tensor, no run of its elements: what they find, prove and send is the tensor's own."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import AdamW

from chunkstore.codec import WINDOW, Section, encode_section, pack_chunk
from chunkstore.digest import digest
from chunkstore.dtypes import BITS
from chunkstore.regions import Region
from manifest.catalog import TensorSpec
from manifest.merge import merge, resolve
from publisher.capture import CaptureStats, capture_copies, capture_steps
from publisher.fingerprint import Fingerprint
from publisher.optimizers import step_records
from publisher.placing import placed
from publisher.seal import Sealed, restore, sections, take
from publisher.shard import Shard, Source

Bits = npt.NDArray[np.unsignedinteger]
SPARSE = {"BF16": torch.bfloat16, "F16": torch.float16}


@dataclass
class Columns:
    """A matrix whose columns several writers share, each stepping its own by an AdamW of its own."""

    whole: torch.Tensor
    parts: list[torch.nn.Parameter]
    optimizers: list[AdamW]
    shards: list[Shard]
    stats: CaptureStats

    def bits(self) -> Bits:
        """What the whole matrix is on the wire."""
        joined = torch.cat([part.detach() for part in self.parts], dim=1)
        wire = SPARSE.get(self.shards[0].spec.dtype, torch.float32)
        view = torch.int16 if wire in SPARSE.values() else torch.int32
        bits = joined.to(wire).reshape(-1).view(view).numpy()
        return bits.view(f"u{bits.itemsize}").copy()

    def step(self) -> None:
        for part, optimizer, shard in zip(self.parts, self.optimizers, self.shards, strict=True):
            part.grad = torch.randn(part.shape) * 1e-3
            optimizer.step()
            records = [(shard, record) for _, record in step_records(optimizer, {id(part)})]
            with ThreadPoolExecutor(1) as threads:
                capture_steps(records, self.stats, threads)

    def send(self) -> tuple[list[Section], list[Sealed]]:
        found, sealed = [], []
        for shard in self.shards:
            sealed.append(take(shard, shard.base_digest, self.stats))
            own = list(sections(sealed[-1], self.stats))
            if own:
                pack_chunk([encode_section(section) for section in own])  # refuses any that overlap
            found += own
        return found, sealed


def columns(
    shape: tuple[int, int],
    cuts: Sequence[int],
    source: Source = Source.INVERSION,
    dtype: str = "BF16",
    lr: float = 1e-5,
) -> Columns:
    torch.manual_seed(0)
    rows, width = shape
    whole = torch.randn(shape) * 0.02
    parts, optimizers, shards = [], [], []
    for low, high in pairwise([0, *cuts, width]):
        part = torch.nn.Parameter(whole[:, low:high].clone())
        box = Region.of(low, [rows, high - low], [width, 1])
        parts.append(part)
        optimizers.append(AdamW([part], lr=lr, foreach=False))
        shards.append(Shard(0, TensorSpec("w", dtype, shape), part, source, box=box))
    return Columns(whole, parts, optimizers, shards, CaptureStats())


def applied(spec: TensorSpec, found: Sequence[Section], before: Bits) -> Bits:
    """`before` with what was sent, window by window as readers do."""
    after = before.copy()
    for window in range(-(-spec.numel // WINDOW)):
        mine = [section for section in found if section.start // WINDOW == window]
        if not mine:
            continue
        update = merge(spec, 0, window, mine)
        at = slice(update.start, update.stop)
        index = (
            np.arange(update.start, update.stop) if update.offsets is None else update.start + update.offsets
        )
        after[index] = resolve(update, before[at] if update.offsets is None else before[index]).values
    return after


def check(it: Columns, before: Bits) -> list[Section]:
    """What is sent leads from `before` to now, each element sent once, and digests add up to the tensor's."""
    found, sealed = it.send()
    spec, now = it.shards[0].spec, it.bits()
    seen = np.zeros(spec.numel, np.int64)
    for section in found:
        assert section.start // WINDOW == (section.stop - 1) // WINDOW
        offsets = np.arange(section.stop - section.start) if section.offsets is None else section.offsets
        np.add.at(seen, section.start + offsets.astype(np.int64), 1)
    assert seen.max(initial=0) <= 1
    assert np.array_equal(applied(spec, found, before), now)
    assert sum(one.base for one in sealed) % (1 << 64) == digest("w", before)
    assert sum(one.digest for one in sealed) % (1 << 64) == digest("w", now)
    return found


SHAPES = [((300, 96), [32, 64]), ((5, 40_000), [1, 25_000]), ((1100, 4096), [1024, 1500]), ((40_000, 3), [1])]


@pytest.mark.parametrize("dtype", list(SPARSE))
@pytest.mark.parametrize(("shape", "cuts"), SHAPES)
def test_exactly_what_changed_is_found_and_proved(
    shape: tuple[int, int], cuts: list[int], dtype: str
) -> None:
    it = columns(shape, cuts, dtype=dtype, lr=1e-5 if dtype == "BF16" else 3e-7)
    for steps in (1, 2):
        before = it.bits()
        for _ in range(steps):
            it.step()
        found = check(it, before)
        changed = int(np.count_nonzero(before != it.bits()))
        few = [section for section in found if section.old is not None]
        whole = sum(len(section.values) for section in found if section.old is None)
        assert 0 < sum(len(section.values) for section in few) <= changed
        assert whole < 10  # of a box of so few elements
        assert it.stats.unproved_blocks == 0


@pytest.mark.parametrize("source", [Source.SNAPSHOT, Source.DIGEST, Source.INVERSION])
def test_an_edit_is_sent_by_every_source(source: Source) -> None:
    it = columns((2100, 4096), [1024, 1500], source)
    before = it.bits()
    with torch.no_grad():
        for part in it.parts:
            part.view(-1)[[0, 20_000, -1]] = 7.0
    check(it, before)


def test_a_copy_beside_its_master() -> None:
    it = columns((700, 200), [64], Source.COPY)
    masters = [shard.tensor.detach() * 1.003 for shard in it.shards]
    for shard in it.shards:
        shard.tensor = shard.tensor.detach().bfloat16()
        shard.__post_init__()
    before = it.bits()
    with ThreadPoolExecutor(1) as threads:
        capture_copies(zip(it.shards, masters, strict=True), it.stats, threads)
    for shard, master, part in zip(it.shards, masters, it.parts, strict=True):
        shard.tensor.copy_(master)
        part.data = shard.tensor.float()
    check(it, before)
    assert it.stats.unproved_blocks == 0


def test_what_is_sent_whole_only_goes_by_runs_that_end_with_windows() -> None:
    it = columns((3, 1_500_000), [550_000], Source.DIGEST, "F32")
    before = it.bits()
    with torch.no_grad():
        for part in it.parts:
            part.add_(1)
    found = check(it, before)
    assert all(section.offsets is None for section in found)
    assert len(found) == 2 * 3 + 1  # one of the runs crosses a window's end


def test_a_whole_box_is_sent_without_differences_and_reads_as_the_tensor() -> None:
    it = columns((2100, 4096), [1024, 1500])
    before = it.bits()
    it.step()
    for shard in it.shards:
        shard.send_whole()
    found = check(it, before)
    assert all(section.old is None for section in found)
    assert sum(len(section.values) for section in found) == 2100 * 4096
    for window in range(3):
        mine = [section for section in found if section.start // WINDOW == window]
        assert merge(it.shards[0].spec, 0, window, mine).offsets is None


@given(st.integers(1, 60), st.integers(2, 700), st.data())
@settings(deadline=None, max_examples=30)
def test_a_failed_commit_and_a_later_one(rows: int, width: int, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, width - 1), max_size=3)))
    it = columns((rows, width), cuts, lr=1e-3)
    before = it.bits()
    it.step()
    _, sealed = it.send()
    for one in sealed:
        restore(one)
    it.step()
    check(it, before)


def test_the_widths_of_every_dtype_add_up() -> None:
    """Lanes of wide elements too: digests of boxes are partial digests of the tensor."""
    for width in BITS:
        bits = np.random.default_rng(width).integers(0, 256, 24 * 50 * width, np.uint8).view(f"<u{width}")
        total = 0
        for low, high in ((0, 7), (7, 50)):
            box = Region.of(low, [24, high - low], [50, 1])
            part = torch.from_numpy(bits.view(f"<i{width}").reshape(24, 50)[:, low:high].copy()).reshape(-1)
            total += int(Fingerprint("w", box).blocks(part, 0).sum(dtype=np.uint64))
        assert total % (1 << 64) == digest("w", bits)


def test_runs_of_a_box_are_cut_where_windows_end() -> None:
    """Five columns of a matrix of two rows, of which the first row's lie on both sides of a window's end."""
    columns = WINDOW + 3
    box = Region.of(WINDOW - 2, (2, 5), (columns, 1))
    tensor = torch.arange(10, dtype=torch.float32).view(2, 5)
    shard = Shard(0, TensorSpec("w", "F32", (2, columns)), tensor, Source.DIGEST, box=box)
    values = tensor.view(-1).view(torch.int32).numpy().view(np.uint32)
    found = list(placed(shard, Section(0, "F32", 0, 10, None, values)))
    for section in found:
        section.check()
    edges = [(section.start, section.stop) for section in found]
    assert edges == [(WINDOW - 2, WINDOW), (WINDOW, WINDOW + 3), (2 * WINDOW + 1, 2 * WINDOW + 6)]
    assert np.array_equal(np.concatenate([section.values for section in found]), values)
