"""Staged updates: what is written comes back, and what was damaged does not."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkstore.dtypes import bits_dtype
from chunkstore.memory import MemoryStore
from manifest.merge import Update
from subscriber.errors import StagedLost
from subscriber.staging import StagedUpdate, StagingWriter, load_staged
from tests.subscriber.parts import small_weights
from tests.support.streams import StreamBuilder

BUILDER = StreamBuilder(MemoryStore(), small_weights())


def update_of(tensor: int, rng: np.random.Generator, relative: bool = False) -> Update:
    """Random values; `relative`: some of them differences, where the dtype allows it."""
    spec = BUILDER.catalog.tensors[tensor]
    kind = bits_dtype(spec.dtype)
    chosen = np.flatnonzero(rng.random(spec.numel) < 0.3)
    if not spec.sparse or not len(chosen):
        return Update(tensor, 0, spec.numel, None, rng.integers(0, 1 << 16, spec.numel).astype(kind))
    values = rng.integers(0, 1 << 16, len(chosen)).astype(kind)
    flags = rng.random(len(chosen)) < 0.5 if relative else None
    return Update(tensor, 0, spec.numel, chosen.astype(np.uint32), values, flags)


def write(path: Path, updates: list[Update]) -> StagedUpdate:
    with StagingWriter(path, BUILDER.catalog, None, BUILDER.manifests[0]) as writer:
        for update in updates:
            writer.add(update)
        return writer.finish()


def same(a: Update, b: Update) -> bool:
    places = (a.tensor, a.start, a.stop) == (b.tensor, b.start, b.stop)
    if a.relative is None or b.relative is None:
        places = places and a.relative is b.relative
    else:
        places = places and np.array_equal(a.relative, b.relative)
    if a.offsets is None or b.offsets is None:
        return places and a.offsets is b.offsets and np.array_equal(a.values, b.values)
    return places and np.array_equal(a.offsets, b.offsets) and np.array_equal(a.values, b.values)


@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=25, deadline=None)
def test_updates_come_back_as_they_were_written(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    rng = np.random.default_rng(seed)
    tensors = [i for i, spec in enumerate(BUILDER.catalog.tensors) if spec.numel]
    updates = [update_of(int(tensor), rng) for tensor in rng.choice(tensors, rng.integers(0, 6))]
    path = tmp_path_factory.mktemp("staging") / "update"
    staged = write(path, updates)
    again = load_staged(path, staged.hash)
    for reader in (staged, again):
        read = list(reader.updates())
        assert len(read) == len(updates)
        assert all(map(same, read, updates))
    assert again.target == BUILDER.manifests[0]
    assert again.catalog == BUILDER.catalog
    assert again.nbytes == (path / "values.bin").stat().st_size


@pytest.mark.parametrize("how", ["flip", "truncate", "remove"])
@pytest.mark.parametrize("name", ["values.bin", "index.msgpack", "manifest.msgpack", "catalog.msgpack"])
def test_a_damaged_file_is_noticed(name: str, how: str, tmp_path: Path) -> None:
    """FIELD_REPORTS: vmlx-swift#217: length and hash before use, at every boundary."""
    staged = write(tmp_path / "update", [update_of(0, np.random.default_rng(0))])
    file = staged.path / name
    data = file.read_bytes()
    damaged: list[bytes | None] = [data[:-1] if how == "truncate" else None]
    if how == "flip":  # some that still can be read, too
        places = range(0, len(data), 1 + len(data) // 300)
        damaged = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in places]
    for other in damaged:
        file.unlink()
        if other is not None:
            file.write_bytes(other)
        with pytest.raises(StagedLost, match="update"):
            list(load_staged(staged.path, staged.hash).updates())


def test_an_update_with_differences_comes_back_but_is_never_reopened(tmp_path: Path) -> None:
    """What may be written again after a crash holds no difference: applied twice it would be wrong."""
    rng = np.random.default_rng(1)
    sparse = [i for i, spec in enumerate(BUILDER.catalog.tensors) if spec.sparse and spec.numel > 20]
    updates = [update_of(i, rng, relative=True) for i in sparse]
    assert all(update.relative is not None for update in updates)
    staged = write(tmp_path / "update", updates)
    assert staged.relative
    assert all(map(same, staged.updates(), updates))
    with pytest.raises(StagedLost, match="never resolved"):
        load_staged(staged.path, staged.hash)


def test_an_unfinished_update_is_none(tmp_path: Path) -> None:
    with StagingWriter(tmp_path / "update", BUILDER.catalog, None, BUILDER.manifests[0]) as writer:
        writer.add(update_of(0, np.random.default_rng(0)))
    with pytest.raises(StagedLost):
        load_staged(tmp_path / "update", bytes(32))
