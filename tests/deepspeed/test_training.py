"""Real DeepSpeed trainers over gloo and a real subscriber, which holds at every version what DeepSpeed itself saves."""

from pathlib import Path

import pytest
import torch

from manifest.verify import verify_stream
from tests.deepspeed.layouts import LAYOUTS
from tests.deepspeed.rank import main
from tests.trainers.rank import STEPS
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
