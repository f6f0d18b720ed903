"""Versions of a real trainer applied to real servers: bit for bit what SGLang's own load of the same version gives."""

from pathlib import Path

import pytest

from tests.sglang import oracle
from tests.sglang.conftest import Served
from tests.sglang.training import Follower, training


@pytest.fixture(params=["dense", "moe"])
def served(request: pytest.FixtureRequest) -> Served:
    value: Served = request.getfixturevalue(request.param)
    return value


def test_every_version_equals_sglangs_own_load_of_its_export(served: Served, tmp_path: Path) -> None:
    """The server begins with the checkpoint that version 0 is: recognised by digest, not loaded."""
    server = served.server
    with training(served.checkpoint, tmp_path) as trainer:
        found = {}
        with Follower(server.url, trainer) as follower:
            follower.reach(0)
            assert follower.applied == []
            for steps in (1, 3, 2):
                version = trainer.publish(steps)
                follower.reach(version)
                found[version] = oracle.checksums(server), oracle.logprobs(server)
                assert oracle.info(server, "/model_info")["weight_version"] == str(version)
            assert not any(applied.from_anchor for applied in follower.applied)
        for version, (sums, logs) in found.items():
            oracle.load_from_disk(server, trainer.export(version), version="oracle")
            assert oracle.checksums(server) == sums
            assert oracle.logprobs(server) == logs
        assert len({str(sums) for sums, _ in found.values()}) == len(found)
