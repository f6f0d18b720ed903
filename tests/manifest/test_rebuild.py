"""Rebuilding a version by whatever path is left around what is missing, damaged, or not what it promises."""

from collections.abc import Callable

import numpy as np
import pytest

from chunkstore.errors import CorruptObject, DeltasyncError, ObjectMissing
from chunkstore.memory import MemoryStore
from manifest.history import find_plan
from manifest.image import scratch_image
from manifest.keys import chunk_prefix, manifest_key
from manifest.rebuild import rebuild
from tests.support.streams import StreamBuilder, random_weights

SHAPES = {"a": (50,), "b": (6, 7)}

Harm = Callable[[StreamBuilder, str], None]


def lose(stream: StreamBuilder, key: str) -> None:
    stream.store.delete(key)


def flip(stream: StreamBuilder, key: str) -> None:
    data = bytearray(stream.store.get(key, limit=1 << 20))
    data[-1] ^= 1
    stream.store.put(key, bytes(data))


def build(harm: Harm | None) -> StreamBuilder:
    """An anchor, three deltas, another anchor of version 2: that one is harmed, or holds something else."""
    stream = StreamBuilder(MemoryStore(), random_weights(SHAPES))
    stream.train(0.2, steps=3)
    own = stream.manifests[2]
    promised = {"parent_hash": own.hash, "digests": own.digests, "root": own.root}
    held = stream.weights[2] if harm is not None else random_weights(SHAPES, seed=1)
    alternate = stream.make(held, None, version=2, **promised)
    assert stream.log.put_alternate(alternate).won
    assert find_plan(stream.log, None, 3).steps[0] == alternate
    if harm is not None:
        harm(stream, alternate.chunks[0].key)
    return stream


@pytest.mark.parametrize(
    ("harm", "error"), [(lose, ObjectMissing), (flip, CorruptObject), (None, CorruptObject)]
)
def test_a_step_that_cannot_be_taken_is_gone_around(harm: Harm | None, error: type[DeltasyncError]) -> None:
    stream = build(harm)
    with scratch_image(stream.catalog) as image:
        assert rebuild(stream.log, 3, image) == stream.manifests[3]
        for spec, bits in zip(stream.catalog.tensors, image.arrays, strict=True):
            np.testing.assert_array_equal(bits, stream.weights[3][spec.name].bits.ravel())
        lose(stream, stream.manifests[1].chunks[0].key)
        with pytest.raises(error, match="/00000000000000000002") as caught:
            rebuild(stream.log, 3, image)  # says what was wrong with the path that it would have taken
    assert manifest_key(2) not in caught.value.message  # nothing is wrong with that one
    if harm is None:
        alternate = stream.log.read_alternate(2)
        assert alternate is not None
        assert f"the anchor of version 2 ({chunk_prefix(2, alternate.attempt)})" in caught.value.message
