"""kill −9 of the publisher's process at each of its crash points, then a restart: the last version is the trainer's."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from chunkstore.posix import PosixStore
from manifest.log import VersionLog, open_stream
from manifest.verify import verify_stream
from tests.publisher.zoo import published

STEPS = 4


def _run(store: Path, state: Path, crash_at: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.publisher.crashing_trainer", str(store), str(state), str(STEPS)]
    environment = {**os.environ, "DELTASYNC_CRASH_AT": crash_at}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


@pytest.mark.parametrize(
    "point",
    ["before_chunk:3", "after_chunks:3", "before_manifest:3", "after_manifest:3", "before_manifest:1"],
)
def test_killed_and_restarted_ends_bit_identical(tmp_path: Path, point: str) -> None:
    """FIELD_REPORTS: prime-rl#3386, slime#2104: dying between chunk upload and manifest loses no change."""
    root, state = tmp_path / "stream", tmp_path / "trainer.pt"
    first = _run(root, state, f"publisher.{point}")
    assert first.returncode == -signal.SIGKILL, first.stderr
    second = _run(root, state)
    assert second.returncode == 0, second.stderr
    store = PosixStore(root)
    newest = VersionLog(store, open_stream(store)).newest()
    assert newest is not None
    assert newest.version == int(second.stdout.split()[-1])
    rebuilt = published(store, newest.version)
    weights = torch.load(state, weights_only=True)["model"]
    for name, bits in rebuilt.items():
        live = (
            weights[name].bfloat16().view(torch.uint16)
            if weights[name].is_floating_point()
            else weights[name]
        )
        assert np.array_equal(bits, live.reshape(-1).numpy().view(bits.dtype)), name
    assert not verify_stream(store).problems
