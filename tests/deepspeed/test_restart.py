"""DeepSpeed trainers that are killed while they publish, and go on with other ranks or another ZeRO stage."""

import signal
from pathlib import Path

import pytest

from manifest.verify import verify_stream
from tests.deepspeed.layouts import LAYOUTS
from tests.deepspeed.rank import main
from tests.trainers.world import World


@pytest.mark.parametrize(
    ("first", "dies", "last"),
    [
        ("ZeRO-3", {1: "writer.before_part:4"}, "ZeRO-3, zero.Init, persistent"),
        ("ZeRO-2, round robin", {0: "publisher.before_manifest:4"}, "ZeRO-3, offloaded, torch's AdamW"),
    ],
)
def test_trainers_continue_with_what_the_stream_has(
    first: str, dies: dict[int, str], last: str, tmp_path: Path
) -> None:
    """Two ranks, then one, then two: each knows by digests what the one before has published."""
    world = World(tmp_path, main, LAYOUTS[first].policy)
    (rank,) = dies
    assert world.run(first, 2, dies)[rank] == -signal.SIGKILL
    before = world.checked[-1]
    assert before >= 1
    # It dies when all that it had published was committed, so that the next one begins with just that.
    assert world.run("ZeRO-3", 1, {0: "publisher.after_manifest:2"}) == [-signal.SIGKILL]
    between = world.checked[-1]
    assert world.run(last, 2) == [0, 0]
    newest = world.checked[-1]
    assert newest > between + 2 > before + 3
    found = [world.manifest(version) for version in range(newest + 1)]
    assert [manifest.kind for manifest in found] == ["anchor"] + ["delta"] * newest
    (taken,) = (m.version for m in found[between + 1 :] if m.epoch > found[m.version - 1].epoch)
    for manifest in found[taken:]:
        assert manifest.stats.unproved_blocks == 0
        assert manifest.stats.changed < manifest.stats.elements / 2, manifest.version
    assert not verify_stream(world.store).problems
