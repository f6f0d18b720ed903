"""Resolving differences against what is live, and proving the result before anything is written."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkstore.dtypes import Bits
from chunkstore.memory import MemoryStore
from manifest.errors import ManifestInvalid
from manifest.history import find_plan
from manifest.merge import Update
from manifest.plan import Plan
from subscriber.errors import VerificationFailed
from subscriber.spool import Spool
from subscriber.stage import stage, staged_bytes
from subscriber.staging import Held, StagedUpdate, StagingWriter, load_staged
from subscriber.verify import verify
from tests.subscriber.parts import small_weights
from tests.support.streams import StreamBuilder, Tensor, Weights, digests_of, perturbed


def stream(versions: int, *, dense: int | None = None) -> StreamBuilder:
    """Sparse versions, mostly stored as differences, but `dense`, whose tensors are stored whole."""
    builder = StreamBuilder(MemoryStore(), small_weights())
    for version in range(1, versions + 1):
        builder.train(0.6 if version == dense else 0.1)
    return builder


def staged_chain(
    builder: StreamBuilder, path: Path, *, base: int | None = 0, lie: bool = False
) -> StagedUpdate:
    """The chain from `base` to the newest version, staged. `lie`: as if it began with an anchor."""
    held = None
    if base is not None:
        manifest = builder.manifests[base]
        held = Held(base, manifest.root, manifest.hash, manifest.digest_array)
    plan = find_plan(builder.log, None if held is None else held.applied, builder.version)
    if lie:
        plan, held = Plan(plan.steps, plan.nbytes, True), None
    spool = Spool(builder.store, path / "chunks")
    share = spool.share()
    for step in plan.steps:
        for ref in step.chunks:
            spool.fetch(ref, builder.catalog, step.version, share)
    staged = stage(plan, builder.catalog, held, spool, path / "update", lambda: None)
    on_disk = sum(file.stat().st_size for file in (path / "update").glob("values.bin"))
    assert on_disk <= staged_bytes(plan, builder.catalog)
    return staged


def gather_from(builder: StreamBuilder, *copies: Weights) -> Callable[[Update], list[Bits]]:
    def gather(update: Update) -> list[Bits]:
        name = builder.catalog.tensors[update.tensor].name
        parts = [weights[name].bits.ravel()[update.start : update.stop] for weights in copies]
        return [part if update.offsets is None else part[update.offsets] for part in parts]

    return gather


def applied(builder: StreamBuilder, staged: StagedUpdate, times: int = 1) -> list[int]:
    """The digests after writing `staged` over version 0 that many times."""
    weights = perturbed(builder.weights[0], 0)
    for update in [u for _ in range(times) for u in staged.updates()]:
        flat = weights[builder.catalog.tensors[update.tensor].name].bits.reshape(-1)
        at = slice(update.start, update.stop) if update.offsets is None else update.start + update.offsets
        flat[at] = update.values
    return [int(value) for value in digests_of(weights, builder.catalog)]


@settings(max_examples=15, deadline=None)
@given(versions=st.integers(1, 5), dense=st.one_of(st.none(), st.integers(1, 5)))
def test_a_chain_becomes_absolute_values_that_may_be_written_twice(
    versions: int, dense: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    builder = stream(versions, dense=dense)
    staged = staged_chain(builder, tmp_path_factory.mktemp("staging"))
    assert staged.relative or (dense is not None and dense <= versions)
    gather = gather_from(builder, builder.weights[0])
    goal = builder.manifests[-1].digest_array.tolist()
    for _ in range(2):  # preparing again gives the same
        resolved, changed = verify(staged, gather, lambda: None)
        assert not resolved.relative
        assert (resolved is staged) == (not staged.relative)
        assert changed is not None
        assert 0 < changed <= resolved.elements == staged.elements
        reopened = load_staged(resolved.path, resolved.hash)
        assert applied(builder, reopened) == applied(builder, reopened, times=2) == goal


def test_a_second_copy_with_other_bits_is_refused(tmp_path: Path) -> None:
    """FIELD_REPORTS: prime-rl#2823: differences are resolved for one copy, so all copies must hold the base."""
    builder = stream(1)
    staged = staged_chain(builder, tmp_path)
    base = builder.weights[0]
    verify(staged, gather_from(builder, base, base), lambda: None)
    with pytest.raises(VerificationFailed, match="version 1 cannot be reached from version 0"):
        verify(staged, gather_from(builder, base, perturbed(base, 1.0)), lambda: None)


def test_other_live_weights_are_refused(tmp_path: Path) -> None:
    """Random bits: where signs differ, a difference moves the bits the other way and the sum shows it."""
    builder = stream(1)
    staged = staged_chain(builder, tmp_path)
    with pytest.raises(VerificationFailed):
        verify(staged, gather_from(builder, small_weights(seed=5)), lambda: None)


def test_differences_without_their_base_are_no_update(tmp_path: Path) -> None:
    with pytest.raises(
        ManifestInvalid, match="differences to values that no step from version 1 on contains"
    ):
        staged_chain(stream(2), tmp_path, lie=True)


def flipped(update: Update) -> Update:
    return replace(update, values=update.values ^ update.values.dtype.type(1))


def sparse(update: Update) -> Update:
    return replace(update, offsets=np.arange(len(update.values), dtype=np.uint32))


@pytest.mark.parametrize(
    ("tensor", "staged_as"),
    [
        ("layers.0.w.weight", lambda update: [flipped(update)]),
        ("router.weight", lambda update: [flipped(update)]),
        ("layers.0.w.weight", lambda _: []),
        ("zeros", lambda _: []),
        ("zeros", lambda update: [replace(update, stop=6, values=update.values[:6])]),
        ("zeros", lambda update: [replace(update, start=2, values=update.values[2:])]),
        ("zeros", lambda update: [update, update]),
        ("zeros", lambda update: [sparse(update)]),
    ],
)
def test_what_is_not_all_of_the_anchor_is_refused(
    tensor: str, staged_as: Callable[[Update], list[Update]], tmp_path: Path
) -> None:
    """Zeros have the digest of nothing at all: that they are there has to be counted."""
    zeros = Tensor("BF16", np.zeros(8, np.uint16))
    builder = StreamBuilder(MemoryStore(), {**small_weights(), "zeros": zeros})
    whole = staged_chain(builder, tmp_path, base=None)
    verify(whole, lambda _: [], lambda: None)
    number = builder.catalog.ids[tensor]
    with StagingWriter(tmp_path / "wrong", whole.catalog, None, whole.target) as writer:
        for update in whole.updates():
            for one in staged_as(update) if update.tensor == number else [update]:
                writer.add(one)
        wrong = writer.finish()
    with pytest.raises(VerificationFailed, match=rf"from an anchor: the digests of '{tensor}' would differ"):
        verify(wrong, lambda _: [], lambda: None)


def test_from_an_anchor_nothing_is_left_to_resolve(tmp_path: Path) -> None:
    builder = stream(3)
    staged = staged_chain(builder, tmp_path, base=None)
    assert not staged.relative
    resolved, changed = verify(staged, lambda _: [], lambda: None)
    assert (resolved, changed) == (staged, None)
