"""Streams that a server cannot take: refused before anything is paused or written, all offenders named."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from chunkstore.posix import PosixStore
from tests.sglang import oracle
from tests.sglang.conftest import Served
from tests.sglang.training import Follower
from tests.sglang.watcher import Watcher
from tests.subscriber.parts import live_bits, until
from tests.support.streams import StreamBuilder, Tensor

GATE = "model.layers.1.mlp.gate_proj.weight"
FINAL = "model.norm.weight"
NORM = "model.layers.0.input_layernorm.weight"


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    tensors = load_file(checkpoint / "model.safetensors")
    return {name: Tensor("BF16", live_bits(tensor)) for name, tensor in tensors.items()}


def missing(weights: dict[str, Tensor]) -> None:
    del weights[GATE], weights[NORM]


def surplus(weights: dict[str, Tensor]) -> None:
    weights["model.layers.7.mlp.up_proj.weight"] = weights[GATE]
    weights["model.vision.weight"] = weights[NORM]


def shaped(weights: dict[str, Tensor]) -> None:
    weights[FINAL] = Tensor("BF16", weights[FINAL].bits[:-1])
    weights[NORM] = Tensor("BF16", np.concatenate([weights[NORM].bits] * 2))


def typed(weights: dict[str, Tensor]) -> None:
    weights[GATE] = Tensor("F16", weights[GATE].bits)
    weights[NORM] = Tensor("F32", weights[NORM].bits.astype(np.uint32))


@pytest.mark.parametrize(
    ("harm", "offenders"),
    [
        (missing, ["gate_up_proj", "layers.0.input_layernorm"]),
        (surplus, ["layers.7.mlp", "model.vision.weight"]),
        (shaped, [FINAL, NORM]),
        (typed, [GATE, NORM]),
    ],
)
def test_a_stream_that_does_not_fit_is_refused_and_the_server_serves_on(
    dense: Served, tmp_path: Path, harm: Callable[[dict[str, Tensor]], None], offenders: list[str]
) -> None:
    weights = tensors_of(dense.checkpoint)
    harm(weights)
    builder = StreamBuilder(PosixStore(tmp_path / "store"), weights)
    before = oracle.checksums(dense.server)
    with Watcher(dense.server) as watcher, Follower(dense.server.url, tmp_path) as follower:
        report = follower.subscriber.report
        until(lambda: bool(report.status().refused))
        (refused,) = report.status().refused
        assert refused.version == builder.version
        assert refused.kind == "engine_mismatch"
        for offender in offenders:
            assert offender in refused.message
        answered = len(watcher.answers)
        until(lambda: len(watcher.answers) > answered)
        assert not report.ready
    assert oracle.checksums(dense.server) == before


def test_a_version_that_does_not_fit_leaves_the_one_before_in_service(dense: Served, tmp_path: Path) -> None:
    """The catalog changes in the middle of a stream; what is held goes on being served and watched."""
    weights = tensors_of(dense.checkpoint)
    builder = StreamBuilder(PosixStore(tmp_path / "store"), weights)
    with Follower(dense.server.url, tmp_path) as follower:
        follower.reach(0)
        other = dict(weights)
        missing(other)
        builder.anchor(other)
        report = follower.subscriber.report
        until(lambda: [refused.version for refused in report.status().refused] == [1])
        assert follower.subscriber.version == 0
        builder.anchor(weights)
        follower.reach(2)
        builder.train(0.01)
        follower.reach(3)
        assert not follower.applied[-1].from_anchor
