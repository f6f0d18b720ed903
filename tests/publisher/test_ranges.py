"""Shards that hold a range of a tensor: what they find, prove and send is what the whole tensor's shard would."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkstore.codec import WINDOW
from chunkstore.digest import digest
from manifest.catalog import TensorSpec
from publisher.capture import CaptureStats, capture_copies
from publisher.changes import BLOCK, Bits16, Flags
from publisher.seal import Sealed, restore, sections, take, whole_sections
from publisher.shard import Shard, Source
from tests.publisher.steps import Trainee, trainee, truth

STARTS = [0, 4096, BLOCK - 1, 3 * BLOCK + 777, WINDOW - 5000, 7 * WINDOW + 3]
N = 40_000


def sent(shards: Sequence[Shard], stats: CaptureStats, origin: int) -> tuple[Bits16, Flags, list[Sealed]]:
    """Seal; what is sent, as bits by index from `origin` on and whether they were sent."""
    bits = np.zeros(shards[-1].stop - origin, np.uint16)
    seen = np.zeros(len(bits), np.bool_)
    out = []
    for shard in shards:
        out.append(take(shard, shard.base_digest, stats))
        for section in sections(out[-1], stats):
            assert section.start // WINDOW == (section.stop - 1) // WINDOW
            assert shard.start <= section.start < section.stop <= shard.stop
            offsets = np.arange(section.stop - section.start) if section.offsets is None else section.offsets
            at = offsets + np.int64(section.start - origin)
            assert not seen[at].any()
            bits[at], seen[at] = section.values, True
    return bits, seen, out


def check(it: Trainee, before: Bits16) -> int:
    """Seal, check that what is sent leads from `before` to now; returns how many elements were sent."""
    bits, seen, (sealed,) = sent([it.shard], it.stats, it.shard.start)
    assert np.array_equal(np.where(seen, bits, before), it.bits())
    assert sealed.digest == digest("w", it.bits(), it.shard.start)
    return int(seen.sum())


@pytest.mark.parametrize("wire", ["BF16", "F16"])
@pytest.mark.parametrize("start", STARTS)
def test_exactly_what_changed_is_found_and_proved(start: int, wire: str) -> None:
    it = trainee(N, start=start, wire=wire, lr=1e-5 if wire == "BF16" else 3e-7)
    for steps in (1, 2):
        before, base = it.bits(), it.shard.base_digest
        for _ in range(steps):
            it.step()
        assert it.shard.base_digest == base == digest("w", before, start)
        changed = truth(before, it.bits())
        assert changed.items() <= {offset - start: old for offset, old in it.found().items()}.items()
        assert check(it, before) == len(changed)
        assert it.stats.unproved_blocks == 0


@pytest.mark.parametrize("start", STARTS)
def test_an_edit_after_the_step_sends_its_blocks_whole(start: int) -> None:
    it = trainee(N, start=start, lr=1e-7)
    before = it.bits()
    it.step()
    with torch.no_grad():
        it.parameter[[0, 20_000, N - 1]] = 7.0
    check(it, before)
    assert it.stats.unproved_blocks == len({(start + offset) // BLOCK for offset in (0, 20_000, N - 1)})


@pytest.mark.parametrize("source", [Source.SNAPSHOT, Source.DIGEST])
@pytest.mark.parametrize("start", STARTS)
def test_the_other_sources(start: int, source: Source) -> None:
    it = trainee(N, start=start)
    it.shard = Shard(0, it.shard.spec, it.parameter, source, start)
    before = it.bits()
    with torch.no_grad():
        it.parameter[[0, 5, 20_000, N - 1]] *= 3
    count = check(it, before)
    if source is Source.SNAPSHOT:
        assert count == len(truth(before, it.bits()))


@pytest.mark.parametrize("start", STARTS)
def test_masters(start: int) -> None:
    parameter = torch.nn.Parameter(torch.randn(N).bfloat16(), requires_grad=False)
    shard = Shard(0, TensorSpec("w", "BF16", (start + N,)), parameter, Source.COPY, start)
    master = parameter.float() * 1.003
    it = Trainee(parameter, torch.optim.SGD([torch.ones(1)]), shard, CaptureStats(), torch.Generator())
    before = it.bits()
    with ThreadPoolExecutor(1) as threads:
        capture_copies([(shard, master)], it.stats, threads)
    parameter.copy_(master)
    assert check(it, before) >= len(truth(before, it.bits())) > 0
    assert it.stats.unproved_blocks == 0


@given(st.lists(st.integers(1, N - 1), max_size=4), st.sampled_from([0, WINDOW - 30_000]))
@settings(deadline=None, max_examples=20)
def test_ranges_add_up_to_the_tensor(cuts: list[int], start: int) -> None:
    """Digests and changes of any cut of a tensor, together, are those of the whole; also after a failed commit."""
    values = torch.randn(N)
    parts = [values[low:high].clone() for low, high in pairwise(sorted({0, *cuts, N}))]
    spec, at, shards = TensorSpec("w", "BF16", (start + N,)), start, []
    for part in parts:
        shards.append(Shard(0, spec, part, Source.SNAPSHOT, at))
        at += len(part)
    before = values.bfloat16().view(torch.uint16).numpy()
    base = digest("w", before, start)
    for again in (False, True):
        for part in parts:
            part[:: 1 + len(part) // 7] += 1
        bits, seen, sealed = sent(shards, CaptureStats(), start)
        now = torch.cat(parts).bfloat16().view(torch.uint16).numpy()
        assert np.array_equal(np.where(seen, bits, before), now)
        assert sum(one.digest for one in sealed) % (1 << 64) == digest("w", now, start)
        if not again:
            for one in sealed:
                restore(one)
            assert sum(shard.base_digest for shard in shards) % (1 << 64) == base


def test_an_anchor_of_a_range() -> None:
    it = trainee(N, start=WINDOW - 100)
    found = list(whole_sections(it.shard))
    assert [(s.start, s.stop) for s in found] == [(WINDOW - 100, WINDOW), (WINDOW, WINDOW + N - 100)]
    assert np.array_equal(np.concatenate([s.values for s in found]), it.bits())
