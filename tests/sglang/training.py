"""A trainer of a checkpoint, with real AdamW and made-up gradients, and a subscriber that follows it."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file
from torch import nn

from chunkstore.open import StoreConfig, open_store
from deltasync.demo.sglang_server import SglangServer
from manifest.export import export_checkpoint
from publisher.publisher import Publisher
from subscriber.config import ServerConfig, SGLangEngineConfig, SubscriberConfig
from subscriber.daemon import AppliedVersion, Subscriber
from subscriber.engine import Prepared, Scattered
from subscriber.sglang.engine import SGLangEngine
from subscriber.threads import in_thread
from tests.sglang import oracle
from tests.sglang.oracle import PROMPTS
from tests.sglang.worker import catch_up
from tests.subscriber.parts import put_tensor
from tests.support.crashes import started

TIMEOUT = 120.0
"""Seconds that one version should never need, on a machine that is busy."""


class Trainer:
    """Publishes version 0, an anchor of `checkpoint`, into `folder`/store; then whatever `publish` has trained.

    Experts go by the names of the files, one module each, whatever a library makes of them in memory. Tensors with
    `frozen` in their names are not trained.
    """

    def __init__(
        self, checkpoint: Path, folder: Path, lr: float = 1e-4, seed: int = 0, frozen: str = "nothing"
    ) -> None:
        self.checkpoint, self.folder = checkpoint, folder
        self.store = folder / "store"
        self.model = nn.Module()
        for name, tensor in load_file(checkpoint / "model.safetensors").items():
            put_tensor(self.model, name, tensor.float())
            self.model.get_parameter(name).requires_grad_(frozen not in name)
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self._trained, lr=lr)
        self._generator = torch.Generator().manual_seed(seed)
        config: dict[str, Any] = {"store": {"url": str(self.store)}, "base_checkpoint": str(checkpoint)}
        self.version = 0
        self.followers: list[Follower] = []
        self.publisher = Publisher.attach(self.optimizer, self.model, config)

    def publish(self, steps: int = 1) -> int:
        """Take `steps` AdamW steps and publish. Returns the version."""
        for _ in range(steps):
            for parameter in self._trained:
                parameter.grad = torch.randn(parameter.shape, generator=self._generator)
            self.optimizer.step()
        commit = self.publisher.publish().result(TIMEOUT)
        assert commit is not None
        self.version = commit.manifest.version
        return self.version

    def export(self, version: int) -> Path:
        """That version as a Hugging Face checkpoint."""
        folder = self.folder / f"version-{version}"
        if not folder.exists():
            store = open_store(StoreConfig(url=str(self.store)))
            export_checkpoint(store, version, folder, config_dir=self.checkpoint)
        return folder


@contextmanager
def training(checkpoint: Path, folder: Path, **options: Any) -> Iterator[Trainer]:
    trainer = Trainer(checkpoint, folder, **options)
    try:
        yield trainer
    finally:
        trainer.publisher.close()


class _Engine(SGLangEngine):
    """Waits before it pauses its server for an update until `may_write`, once it `is_prepared`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.is_prepared, self.may_write = threading.Event(), threading.Event()
        self.may_write.set()

    async def scatter(self, prepared: Prepared) -> Scattered:
        self.is_prepared.set()
        await in_thread(lambda _: self.may_write.wait(TIMEOUT))
        return await super().scatter(prepared)


class Follower:
    """A subscriber, in this process, of the stream in `folder`/store for one server; its state survives there too."""

    def __init__(self, url: str, source: Trainer | Path, name: str = "worker", **engine: Any) -> None:
        folder = source if isinstance(source, Path) else source.folder
        server = ServerConfig(url=url)
        settings = SGLangEngineConfig(type="sglang", servers=(server,), **engine)
        self.config = SubscriberConfig(
            store=StoreConfig(url=str(folder / "store")),
            id=name,
            poll_interval=0.1,
            state_dir=folder / "state",
            http=None,
            engine=settings,
        )
        self.applied: list[AppliedVersion] = []
        self.engine = _Engine(settings, server, self.config.staging_path / "engine")
        self.subscriber = Subscriber(self.config, self.engine, self.applied.append)
        if isinstance(source, Trainer):
            source.followers.append(self)

    def start_process(self, crash_at: str = "") -> ForkServerProcess:
        """The same subscriber in a process of its own, until it has caught up, or dies at a crash point."""
        return started(crash_at, catch_up, self.config.model_dump_json(exclude_unset=True))

    def run_process(self, crash_at: str) -> int | None:
        """How it ended."""
        process = self.start_process(crash_at)
        process.join(TIMEOUT)
        return process.exitcode

    def __enter__(self) -> Self:
        self.subscriber.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """The server stays as it is."""
        self.engine.may_write.set()
        self.subscriber.stop()

    def prepare(self, trainer: Trainer) -> int:
        """Publish a version, and return once all is ready for its pause, which `reach` lets begin."""
        self.engine.is_prepared.clear()
        self.engine.may_write.clear()
        version = trainer.publish()
        assert self.engine.is_prepared.wait(TIMEOUT)
        return version

    def reach(self, version: int) -> None:
        """Wait until the server is at `version`."""
        self.engine.may_write.set()
        self.subscriber.wait_for(version, TIMEOUT)


def equals_export(server: SglangServer, trainer: Trainer, prompts: Sequence[Sequence[int]] = PROMPTS) -> None:
    """The server is, bit by bit, SGLang's own load of the newest version's export. Leaves that loaded.

    All that follow the trainer are stopped first: to them this load is a stranger's, for which they pause the server,
    and a request that is paused is computed anew in other batches, which changes its last bits.
    """
    for follower in trainer.followers:
        follower.stop()
    sums, logs = oracle.checksums(server), oracle.logprobs(server, prompts)
    oracle.load_from_disk(server, trainer.export(trainer.version), version="oracle")
    assert oracle.checksums(server) == sums
    assert oracle.logprobs(server, prompts) == logs
