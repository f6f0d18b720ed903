"""Version 0 as a checkpoint that both sides have: nothing is uploaded; whoever lacks it says so and gets an anchor."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim import AdamW

from chunkstore.errors import ConfigError
from chunkstore.memory import MemoryStore
from chunkstore.open import StoreConfig
from deltasync.cli import main
from manifest.checkpoint import Checkpoint
from manifest.keys import CHUNKS
from manifest.log import VersionLog, open_stream
from manifest.restore import restore
from manifest.verify import verify_stream
from publisher.anchors import ChainGauge
from publisher.compact import compact
from publisher.errors import MappingMismatch
from publisher.group import Writer
from publisher.publisher import Publisher
from subscriber.config import SubscriberConfig
from subscriber.daemon import Subscriber
from subscriber.torch_engine import TorchEngine
from tests.subscriber.parts import TIMEOUT, running, until


def network(seed: int) -> nn.Module:
    """bf16 weights, as a checkpoint holds them."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(70, 60), nn.Linear(60, 20)).to(torch.bfloat16)


class Run:
    """A trainer that starts from the checkpoint `base`, on a stream that refers to it."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.name = str(tmp_path)
        self.store = MemoryStore.named(self.name)
        self.base = self.checkpoint("base", seed=1)
        self.model = network(seed=1).float()
        self.publisher = self.attach(self.model)
        self.publisher._feed._refusals._interval = 0.0  # type: ignore[attr-defined]
        self.log = VersionLog(self.store, open_stream(self.store))

    def attach(self, model: nn.Module) -> Publisher:
        config = {
            "store": {"url": f"memory://{self.name}"},
            "base_checkpoint": str(self.base),
            "refer_to_base": True,
        }
        self.optimizer = AdamW(model.parameters(), lr=1e-6)
        return Publisher.attach(self.optimizer, model, config)

    def checkpoint(self, name: str, seed: int) -> Path:
        folder = self.tmp_path / name
        folder.mkdir(exist_ok=True)
        save_file(network(seed).state_dict(), folder / "model.safetensors")
        return folder

    def publish(self) -> int:
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        commit = self.publisher.publish().result(TIMEOUT)
        assert commit is not None
        return commit.version

    def worker(self, module: nn.Module, **config: Any) -> Subscriber:
        settings = SubscriberConfig(
            store=StoreConfig(url=f"memory://{self.name}"),
            id=config.pop("id", "worker"),
            poll_interval=0.02,
            status_interval=0.1,
            state_dir=self.tmp_path / "state",
            http=None,
            **config,
        )
        return Subscriber(settings, TorchEngine(module, boot_id="boot"))

    def is_what(self, subscriber: Subscriber) -> bool:
        assert isinstance(subscriber.engine, TorchEngine)
        live = subscriber.engine.module.state_dict()
        return all(torch.equal(live[k], v.to(torch.bfloat16)) for k, v in self.model.state_dict().items())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_no_dense_upload_happens_at_all(run: Run) -> None:
    """Engines that have loaded the checkpoint, and one that has it on disk only, follow by deltas alone."""
    assert run.log.read_required(0).kind == "reference"
    assert list(run.store.list_after(CHUNKS)) == []
    loaded = run.worker(network(seed=1), id="loaded")
    blank = run.worker(network(seed=2), id="blank", base_checkpoint=run.base)
    with run.publisher, running(loaded), running(blank):
        loaded.wait_for(0, TIMEOUT)
        blank.wait_for(0, TIMEOUT)
        for _ in range(3):
            newest = run.publish()
        loaded.wait_for(newest, TIMEOUT)
        blank.wait_for(newest, TIMEOUT)
        assert run.is_what(loaded)
        assert run.is_what(blank)
    late = run.worker(network(seed=3), id="late", base_checkpoint=run.base)
    with running(late):
        late.wait_for(newest, TIMEOUT)
        assert run.is_what(late)
    manifests = [run.log.read_required(version) for version in range(1, newest + 1)]
    assert {manifest.kind for manifest in manifests} == {"delta"}
    assert not any(s.whole for m in manifests for chunk in m.chunks for s in chunk.sections)
    assert run.log.alternates() == []


@pytest.mark.parametrize("has", ["nothing", "another", "no folder"])
def test_whoever_lacks_the_checkpoint_says_so_and_gets_an_anchor(has: str, run: Run) -> None:
    base = {"nothing": None, "another": run.checkpoint("other", seed=5), "no folder": run.base / "gone"}[has]
    worker = run.worker(network(seed=2), base_checkpoint=base)
    with run.publisher, running(worker):
        newest = run.publish()
        until(lambda: bool(worker.report.status().refused))
        refusal = worker.report.status().refused[-1]
        assert (refusal.kind, refusal.action) == ("chain" if base is None else "base_missing", "reseed")
        assert "checkpoint" in refusal.message
        while not run.log.alternates():
            newest = run.publish()
        worker.wait_for(newest, TIMEOUT)
        assert run.is_what(worker)
        until(lambda: worker.report.status().refused == [])


def test_a_restarted_trainer_goes_on_from_the_reference(run: Run) -> None:
    run.publish()
    run.publisher.close()
    run.publisher = run.attach(run.model)
    newest = run.publish()
    run.publisher.close()
    report = verify_stream(run.store, base=Checkpoint.open(run.base))
    assert (report.problems, report.unverified) == ((), ())
    assert newest == 3
    report = verify_stream(run.store)
    assert (report.problems, report.unverified) == ((), (0, 1, 2, 3))


def test_the_trainer_must_start_from_it(run: Run, tmp_path: Path) -> None:
    run.publisher.close()
    for info in list(run.store.list_after("")):
        run.store.delete(info.key)
    with pytest.raises(MappingMismatch, match="differ from base checkpoint"):
        run.attach(network(seed=8).float())
    assert list(run.store.list_after("versions/")) == []
    with pytest.raises(ConfigError, match="refer_to_base"):
        Publisher.attach(
            run.optimizer,
            run.model,
            {"store": {"url": "memory://x"}, "inference_dtype": "bfloat16", "refer_to_base": True},
        )


def test_several_writers_do_not_refer(run: Run) -> None:
    config = {"store": {"url": "memory://x"}, "base_checkpoint": str(run.base), "refer_to_base": True}
    with run.publisher, pytest.raises(ConfigError, match="where one process feeds the stream"):
        Publisher.attach(run.optimizer, run.model, config, writer=Writer(0, 2, "run"))


def test_compaction_and_export_need_it_until_there_is_an_anchor(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    version = run.publish()
    run.publisher.close()
    url, base = run.store.url, ["--base-checkpoint", str(run.base)]
    assert main(["store", "export", url, str(run.tmp_path / "out")]) == 1
    assert "version 0 refers to a checkpoint" in capsys.readouterr().err
    other = ["--base-checkpoint", str(run.checkpoint("other", seed=5))]
    assert main(["store", "compact", url, *other]) == 1
    assert "base_missing" in capsys.readouterr().err
    assert main(["store", "export", url, str(run.tmp_path / "out"), *base]) == 0
    manifest = run.log.read_required(version)
    chain = ChainGauge(run.log).measure(manifest)
    assert (chain.versions, chain.nbytes, chain.anchor_nbytes) == (
        1,
        manifest.nbytes,
        2 * (71 * 60 + 61 * 20),
    )
    anchor = compact(run.log, version, 3600.0, base=Checkpoint.open(run.base))
    assert anchor.kind == "anchor"
    assert sum(len(bits) for *_, bits in restore(run.store, run.log, version)) == 71 * 60 + 61 * 20
    assert main(["store", "verify", url, *base]) == 0
