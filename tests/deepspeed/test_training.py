"""Real DeepSpeed trainers over gloo and a real subscriber, which holds at every version what DeepSpeed itself saves."""

import signal
from pathlib import Path

import pytest
import torch

from manifest.verify import verify_stream
from tests.deepspeed.layouts import LAYOUTS
from tests.deepspeed.rank import main
from tests.trainers.rank import STEPS
from tests.trainers.rank import main as torch_main
from tests.trainers.world import World


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_rollouts_hold_what_deepspeed_saves(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    world = World(tmp_path, main, layout.policy, getattr(torch, layout.inference_dtype))
    assert world.run(name, 2) == [0, 0]
    newest = world.checked[-1]
    assert newest >= 5
    assert sorted({*world.checked}) == list(range(newest + 1))
    found = [world.manifest(version) for version in range(newest + 1)]
    for manifest in found[1:]:
        stats = manifest.stats
        assert stats.unproved_blocks == 0
        assert sum(stats.sources.values()) == stats.elements
        assert stats.sources.keys() == layout.sources | ({"digest"} if layout.untrained else set())
        senders = {chunk.key.rpartition("/")[2].partition("-")[0] for chunk in manifest.chunks}
        assert senders == {"0", "1"}
    assert sum(manifest.optimizer_steps for manifest in found) == STEPS - 1  # one was skipped
    assert not verify_stream(world.store).problems


@pytest.mark.parametrize(
    ("first", "size", "point", "then", "size_then"),
    [
        ("ZeRO-1", 2, "writer.before_part:4", "BF16_Optimizer", 1),
        ("ZeRO-2", 1, "publisher.before_manifest:4", "ZeRO-2", 2),
        ("FSDP2, bf16 compute", 2, "writer.after_part:4", "ZeRO-2", 2),
    ],
)
def test_a_rank_that_is_killed_and_a_restart_with_other_ranks(
    first: str, size: int, point: str, then: str, size_then: int, tmp_path: Path
) -> None:
    """The new trainer continues the chain: what it holds is compared with it by digests, whatever the layout."""
    world = World(tmp_path, main if first in LAYOUTS else torch_main, LAYOUTS[then].policy)
    assert world.run(first, size, {size - 1: point})[-1] == -signal.SIGKILL
    before = world.checked[-1]
    assert before >= 1
    world.main = main
    assert world.run(then, size_then) == [0] * size_then
    newest = world.checked[-1]
    assert newest > before + 1
    assert [world.manifest(version).kind for version in range(newest + 1)] == ["anchor"] + ["delta"] * newest
    assert not verify_stream(world.store).problems


def test_another_layout_of_the_same_weights_sends_nothing(tmp_path: Path) -> None:
    world, newest = World(tmp_path, main, "odd"), 0
    for name, size in (("ZeRO-1", 2), ("BF16_Optimizer", 1), ("ZeRO-2, round robin", 2)):
        assert world.run(name, size) == [0] * size
        assert newest == 0 or (world.checked[-1], world.manifest(newest + 1).chunks) == (newest + 1, [])
        newest = world.checked[-1]
