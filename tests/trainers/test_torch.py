"""Real trainers over gloo and a real subscriber, which holds the trainer's gathered weights at every version."""

import signal
from pathlib import Path

import pytest

from manifest.verify import verify_stream
from tests.trainers.layouts import LAYOUTS
from tests.trainers.rank import main
from tests.trainers.world import World


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_rollouts_hold_what_the_trainer_gathers(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    world, size = World(tmp_path, main, layout.serves or layout.policy), layout.world_size
    assert world.run(name, size) == [0] * size
    newest = world.checked[-1]
    assert newest >= 5
    assert sorted({*world.checked}) == list(range(newest + 1))
    writers = size if layout.everyone else 1
    for version in range(1, newest + 1):
        stats = world.manifest(version).stats
        assert stats.unproved_blocks == 0
        assert sum(stats.sources.values()) == stats.elements
        assert ("inversion" in stats.sources) != ("snapshot" in stats.sources)
        senders = {chunk.key.rpartition("/")[2].partition("-")[0] for chunk in world.manifest(version).chunks}
        assert senders == {str(rank) for rank in range(writers)}
    assert not verify_stream(world.store).problems


@pytest.mark.parametrize(
    ("name", "point", "then", "size"),
    [
        ("FSDP2, uneven and empty shards", "writer.before_part:4", "FSDP2, uneven and empty shards", 3),
        ("FSDP2, columns", "writer.after_part:4", "ZeroRedundancyOptimizer", 2),
    ],
)
def test_a_rank_that_is_killed_and_a_restart_with_other_ranks(
    name: str, point: str, then: str, size: int, tmp_path: Path
) -> None:
    """The new trainer continues the chain: what it holds is compared with it by digests, whatever the layout."""
    world = World(tmp_path, main, LAYOUTS[name].serves or LAYOUTS[name].policy)
    assert world.run(name, LAYOUTS[name].world_size, {1: point})[1] == -signal.SIGKILL
    before = world.checked[-1]
    assert before >= 1
    assert world.run(then, size) == [0] * size
    newest = world.checked[-1]
    assert newest > before + 1
    assert [world.manifest(version).kind for version in range(newest + 1)] == ["anchor"] + ["delta"] * newest
    assert not verify_stream(world.store).problems
