"""Servers that die and come back, that want keys, that are several replicas."""

from pathlib import Path

from deltasync.demo.sglang_server import SglangOptions, SglangServer
from tests.sglang import oracle
from tests.sglang.conftest import SGLANG_PYTHON, StartServer, with_faults
from tests.sglang.training import Follower, equals_export, training
from tests.subscriber.parts import until
from tests.support.tiny_models import save_qwen3


def test_a_server_that_is_killed_in_every_phase(dense_checkpoint: Path, tmp_path: Path) -> None:
    """It comes back with its first weights, and is not ready before it is at the newest version again.

    FIELD_REPORTS: miles#1724, AReaL#1726: a recovered engine must get no traffic before it is synced.
    """
    faults = tmp_path / "faults"
    faults.mkdir()
    options = SglangOptions(python=SGLANG_PYTHON, model=dense_checkpoint, **with_faults(faults))
    with training(dense_checkpoint, tmp_path, frozen="embed") as trainer:
        port = None
        follower = None
        for number, point in enumerate(["gather", "write", "digest", None]):
            with SglangServer(options, tmp_path / f"server-{number}.log", port) as server:
                port = server.port
                server.wait_ready()
                if follower is None:
                    follower = Follower(server.url, trainer, request_timeout=10.0)
                    follower.subscriber.start()
                follower.reach(trainer.version)
                if point is None:
                    equals_export(server, trainer)
                    break
                (faults / f"0.{point}").write_text("after 1 kill")
                trainer.publish()
                if point == "digest":  # somebody else writes, so everything is digested
                    oracle.load_from_disk(server, dense_checkpoint)
                _wait_for_death(server)
            _wait_until_unready(follower)


def _wait_for_death(server: SglangServer) -> None:
    until(lambda: not server.running)


def _wait_until_unready(follower: Follower) -> None:
    until(lambda: not follower.subscriber.report.ready and follower.subscriber.version is None)


def test_keys_and_replicas(tmp_path: Path, start_server: StartServer) -> None:
    """Two replicas behind one URL are brought along together; requests carry the key that SGLang wants.

    Of a tied model: one memory under two names.
    """
    tied = save_qwen3(tmp_path / "tied", seed=3, tied=True)
    server = start_server(
        tied,
        api_key="plain",
        admin_api_key="secret",
        flags=("--dp-size", "2"),
        environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    )
    (tmp_path / "key").write_text("secret\n")
    with training(tied, tmp_path) as trainer:
        with Follower(server.url, trainer, api_key="plain") as follower:
            until(lambda: follower.subscriber.report.status().last_error is not None)
            error = follower.subscriber.report.status().last_error
            assert error is not None
            assert "HTTP 401" in error.message
            assert "admin_api_key" in error.hint
        with Follower(server.url, trainer, admin_api_key_file=tmp_path / "key") as follower:
            follower.reach(0)
            follower.reach(trainer.publish())
        sums = oracle.checksums(server)
        assert len(sums) == 2
        assert sums[0] == sums[1]
        assert "model.embed_tokens.weight" in sums[0]
        assert "lm_head.weight" not in sums[0]
        oracle.load_from_disk(server, trainer.export(1))
        assert oracle.checksums(server) == sums
