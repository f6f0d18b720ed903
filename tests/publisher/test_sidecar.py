"""A trainer and a real publisher process over shared memory: versions are bit-identical whoever dies or stalls."""

import copy
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from manifest.errors import Fenced, LocalDiskError
from manifest.verify import verify_stream
from publisher.errors import (
    CaptureLost,
    MappingMismatch,
    OptimizerRefused,
    PublisherStopped,
    SidecarBusy,
    SidecarUnavailable,
)
from publisher.frames import SOCKET
from publisher.listener import Listener
from publisher.publisher import Publisher
from publisher.share import SharedState, share_optimizer_state
from tests.publisher.sidecars import ROOT, WAIT, Sidecar, sidecar_thread, store_of, write_config
from tests.publisher.zoo import Zoo, adamw, assert_identical, attach, make, train
from tests.support.faults import FaultStore


def _publish(publisher: Publisher, model: Zoo, config: Path) -> int:
    """Publish, compare what was committed with the live model, and return the version."""
    commit = publisher.publish().result(WAIT)
    assert commit is not None
    assert_identical(publisher, model, store_of(config), commit.version)
    return commit.version


def test_versions_of_any_number_of_steps_are_bit_identical_and_proved(tmp_path: Path) -> None:
    """Several versions, tied weights, buffers replaced by assignment, a base checkpoint in mixed dtypes."""
    model, checkpoint = make(tmp_path / "base")
    optimizer = adamw(model)
    config = write_config(tmp_path, more=f"base_checkpoint: '{checkpoint}'")
    steps = random.Random(5)
    with Sidecar(config) as sidecar:
        with Publisher.attach(optimizer, model, config) as publisher:
            assert publisher.version == 0
            assert_identical(publisher, model, store_of(config), 0)
            for version in range(1, 7):
                k = steps.randint(1, 5)
                for i in range(k):
                    train(model, optimizer, 10 * version + i)
                commit = publisher.publish(train_step=version, anchor=version == 4).result(WAIT)
                assert commit is not None
                assert (commit.version, commit.manifest.train_step) == (version, version)
                assert commit.manifest.optimizer_steps == k
                assert commit.manifest.stats.unproved_blocks == 0
                assert publisher.version == version
                assert_identical(publisher, model, store_of(config), version)
            model.eval()
            assert publisher.publish().result(WAIT) is None
        assert sorted(p.name for p in (tmp_path / "spool").iterdir()) == ["publisher.lock", SOCKET]
        sidecar.process.send_signal(signal.SIGTERM)
        assert sidecar.process.wait(WAIT) == 0
    assert [p.name for p in (tmp_path / "spool").iterdir()] == ["publisher.lock"]
    assert not verify_stream(store_of(config)).problems


def test_whatever_replaces_the_shared_memory_is_brought_back(tmp_path: Path) -> None:
    """Weights given other memory, a reloaded optimizer, edits between step and publish, a buffer set by hand."""
    model = Zoo()
    optimizer = adamw(model, lr=1e-6)
    config = write_config(tmp_path)
    with sidecar_thread(config), Publisher.attach(optimizer, model, config) as publisher:
        train(model, optimizer, 1)
        saved = copy.deepcopy(optimizer.state_dict())
        assert _publish(publisher, model, config) == 1
        optimizer.load_state_dict(saved)
        for seed in (2, 3):
            train(model, optimizer, seed)
        commit = publisher.publish().result(WAIT)
        assert commit is not None
        assert commit.manifest.stats.unproved_blocks == 0  # the reloaded moments were found
        with torch.no_grad():
            model.embed.weight.data = model.embed.weight * 2
            model.frozen.bias.add_(1)
            model.mean = torch.full((64,), 7.0)
        assert _publish(publisher, model, config) == 3
        train(model, optimizer, 4)
        assert _publish(publisher, model, config) == 4


@pytest.mark.parametrize(
    "point",
    ["sidecar.captured:2", "sidecar.sealed:2", "publisher.before_manifest:3", "publisher.after_manifest:3"],
)
def test_a_killed_publisher_process_loses_nothing(tmp_path: Path, point: str) -> None:
    """FIELD_REPORTS: prime-rl#3386, slime#2104: whatever it had captured, sealed or uploaded is in a later version."""
    model = Zoo()
    optimizer = adamw(model)
    config = write_config(tmp_path)
    with Sidecar(config, crash_at=point) as sidecar:
        publisher = Publisher.attach(optimizer, model, config)
        train(model, optimizer, 1)
        assert _publish(publisher, model, config) == 1
        train(model, optimizer, 2)
        with pytest.raises(SidecarUnavailable):
            publisher.publish().result(WAIT)
        assert sidecar.killed()
    train(model, optimizer, 3)  # training goes on
    with pytest.raises(SidecarUnavailable, match="deltasync publisher run"):
        publisher.publish().result(WAIT)
    with sidecar_thread(config), publisher:
        commit = publisher.publish().result(WAIT)
        assert commit is not None
        assert commit.manifest.epoch == 2
        assert_identical(publisher, model, store_of(config), commit.version)
        _publish_after_training(publisher, model, optimizer, config)
    assert not verify_stream(store_of(config)).problems


def test_a_publisher_process_killed_at_attach_is_taken_over_from(tmp_path: Path) -> None:
    model = Zoo()
    optimizer = adamw(model)
    config = write_config(tmp_path)
    with Sidecar(config, crash_at="sidecar.opened") as sidecar:
        with pytest.raises(SidecarUnavailable):
            Publisher.attach(optimizer, model, config)
        assert sidecar.killed()
    with sidecar_thread(config), Publisher.attach(optimizer, model, config) as publisher:
        assert publisher.version == 1
        assert _publish_after_training(publisher, model, optimizer, config) == 2


def _publish_after_training(
    publisher: Publisher, model: Zoo, optimizer: torch.optim.Optimizer, config: Path
) -> int:
    for seed in (21, 22):
        train(model, optimizer, seed)
    commit = publisher.publish().result(WAIT)
    assert commit is not None
    assert commit.manifest.optimizer_steps == 2
    assert commit.manifest.stats.unproved_blocks == 0  # both steps were captured
    assert_identical(publisher, model, store_of(config), commit.version)
    return commit.version


def test_a_killed_trainer_is_followed_by_the_next(tmp_path: Path) -> None:
    """kill −9 in the middle of training; the next trainer's weights are what the stream ends with."""
    config = write_config(tmp_path)
    with Sidecar(config) as sidecar:
        command = [sys.executable, "-m", "tests.publisher.endless_trainer", str(config)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as trainer:
            assert trainer.stdout is not None
            assert [trainer.stdout.readline().strip() for _ in range(3)] == ["0", "1", "2"]
            trainer.kill()
        sidecar.wait_for("the trainer has left")
        model = Zoo()
        optimizer = adamw(model)
        with Publisher.attach(optimizer, model, config) as publisher:
            assert publisher.version >= 3
            assert_identical_after_publish(publisher, model, config)
            _publish_after_training(publisher, model, optimizer, config)
            states = list((tmp_path / "spool").glob("*.state"))
            assert len(states) == 1, "the dead trainer's memory is still there"
    assert not verify_stream(store_of(config)).problems


def assert_identical_after_publish(publisher: Publisher, model: Zoo, config: Path) -> None:
    commit = publisher.publish().result(WAIT)
    assert commit is not None
    assert commit.manifest.epoch == 2
    assert_identical(publisher, model, store_of(config), commit.version)


def test_a_stopped_publisher_process_does_not_stop_training(tmp_path: Path) -> None:
    model = Zoo()
    optimizer = adamw(model)
    config = write_config(tmp_path, timeout=2.0)
    with Sidecar(config) as sidecar, Publisher.attach(optimizer, model, config) as publisher:
        train(model, optimizer, 1)
        assert _publish(publisher, model, config) == 1
        os.kill(sidecar.process.pid, signal.SIGSTOP)
        for seed in range(2, 8):
            train(model, optimizer, seed)
        with pytest.raises(CaptureLost, match=r"did not finish 'publish' within 2 s"):
            publisher.publish().result(0)
        train(model, optimizer, 9)
        os.kill(sidecar.process.pid, signal.SIGCONT)
        sidecar.wait_for("the trainer went on before")
        commit = publisher.publish().result(WAIT)
        assert commit is not None
        assert commit.version == 2
        assert commit.manifest.optimizer_steps == 7
        assert_identical(publisher, model, store_of(config), 2)
        train(model, optimizer, 10)
        proved = publisher.publish().result(WAIT)
        assert proved is not None
        assert proved.manifest.stats.unproved_blocks == 0  # captured again from here on
        assert_identical(publisher, model, store_of(config), 3)


class SlowStore:
    """A stream's store whose chunk uploads wait while `closed`."""

    def __init__(self, config: Path) -> None:
        self.open = threading.Event()
        self.open.set()
        self.store = FaultStore(store_of(config), before=self._wait)

    def _wait(self, operation: str, key: str) -> Exception | None:
        if operation == "put" and key.startswith("chunks/"):
            assert self.open.wait(WAIT)
        return None


def test_steps_are_captured_while_the_upload_lags(tmp_path: Path) -> None:
    """The trainer is held no longer than the bound, and what it publishes too early is in the next version."""
    model = Zoo()
    optimizer = adamw(model)
    config = write_config(tmp_path, timeout=1.0)
    slow = SlowStore(config)
    with sidecar_thread(config, slow.store), Publisher.attach(optimizer, model, config) as publisher:
        slow.open.clear()
        train(model, optimizer, 1)
        first = publisher.publish()
        train(model, optimizer, 2)
        with pytest.raises(SidecarBusy, match="still being uploaded after 1 s"):
            publisher.publish().result(0)
        train(model, optimizer, 3)
        assert not first.done()
        slow.open.set()
        commit = first.result(WAIT)
        assert commit is not None
        assert commit.version == publisher.version == 1
        second = publisher.publish().result(WAIT)
        assert second is not None
        assert second.manifest.optimizer_steps == 2
        assert second.manifest.stats.unproved_blocks == 0
        assert_identical(publisher, model, store_of(config), 2)


def test_a_publisher_process_told_to_stop_brings_the_last_version_to_its_end(tmp_path: Path) -> None:
    model = Zoo()
    optimizer = adamw(model)
    config = write_config(tmp_path)
    slow = SlowStore(config)
    with sidecar_thread(config, slow.store) as listener:
        publisher = Publisher.attach(optimizer, model, config)
        slow.open.clear()
        train(model, optimizer, 1)
        handle = publisher.publish()
        listener.stop()
        slow.open.set()
        commit = handle.result(WAIT)
        assert commit is not None
        assert_identical(publisher, model, store_of(config), 1)
    train(model, optimizer, 2)
    with pytest.raises(SidecarUnavailable):
        publisher.publish().result(0)
    publisher.close()
    assert not list((tmp_path / "spool").glob("*.state"))


def test_a_trainer_whose_stream_is_taken_over_is_fenced_as_in_its_own_process(tmp_path: Path) -> None:
    model = Zoo()
    optimizer = adamw(model)
    config = write_config(tmp_path)
    with sidecar_thread(config):
        publisher = Publisher.attach(optimizer, model, config)
        other = Zoo()
        attach(other, adamw(other), store_of(config)).close()
        train(model, optimizer)
        with pytest.raises(Fenced, match=r"\(epoch 1\) lost version 1 .*\(epoch 2\)"):
            publisher.publish().result(WAIT)
        with pytest.raises(Fenced):
            publisher.publish()
        with pytest.raises(PublisherStopped):
            publisher.publish()
        publisher.close()


def test_without_a_publisher_process_attach_says_how_to_start_one(tmp_path: Path) -> None:
    model = Zoo()
    (tmp_path / "spool").mkdir()
    config = write_config(tmp_path, timeout=0.2)
    with pytest.raises(SidecarUnavailable, match="start `deltasync publisher run`"):
        Publisher.attach(adamw(model), model, config)
    assert not list((tmp_path / "spool").iterdir())  # nothing was shared with nobody


def test_moving_a_large_state_may_take_longer_than_a_silent_peer_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """7 GB took more than the 10 seconds: the publisher process had hung up before the trainer asked for anything."""
    patience = 0.3
    monkeypatch.setattr("publisher.session._FIRST_MESSAGE", patience)

    def slow_share(*arguments: Any) -> SharedState:
        threading.Event().wait(3 * patience)
        return share_optimizer_state(*arguments)

    monkeypatch.setattr("publisher.sidecar.share_optimizer_state", slow_share)
    config = write_config(tmp_path)
    model = Zoo()
    with sidecar_thread(config), Publisher.attach(adamw(model), model, config) as publisher:
        assert publisher.version == 0


def test_a_wrong_mapping_is_refused_through_the_process(tmp_path: Path) -> None:
    model, checkpoint = make(tmp_path / "base")
    with torch.no_grad():
        model.inner.weight.copy_(model.inner.weight[torch.randperm(700)])
    config = write_config(tmp_path, more=f"base_checkpoint: '{checkpoint}'")
    with sidecar_thread(config), pytest.raises(MappingMismatch, match=r"1 of \d+ tensors differ.*inner"):
        Publisher.attach(adamw(model), model, config)
    assert load_file(checkpoint / "model.safetensors")


def test_state_that_is_not_in_cpu_memory_is_refused(tmp_path: Path) -> None:
    model = Zoo().to("meta")
    config = write_config(tmp_path)
    with sidecar_thread(config), pytest.raises(OptimizerRefused, match="leave `spool` out"):
        Publisher.attach(adamw(model), model, config)


def test_one_publisher_process_per_spool(tmp_path: Path) -> None:
    with (
        Listener(tmp_path, 1.0),
        pytest.raises(LocalDiskError, match="another publisher process"),
        Listener(tmp_path, 1.0),
    ):
        pass
