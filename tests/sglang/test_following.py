"""A subscriber of a real server over its life: starts, restarts, strangers, running requests."""

import signal
from pathlib import Path

import pytest

from tests.sglang import oracle
from tests.sglang.conftest import Served
from tests.sglang.oracle import Stream
from tests.sglang.training import Follower, equals_export, training
from tests.sglang.watcher import versions_of
from tests.subscriber.parts import until
from tests.support.tiny_models import save_qwen3


def test_a_chain_of_versions_is_one_pause(dense: Served, tmp_path: Path) -> None:
    with training(dense.checkpoint, tmp_path) as trainer:
        for _ in range(3):
            trainer.publish()
        with Follower(dense.server.url, trainer) as follower:
            follower.reach(3)
            (applied,) = follower.applied
            assert len(applied.manifests) == 3
            assert not applied.from_anchor
        equals_export(dense.server, trainer)


def test_a_server_at_another_checkpoint_is_brought_up_from_an_anchor(dense: Served, tmp_path: Path) -> None:
    """Served meanwhile: nothing, for what it holds is no version of the stream."""
    other = save_qwen3(tmp_path / "other", seed=98)
    oracle.load_from_disk(dense.server, other)
    with training(dense.checkpoint, tmp_path) as trainer:
        trainer.publish()
        with Follower(dense.server.url, trainer) as follower:
            follower.reach(1)
            assert follower.applied[0].from_anchor
        equals_export(dense.server, trainer)


def test_what_a_killed_subscriber_held_back_is_not_served(dense: Served, tmp_path: Path) -> None:
    """It dies before it has paused: no batch runs, and a request that comes waits for the next one."""
    other = save_qwen3(tmp_path / "other", seed=98)
    oracle.load_from_disk(dense.server, other, version="stranger")
    with training(dense.checkpoint, tmp_path) as trainer:
        trainer.publish()
        follower = Follower(dense.server.url, trainer)
        assert follower.run_process("subscriber.after_hold") == -signal.SIGKILL
        with Stream(dense.server, tokens=8) as stream:
            with follower:
                follower.reach(1)
            stream.result()
        assert versions_of(stream.meta) == ("1",)
        equals_export(dense.server, trainer)


def test_a_new_subscriber_finds_what_the_server_holds(dense: Served, tmp_path: Path) -> None:
    with training(dense.checkpoint, tmp_path) as trainer:
        trainer.publish()
        with Follower(dense.server.url, trainer) as first:
            first.reach(1)
        with (
            Stream(dense.server, tokens=64) as stream,
            Follower(dense.server.url, trainer, name="another") as second,
        ):
            stream.wait_for(1)
            second.reach(1)
            assert second.applied == []
        assert versions_of(stream.meta) == ("1",)
        equals_export(dense.server, trainer)


@pytest.mark.parametrize("harmless", [False, True])
def test_somebody_elses_update_is_noticed_at_once(dense: Served, tmp_path: Path, harmless: bool) -> None:
    """Without a new version to apply; what it wrote is digested, and replaced unless it was the version itself."""
    other = save_qwen3(tmp_path / "other", seed=98)
    with training(dense.checkpoint, tmp_path) as trainer, Follower(dense.server.url, trainer) as follower:
        follower.reach(trainer.publish())
        mine = trainer.export(1) if harmless else other
        oracle.load_from_disk(dense.server, mine, version="stranger")
        until(lambda: oracle.info(dense.server, "/model_info")["weight_version"] == "1")
        until(lambda: follower.subscriber.report.ready and follower.subscriber.version == 1)
        assert [applied.from_anchor for applied in follower.applied[1:]] == ([] if harmless else [True])
        equals_export(dense.server, trainer)


def test_running_requests_go_on_with_the_new_weights_and_say_so(dense: Served, tmp_path: Path) -> None:
    with training(dense.checkpoint, tmp_path) as trainer, Follower(dense.server.url, trainer) as follower:
        follower.reach(trainer.publish())
        version = follower.prepare(trainer)
        with Stream(dense.server, tokens=400) as stream:
            stream.wait_for(10)
            follower.reach(version)
            stream.wait_for(len(stream.ids) + 1)
        assert versions_of(stream.meta) == ("1", "2")
        assert len(stream.ids) == 400


def test_running_requests_are_aborted_if_so_configured(dense: Served, tmp_path: Path) -> None:
    with (
        training(dense.checkpoint, tmp_path) as trainer,
        Follower(dense.server.url, trainer, pause="abort") as follower,
    ):
        follower.reach(trainer.publish())
        version = follower.prepare(trainer)
        with Stream(dense.server, tokens=450) as stream:
            stream.wait_for(10)
            follower.reach(version)
            assert stream.result()["finish_reason"]["type"] == "abort"
        assert versions_of(stream.meta) == ("1",)
        equals_export(dense.server, trainer)


def test_nothing_is_decoded_from_the_old_weights_cache(dense: Served, tmp_path: Path) -> None:
    prompt = tuple(range(100, 164))
    with training(dense.checkpoint, tmp_path, lr=0.01, frozen="embed") as trainer:
        with Follower(dense.server.url, trainer) as follower:
            follower.reach(0)
            with Stream(dense.server, tokens=8, prompt=prompt):
                pass  # its prefix is in the cache now
            follower.reach(trainer.publish())
            with Stream(dense.server, tokens=8, prompt=prompt) as after:
                pass
            assert after.meta["cached_tokens"] == 0
        (fresh,) = oracle.logprobs(dense.server, [prompt], tokens=8)
        assert tuple(after.ids) == fresh.ids
