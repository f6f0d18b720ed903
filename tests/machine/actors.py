"""The processes of the machine: the real publishers, subscribers, garbage collections and compactions."""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import nn
from torch.optim import SGD

from chunkstore.dtypes import Bits
from chunkstore.errors import DeltasyncError
from chunkstore.memory import MemoryStore
from chunkstore.open import StoreConfig
from chunkstore.store import Store
from manifest.catalog import Catalog, TensorSpec
from manifest.collect import delete_garbage, read_holdings
from manifest.gc import Policy, collectable
from manifest.log import VersionLog, open_stream
from publisher.compact import compact
from publisher.group import Owned, Writer
from publisher.publisher import Publisher
from subscriber.config import SubscriberConfig
from subscriber.daemon import Subscriber
from subscriber.engine import Prepared, Scattered
from subscriber.torch_engine import TorchEngine
from tests.machine.hostile import Disk, HostileStore
from tests.machine.ledger import Collection, Ledger, Weights, differing
from tests.machine.sim import Process, Sim, Task
from tests.machine.virtual import Loop

SIZES: Final = {"a": 40, "b": 24}
"""bf16 tensors that are trained, and how many elements they have."""

CATALOG: Final = Catalog.of(
    [*(TensorSpec(n, "BF16", (s,)) for n, s in SIZES.items()), TensorSpec("c", "I64", (3,))]
)
GRACE: Final = 40.0
"""Seconds; shorter than the 90 for which a silent subscriber keeps its lease."""

AUDIT_EVERY: Final = 3
"""Versions after which a subscriber reads all that is live."""


class World:
    """Everything there is. `active`: the one of the run that is on."""

    active: ClassVar["World"]

    def __init__(self, directory: Path, counts: Counter[str]) -> None:
        self.sim = Sim()
        self.counts = counts
        store = MemoryStore("machine", clock=lambda: self.sim.now)
        self.ledger = Ledger(self.sim, store, counts, CATALOG)
        self.disk = Disk(self.sim, self.ledger, store, counts)
        self.directory = directory
        self.steps = count(1)
        self.opening: Store | None = None  # what `open_store` returns
        World.active, Sim.active = self, self.sim

    @classmethod
    def open_store(cls, config: StoreConfig, metrics: object = None, *, make: bool = True) -> Store:
        """Stands in for that of chunkstore.open, where subscribers open their store."""
        assert cls.active.opening is not None
        return cls.active.opening

    def store_of(self, process: Process, damaged: set[str] | None = None) -> HostileStore:
        return HostileStore(self.disk, process, damaged)


class Model(nn.Module):
    """Two bf16 parameters and a buffer, which hold `weights`."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        for name in SIZES:
            bits = torch.from_numpy(weights[name].view(np.int16).copy())
            self.register_parameter(name, nn.Parameter(bits.view(torch.bfloat16)))
        self.register_buffer("c", torch.from_numpy(weights["c"].view(np.int64).copy()))

    def bits(self) -> dict[str, Bits]:
        """A copy of what it holds."""
        out: dict[str, Bits] = {n: _bits(self.get_parameter(n)).copy() for n in SIZES}
        return out | {"c": self.get_buffer("c").numpy().view(np.uint64).copy()}

    def load(self, weights: Weights) -> None:
        for name in SIZES:
            _bits(self.get_parameter(name))[:] = weights[name]
        self.get_buffer("c").numpy().view(np.uint64)[:] = weights["c"]

    def nudge(self, number: int) -> None:
        """Change some elements, by one bit as a rule: what one optimizer step does."""
        name = ("a", "b")[number % 2]
        bits = _bits(self.get_parameter(name))
        bits[number % len(bits)] ^= np.uint16(1)
        if number % 5 == 0:
            bits[:: 1 + number % 3] += np.uint16(number)
        if number % 7 == 0:
            self.get_buffer("c")[number % 3] += 1


def _bits(tensor: torch.Tensor) -> Bits:
    return tensor.detach().view(torch.int16).numpy().view(np.uint16)


def first_weights() -> dict[str, Bits]:
    rng = np.random.default_rng(0)
    out: dict[str, Bits] = {n: rng.integers(0, 1 << 16, s, np.uint16) for n, s in SIZES.items()}
    return out | {"c": np.arange(3, dtype=np.uint64)}


class Rank:
    """One process of a trainer. `call`: what its foreground thread does at the moment."""

    def __init__(self, world: World, process: Process, model: Model, writer: Writer | None) -> None:
        self.world, self.process, self.model, self.writer = world, process, model, writer
        self.publisher: Publisher | None = None
        self.call: Task | None = None
        self.stopped = False

    @property
    def idle(self) -> bool:
        return self.process.alive and (self.call is None or self.call.done)

    @property
    def ready(self) -> bool:
        """Whether it can publish."""
        return self.idle and self.publisher is not None and not self.stopped

    def attach(self, *, takeover: bool) -> None:
        config = {
            "store": {"url": "memory://machine"},
            "inference_dtype": "bfloat16",
            "detect": "snapshot",
            "takeover": takeover,
            "upload_threads": 1,
            "commit_deadline": 10.0,
            "writers_timeout": 30.0,
        }
        stepped: list[torch.Tensor] = [self.model.get_parameter(name) for name in SIZES]
        if self.writer is not None:
            stepped = [one.tensor for one in self.writer.owned or () if one.name in SIZES]
        optimizer = SGD(stepped, lr=0.0)

        def attach() -> None:
            store = self.world.store_of(self.process)
            try:
                self.publisher = Publisher.attach(
                    optimizer, self.model, config, store=store, writer=self.writer
                )
            except DeltasyncError as error:
                self.world.counts[f"attach {error.kind}"] += 1
                self.process.alive = False

        self._begin("attach", attach)

    def publish(self, step: int, *, anchor: bool) -> None:
        publisher, ledger = self.publisher, self.world.ledger
        assert publisher is not None

        def publish() -> None:
            base = publisher.version
            try:
                handle = publisher.publish(step, anchor=anchor)
            except DeltasyncError as error:
                self.stopped = error.kind in ("fenced", "publisher_stopped", "writer_replaced", "chain")
                ledger.told(self.process, step, base, None, error)
                return
            base = publisher.version
            handle.when_done(lambda future: self._tell(step, base, future))

        self._begin("publish", publish)

    def _tell(self, step: int, base: int, future: Any) -> None:
        if not self.process.alive:
            return
        error = None if future.cancelled() else future.exception()
        try:
            result = None if error else future.result()
            self.world.ledger.told(self.process, step, base, result, error)
        except AssertionError as failure:
            self.world.sim.fail(failure)

    def _begin(self, name: str, work: Callable[[], None]) -> None:
        assert self.idle
        self.call = self.world.sim.spawn(self.process, f"{self.process.name} {name}", work)


class Trainer:
    """Some ranks that train one model: each in a process, which may die alone. `weights`: what it starts from."""

    def __init__(self, world: World, name: str, weights: Weights, size: int, *, takeover: bool) -> None:
        self.world, self.name, self.size = world, name, size
        self.run = f"run-{next(world.steps)}"
        self.takeover = takeover
        self.model = Model(weights)
        self.ranks: list[Rank] = []
        for number in range(size):
            self.ranks.append(self._start(number))

    @property
    def alive(self) -> bool:
        return any(rank.process.alive for rank in self.ranks)

    def restart(self) -> None:
        """The first rank that died comes back, with the weights that all ranks have."""
        number = [rank.process.alive for rank in self.ranks].index(False)
        self.ranks[number] = self._start(number)

    def train(self, number: int) -> bool:
        """One step, unless a rank is busy, and so has not left `publish` or `attach`."""
        if not self.quiet():
            return False
        self.model.nudge(number)
        return True

    def publish(self, *, anchor: bool) -> bool:
        """All ranks that can publish what they hold, as one train step. False if none can."""
        if not any(rank.ready for rank in self.ranks) or not self.quiet():
            return False
        step = next(self.world.steps)
        self.world.ledger.published[step] = self.model.bits()
        for rank in self.ranks:
            if rank.ready:
                rank.publish(step, anchor=anchor and self.size == 1)
        return True

    def quiet(self) -> bool:
        """Whether no rank is inside `attach` or `publish`, where the weights must keep still."""
        return all(rank.idle or not rank.process.alive for rank in self.ranks)

    def _start(self, number: int) -> Rank:
        process = self.world.sim.process(f"{self.name}.{number}")
        self.world.ledger.first[process] = self.model.bits()
        writer = None
        if self.size > 1:
            writer = Writer(number, self.size, self.run, list(self._owned(number)))
        rank = Rank(self.world, process, self.model, writer)
        rank.attach(takeover=self.takeover)
        return rank

    def _owned(self, number: int) -> Iterable[Owned]:
        for name, size in SIZES.items():
            low, high = size * number // self.size, size * (number + 1) // self.size
            yield Owned(name, self.model.get_parameter(name).detach()[low:high], low)
        if number == 0:
            yield Owned("c", self.model.get_buffer("c"))


class RecordingEngine(TorchEngine):
    """Keeps a list of the versions that it has served. `whole`: called when it serves what a repair has written."""

    def __init__(self, module: nn.Module, boot_id: str, whole: Callable[[], None]) -> None:
        super().__init__(module, boot_id=boot_id)
        self.served: list[int] = []
        self._whole = whole

    async def scatter(self, prepared: Prepared) -> Scattered:
        scattered = await super().scatter(prepared)
        self.served.append(scattered.version)
        if prepared.token is None:
            self._whole()
        return scattered

    async def release(self, version: int) -> None:
        await super().release(version)
        self.served.append(version)


class Watcher:
    """One subscriber: its module, whose weights outlive the process if asked to, and its files."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.damaged: set[str] = set()
        self.disturbed: dict[int, int] = {}  # elements of "a", and how many versions had been served by then
        self.lives = 0
        self.process: Process | None = None
        self.start(keep=False)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.alive

    @property
    def version(self) -> int | None:
        return self.engine.version

    def start(self, *, keep: bool) -> None:
        """A new process; `keep`: over the weights that the last one left behind."""
        if not keep:
            self.lives += 1
            self.disturbed.clear()
            self.module = Model(first_weights())
            self.module.nudge(35 + self.lives)
            self.highest = -1
        self.engine = RecordingEngine(self.module, f"life-{self.lives}", self.disturbed.clear)
        self.disturbed.update(dict.fromkeys(self.disturbed, 0))  # it has served nothing yet
        self.said = 0
        self.process = process = self.world.sim.process(f"subscriber.{self.number}")
        name = f"s{self.number}"
        config = SubscriberConfig(
            store=StoreConfig(url="memory://machine"),
            id=name,
            poll_interval=10.0,
            relist_interval=60.0,
            status_interval=30.0,
            audit_every=AUDIT_EVERY,
            state_dir=self.world.directory,
            fetch_concurrency=2,
            http=None,
        )
        self.world.ledger.serving[f"subscribers/{name}.json"] = self.sayable

        def run() -> None:
            self.world.opening = self.world.store_of(process, self.damaged)
            subscriber = Subscriber(config, self.engine, lambda _: self.world.counts.update(["applies"]))
            self.world.opening = None
            Loop().run(subscriber.run())

        self.world.sim.spawn(process, process.name, run)

    def sayable(self) -> list[int]:
        """What it has served since this was last asked: a status object may be overtaken while it is written."""
        served = self.engine.served[self.said :]
        self.said = max(0, len(self.engine.served) - 1)
        return served

    def disturb(self, number: int) -> None:
        """Write one live element, as nobody may."""
        with torch.no_grad():
            self.module.get_parameter("a").detach().view(torch.int16)[number] ^= 64
        self.disturbed[number] = len(self.engine.served)

    def check(self) -> None:
        """Invariants 4 and 5. What was disturbed may stay wrong until an audit is due, or a repair has been served."""
        version = self.engine.version if self.alive else None
        if version is None:
            return
        wanted, live = dict(self.world.ledger.versions[version].weights), self.module.bits()
        for number in [n for n in self.disturbed if live["a"][n] == wanted["a"][n]]:
            del self.disturbed[number]
        wanted["a"] = wanted["a"].copy()
        for number, before in self.disturbed.items():
            if len(self.engine.served) - before <= AUDIT_EVERY:
                wanted["a"][number] = live["a"][number]
        wrong = differing(live, wanted)
        assert not wrong, f"4: subscriber {self.number} serves version {version}, and it is not: {wrong}"
        assert version >= self.highest, (
            f"4: subscriber {self.number} goes from {self.highest} down to {version}"
        )
        self.highest = version


def collect(world: World, keep: int) -> Process:
    """Start `deltasync store gc`."""
    process = world.sim.process("gc")
    policy = Policy(GRACE, keep)

    def run() -> None:
        store = world.store_of(process)
        try:
            log = VersionLog(store, open_stream(store))
            world.ledger.collections[process] = Collection(policy)
            delete_garbage(store, collectable(read_holdings(log, policy), policy).objects)
        except DeltasyncError as error:
            world.counts[f"gc {error.kind}"] += 1
        process.alive = False

    world.sim.spawn(process, "gc", run)
    return process


def store_whole(world: World, version: int) -> Process:
    """Start `deltasync store compact`."""
    process = world.sim.process("compact")

    def run() -> None:
        store = world.store_of(process)
        try:
            compact(VersionLog(store, open_stream(store)), version, GRACE, scratch=world.directory)
        except DeltasyncError as error:
            world.counts[f"compact {error.kind}"] += 1
        process.alive = False

    world.sim.spawn(process, "compact", run)
    return process
