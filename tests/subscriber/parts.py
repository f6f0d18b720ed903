"""What the subscriber's tests share: small streams, real modules made for them, and one look at all live bits."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from chunkstore.dtypes import BITS, Bits
from chunkstore.errors import DeltasyncError, StoreUnavailable
from chunkstore.memory import MemoryStore
from chunkstore.open import StoreConfig
from chunkstore.torch_dtypes import TORCH_DTYPES
from manifest.keys import status_key
from manifest.lease import MAX_STATUS_BYTES
from subscriber.config import SubscriberConfig
from subscriber.daemon import AppliedVersion, Subscriber
from subscriber.engine import Prepared, Scattered
from subscriber.errors import EngineRestarted
from subscriber.fleet import Fleet
from subscriber.staging import StagedUpdate
from subscriber.status import SubscriberStatus
from subscriber.torch_engine import TorchEngine
from tests.support.streams import StreamBuilder, Tensor, Weights, random_weights

F = TypeVar("F", bound=Fleet)

SHAPES = {
    "embed.weight": (16, 8),
    "layers.0.norm.weight": (8,),
    "layers.0.w.weight": (8, 24),
    "layers.1.w.weight": (24, 8),
    "router.weight": (8, 4),
    "router.bias": (4,),
    "scale": (),
    "empty": (0, 8),
    "steps": (3,),
}
MIXED = {"router.weight": "F32", "router.bias": "F16", "steps": "I64"}

TIMEOUT = 20.0
"""Seconds that nothing here should ever need."""


def small_weights(seed: int = 0) -> dict[str, Tensor]:
    """bf16, fp16, fp32 and integer tensors, one without dimensions, one without elements."""
    return random_weights(SHAPES, MIXED, seed=seed)


def module_for(weights: Weights, aliases: Mapping[str, str] | None = None) -> nn.Module:
    """A module of zeros with these names, dtypes and shapes; aliases share the parameter they name."""
    root = nn.Module()
    made: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        made[name] = torch.zeros(tensor.bits.shape, dtype=TORCH_DTYPES[tensor.dtype])
        put_tensor(root, name, made[name])
    for alias, name in (aliases or {}).items():
        parent, leaf = _parent(root, alias)
        parent.register_parameter(leaf, _find(root, name))
    return root


def put_tensor(root: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Give `root` a parameter, or a buffer if integers, of that dotted name."""
    parent, leaf = _parent(root, name)
    if tensor.dtype.is_floating_point:
        parent.register_parameter(leaf, nn.Parameter(tensor))
    else:
        parent.register_buffer(leaf, tensor)


def _parent(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    return root, leaf


def _find(root: nn.Module, name: str) -> nn.Parameter:
    return root.get_parameter(name)


def live_bits(tensor: torch.Tensor) -> Bits:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    host = tensor.detach().contiguous().view(kind).cpu().numpy()
    return host.view(BITS[tensor.element_size()])


def differing(module: nn.Module, weights: Weights) -> list[str]:
    """Names whose live bits are not those of `weights`; empty means bit-identical."""
    live = module.state_dict()
    return [
        name for name, tensor in weights.items() if not np.array_equal(live_bits(live[name]), tensor.bits)
    ]


def make_config(tmp_path: Path, builder: StreamBuilder, **changes: Any) -> SubscriberConfig:
    fields: dict[str, Any] = {
        "store": StoreConfig(url=builder.store.url.removeprefix("file://")),
        "id": "worker",
        "poll_interval": 0.02,
        "state_dir": tmp_path / "state",
        "http": None,
    }
    return SubscriberConfig(**(fields | changes))


@contextmanager
def running(subscriber: F) -> Iterator[F]:
    """The subscriber on its own thread while the block runs."""
    subscriber.start()
    try:
        yield subscriber
    finally:
        subscriber.stop()


def until(condition: Callable[[], bool]) -> None:
    """Return as soon as `condition` holds; fail if that takes longer than TIMEOUT."""
    deadline = time.monotonic() + TIMEOUT
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        pause.wait(0.005)


class CountingStore(MemoryStore):
    """Counts whole reads by key; while `closed` they wait, and fail if `broken` when they may go on."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.reads: Counter[str] = Counter()
        self.open = threading.Event()
        self.open.set()
        self.broken = False
        self.held = threading.Event()
        self._only = ""

    def hold(self, key: str) -> None:
        """While closed, only reads of `key` wait, and say so by `held`."""
        self._only = key

    def get(self, key: str, *, limit: int) -> bytes:
        self.reads[key] += 1
        if self._only in ("", key):
            if not self.open.is_set():
                self.held.set()
            assert self.open.wait(TIMEOUT)
        if self.broken:
            self.broken = False
            raise StoreUnavailable(key, hint="")
        return super().get(key, limit=limit)


class RemoteEngine(TorchEngine):
    """A torch engine with the manners of a server: `gone` while set, and every life has a number.

    `written`, `busy`: raised by the next check, by the next scatter. `paused`: by whom.
    """

    def __init__(self, builder: StreamBuilder) -> None:
        self.builder = builder
        self.life = 0
        self.gone: DeltasyncError | None = None
        self.written: DeltasyncError | None = None
        self.busy: DeltasyncError | None = None
        self.paused: str | None = None
        self.held: list[str] = []
        self.restart()

    def restart(self) -> None:
        """A new life with the weights it had at first."""
        self.life += 1
        super().__init__(module_for(self.builder.weights[0], self.builder.aliases))
        self.attached = 0

    async def attach(self) -> str:
        self._reach()
        self.attached = self.life
        return f"life-{self.life}"

    async def check(self) -> str | None:
        self._reach()
        if self.attached != self.life:
            raise EngineRestarted(f"life {self.life} answers, not {self.attached}", hint="")
        if self.written is not None:
            error, self.written = self.written, None
            raise error
        return self.paused

    async def prepare(self, staged: StagedUpdate) -> Prepared:
        await self.check()
        return await super().prepare(staged)

    async def scatter(self, prepared: Prepared) -> Scattered:
        await self.check()
        if self.busy is not None:
            error, self.busy = self.busy, None
            raise error
        return await super().scatter(prepared)

    async def hold(self, reason: str) -> None:
        self.held.append(reason)
        await super().hold(reason)

    def _reach(self) -> None:
        if self.gone is not None:
            raise self.gone


class Worker:
    """A module, its engine and a subscriber that follows `builder`'s stream."""

    def __init__(self, tmp_path: Path, builder: StreamBuilder, **changes: Any) -> None:
        self.builder = builder
        self.module = module_for(builder.weights[0], builder.aliases)
        self.engine = TorchEngine(self.module, boot_id="boot")
        self.config = make_config(tmp_path, builder, **changes)
        self.applied: list[AppliedVersion] = []
        self.subscriber = Subscriber(self.config, self.engine, self.applied.append)

    def restart(self, boot_id: str = "boot") -> None:
        """A new subscriber process over the same live weights: nothing survives but them and the files."""
        self.engine = TorchEngine(self.module, boot_id=boot_id)
        self.subscriber = Subscriber(self.config, self.engine, self.applied.append)

    def holds(self, version: int) -> bool:
        """Whether the live bits are those of `version`."""
        return not differing(self.module, self.builder.weights[version])

    def check_cold_start(self, version: int) -> None:
        """It comes from nothing to `version` in one catch-up."""
        asyncio.run(asyncio.wait_for(self.subscriber.run(once=True), TIMEOUT))
        assert self.holds(version)

    def status(self) -> SubscriberStatus:
        """What the subscriber has published in the store."""
        data = self.builder.store.get(status_key(self.config.id), limit=MAX_STATUS_BYTES)
        return SubscriberStatus.model_validate_json(data)

    def refused(self) -> list[int]:
        """The versions it has published as refused."""
        if self.builder.store.head(status_key(self.config.id)) is None:
            return []
        return [refusal.version for refusal in self.status().refused]

    def reports(self, said: Callable[[str], bool]) -> bool:
        """Whether the last error's message is as `said` wants it."""
        error = self.subscriber.report.status().last_error
        return error is not None and said(error.message)
