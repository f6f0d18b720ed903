"""What one scheduler process of an SGLang server does for a subscriber: say what it holds, map, read, write, hold.

Knows the model's live memory and nothing of canonical values: the daemon does that part. Ops run on the scheduler's
thread, between batches; long reading runs on a thread of its own beside serving, and `poll` tells how it went. Nothing
here raises into SGLang: whatever goes wrong becomes an acknowledgement with `ok` false.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch

from chunkstore.errors import DeltasyncError
from manifest.catalog import Catalog
from subscriber.disk import FULL
from subscriber.errors import EngineChanged, EngineFailed, EngineMismatch, StagedLost, StagingFull
from subscriber.sglang import live
from subscriber.sglang.host import Ack, Host
from subscriber.sglang.job import Job
from subscriber.sglang.lanes import lanes, share
from subscriber.sglang.traced import Known, Traced, trace_model
from subscriber.sglang.wire import NOT_PAUSED, PROTOCOL, RankFiles, file_hash

_TASKS: Final = 2
"""Long work at hand: one runs, and one waits for it, so that `deltasync smoke` never takes the daemon's turn."""
_RESULTS: Final = 8
"""Of tasks that have ended, kept for whoever has not asked yet."""


@dataclass(frozen=True, slots=True)
class Released:
    """The version that the daemon last found whole and verified, and the count of writes at that time."""

    version: int
    writes: int


class Rank:
    """`boot`: names this life of the process. `writes`: how often anybody has written weights in it."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.boot = secrets.token_hex(8)
        self.writes = 0
        self._foreign = 0  # how often somebody else has
        self._cached = 0  # the same, at the oldest weights that anything cached may come from
        self.gate: str | None = None
        self._released: Released | None = None
        self._named = False  # the version that the server shows was told it on its own, not by who wrote it
        self._maps = Known()
        self._refusals: list[str] | None = None
        self._job: Job | None = None
        self._unfinished: str | None = None
        self._results: dict[str, Ack | None] = {}  # by task, in order of their start; None until it has ended
        self._working = threading.Lock()
        self._touching = threading.Lock()  # live memory, to read a part of it or to count a write
        self._ops: dict[str, Callable[[Ack], Ack]] = {
            "hello": self._hello,
            "map": self._make_map,
            "gather": lambda request: self._start(request, partial(self._gather, self.writes)),
            "load": lambda request: self._start(request, self._load),
            "digest": lambda request: self._start(request, partial(self._digest, self.writes)),
            "poll": self._poll,
            "hold": self._hold,
        }

    def handle(self, request: Ack) -> list[Ack]:
        """Do what `request` says, on the scheduler's thread. Returns the acknowledgements of all ranks."""
        if request["op"] == "scatter":
            return self._scatter(request)
        if request["op"] == "release":
            return self._release(request)
        if request["op"] == "ping":  # asked so often that a vote would be felt
            return [self.hello()]
        return self._host.vote(self._careful(lambda: self._ops[request["op"]](request)))

    def hello(self) -> Ack:
        """What this rank says of itself."""
        return self._careful(lambda: self._hello({}))

    def somebody_writes(self) -> None:
        """Weights are about to be written by something else than this plugin. Nobody reads them on return."""
        self._disown()
        self._count_write()
        self._foreign += 1

    def named(self) -> None:
        """The server was told which version it serves: by a subscriber, whose word ends with the next write."""
        self._named = bool(self._maps)

    def _disown(self) -> None:
        if self._named:
            self._named = False
            self._careful(self._host.disown)

    def _count_write(self) -> None:
        self.writes += 1  # first, for readers take the lock again and again
        with self._touching:
            pass  # whoever reads has ended, or will find out before it reads on

    @contextmanager
    def _undisturbed(self, writes: int) -> Iterator[None]:
        """Let nobody write while the block reads live memory. Raises EngineChanged if somebody has since `writes`."""
        with self._touching:
            if writes != self.writes:
                raise EngineChanged(
                    "weights were written while they were read", hint="it is tried again by itself"
                )
            yield

    def _careful(self, work: Callable[[], Ack]) -> Ack:
        try:
            ack = {"ok": True, **work()}
        except DeltasyncError as error:
            ack = {"ok": False, "kind": error.kind, "error": error.message, "hint": error.hint}
        except Exception as error:  # noqa: BLE001 - it would kill the server
            ack = {
                "ok": False,
                "kind": "engine_failed",
                "error": f"{type(error).__name__}: {error}",
                "hint": "",
            }
        return {"rank": self._host.rank, "boot": self.boot, "writes": self.writes, **ack}

    def _hello(self, request: Ack) -> Ack:
        released = self._released
        current = released is not None and released.writes == self.writes and self._unfinished is None
        return {
            "protocol": PROTOCOL,
            "size": self._host.size,
            "gate": self.gate,
            "version": released.version if released is not None and current else None,
            "job": self._job.name if self._job is not None and self._job.new is not None else None,
            "unfinished": self._unfinished,
            "refusals": self._refused(),
            **self._host.describe(),
        }

    def _refused(self) -> list[str]:
        if self._refusals is None:  # nothing in it changes while a server runs
            self._refusals = self._host.refusals()
        return self._refusals

    def _make_map(self, request: Ack) -> Ack:
        """Trace where every canonical element lies, into `<rank>.map`; anew only if somebody may have moved them."""
        directory, began = Path(request["directory"]), time.perf_counter()
        catalog = Catalog.from_bytes(_read(directory / "catalog", request["catalog"]))
        self._check_present()
        traced = self._maps.of(catalog, self._foreign) or self._trace(catalog)
        _write(directory / f"{self._host.rank}.map", traced.data)
        return {"map": traced.hash, "coverage": traced.covered, "seconds": time.perf_counter() - began}

    def _trace(self, catalog: Catalog) -> Traced:
        if self._refused():
            raise EngineMismatch(
                "; ".join(self._refused()), hint="docs/sglang.md says what each refusal means"
            )
        traced = trace_model(self._host.model, catalog, self._foreign)
        self._maps.add(traced)
        if self._job is not None and self._job.traced.catalog.hash == catalog.hash:
            self._job = None  # it is for places that may not be there any more
        return traced

    def _start(self, request: Ack, work: Callable[[Ack], Ack]) -> Ack:
        """Run `work` on a thread, one after the other."""
        ended = [task for task, result in self._results.items() if result is not None]
        if len(self._results) - len(ended) >= _TASKS:
            busy = ", ".join(self._results.keys() - set(ended))
            raise EngineFailed(f"{busy} are still running", hint="it is tried again by itself")
        for task in ended[:-_RESULTS]:
            del self._results[task]
        name = f"{request['op']} {request['name']}"
        self._results[name] = None

        def run() -> None:
            with self._working, torch.inference_mode():
                self._results[name] = self._careful(lambda: work(request))

        threading.Thread(target=run, name="deltasync", daemon=True).start()
        return {}

    def _poll(self, request: Ack) -> Ack:
        name = request["task"]
        if name not in self._results:
            raise StagedLost(f"{name} is not known here", hint="the subscriber starts it again by itself")
        result = self._results[name]
        return {"done": False} if result is None else {"done": True, **result}

    def _gather(self, writes: int, request: Ack) -> Ack:
        """Read what is live where an order says, into `<rank>.old`.

        `writes`: counted when it was asked for. A thread that counts for itself may begin in the middle of a write.
        """
        began = time.perf_counter()
        job = self._open(request)
        vectors = job.traced.live.vectors()
        with _writing(job.files.path("old")), job.files.writer("old") as writer:
            for piece, targets in zip(job.files.order.pieces, job.targets, strict=True):
                with self._undisturbed(writes):
                    old = live.gather(vectors[piece.memory], piece, targets)
                writer.add(old)
        job.token, job.old = writes, job.files.open_values("old")
        self._job = job
        return {"token": writes, "seconds": time.perf_counter() - began}

    def _load(self, request: Ack) -> Ack:
        """Take the new bits of an order, and hold all it needs ready to be written."""
        began = time.perf_counter()
        job = self._job
        if job is None or job.name != request["name"] or not request["gathered"]:
            if request["gathered"]:
                raise StagedLost(
                    f"order {request['name']} is not at hand", hint="it is staged again by itself"
                )
            job = self._open(request)
        job.version, job.new = int(request["version"]), job.files.open_values("new")
        job.keep("new", *(["old"] if job.old is not None else []))
        self._job = job
        return {"seconds": time.perf_counter() - began, "bytes": job.files.nbytes}

    def _digest(self, writes: int, request: Ack) -> Ack:
        """Digest every box of the map into `<rank>.digests`, uint64 in the order of boxes. `writes`: as `_gather`."""
        traced = self._mapped(request)
        began, vectors, tensors = time.perf_counter(), traced.live.vectors(), traced.catalog.tensors
        sums = []
        for box in traced.map.boxes:
            with self._undisturbed(writes):
                sums.append(live.digest(tensors[box.tensor].name, vectors[box.memory], box))
        data = np.array(sums, "<u8").tobytes()
        _write(Path(request["directory"]) / f"{self._host.rank}.digests", data)
        return {"hash": file_hash(data), "token": writes, "seconds": time.perf_counter() - began}

    def _hold(self, request: Ack) -> Ack:
        self.gate = request["reason"]
        self._host.stop_batches()
        self._released = None
        return {}

    def _release(self, request: Ack) -> list[Ack]:
        """The daemon has found what is live to be a whole version: from now on generation may be continued, on all
        ranks or none.
        """
        acks = self._host.vote(self._careful(lambda: self._check_release(request)))
        if all(ack["ok"] for ack in acks) and any(ack["stale"] for ack in acks):
            acks = self._host.vote(self._careful(self._forget))
        if all(ack["ok"] for ack in acks):
            self._released = Released(request["version"], self.writes)
            self.gate, self._job, self._named = None, None, True
        elif any(ack["writes"] != request["tokens"][ack["rank"]] for ack in acks):
            self._disown()  # the version that the server was told for this is not there
        return acks

    def _check_release(self, request: Ack) -> Ack:
        if self._unfinished is not None:
            raise EngineChanged(f"order {self._unfinished} was written in part", hint="it is repeated first")
        if request["tokens"][self._host.rank] != self.writes:
            raise EngineChanged(
                "weights were written since they were verified", hint="they are checked again"
            )
        self._check_present()
        return {"stale": self._cached != self._foreign, "version": int(request["version"])}

    def _forget(self) -> Ack:
        """Somebody may have put these very weights back after others had been served: drop all that is cached."""
        self._host.stop_batches()
        self._drop_cache()
        return {}

    def _scatter(self, request: Ack) -> list[Ack]:
        """Write an order, all ranks or none; once begun, nothing runs until `release`, whoever asks for it."""
        job = self._job  # which a thread may replace at any time
        acks = self._host.vote(self._careful(lambda: self._check_scatter(request, job)))
        if not all(ack["ok"] for ack in acks):
            return acks
        assert job is not None, "checked"
        self.gate = f"version {job.version} is being written"
        self._host.stop_batches()
        self._count_write()
        self._released, self._unfinished = None, request["name"]
        return [{"began": True, **ack} for ack in self._host.vote(self._careful(lambda: self._write(job)))]

    def _check_scatter(self, request: Ack, job: Job | None) -> Ack:
        """Everything that can be refused before the first write."""
        self._check_present()
        if job is None or job.name != request["name"] or job.new is None:
            raise StagedLost(f"order {request['name']} is not at hand", hint="it is staged again by itself")
        vectors = job.traced.live.vectors()
        if not self._host.idle():
            return {"ok": False, "kind": NOT_PAUSED, "error": "requests are running", "hint": ""}
        if request["repair"]:
            return {}
        if job.token != self.writes or job.old is None:
            raise EngineChanged("weights were written since they were read", hint="they are checked again")

        def compare(number: int) -> None:
            piece = job.files.order.pieces[number]
            if not live.holds(vectors[piece.memory], piece, job.blocks(number, "old")):
                name = job.traced.map.memories[piece.memory].name
                raise EngineChanged(
                    f"{name} is not what it was when it was read", hint="all is checked again"
                )

        _share(job, compare)
        return {}

    def _write(self, job: Job) -> Ack:
        memories, vectors = job.traced.map.memories, job.traced.live.vectors()
        live.synchronize(vectors)

        def write(number: int) -> None:
            piece = job.files.order.pieces[number]
            if not live.write(vectors[piece.memory], piece, job.blocks(number, "new")):
                raise EngineMismatch(
                    f"{memories[piece.memory].name} does not hold what was just written",
                    hint="the memory is damaged, or another thread writes it; replace the server",
                )

        began = time.perf_counter()
        cpu_seconds = _share(job, write)
        seconds = time.perf_counter() - began
        self._host.wrote(str(job.version))
        self._drop_cache()
        self._unfinished = None
        return {"token": self.writes, "seconds": seconds, "cpu_seconds": cpu_seconds}

    def _drop_cache(self) -> None:
        self._host.drop_cache()
        self._cached = self._foreign

    def _open(self, request: Ack) -> Job:
        directory, orders, traced = Path(request["directory"]), request["orders"], self._mapped(request)
        files = RankFiles.load(directory, self._host.rank, orders[self._host.rank], traced.map.memories)
        if files.order.map != traced.hash:
            raise StagedLost(
                "the order is for another map of this model", hint="it is mapped again by itself"
            )
        return Job(request["name"], traced, files, files.open_targets())

    def _mapped(self, request: Ack) -> Traced:
        self._check_present()
        return self._maps.named(request["maps"][self._host.rank])

    def _check_present(self) -> None:
        released = self._host.released()
        if released:
            raise EngineFailed(
                f"memory has been released: {', '.join(released)}",
                hint="POST /resume_memory_occupation for all of it; the subscriber goes on by itself",
            )


def _share(job: Job, work: Callable[[int], None]) -> float:
    """As `share`, the pieces of `job`; on one thread if they lie on a device."""
    return share(work, len(job.files.order.pieces), lanes() if job.traced.live.on_host else 1)


def _read(path: Path, wanted: str) -> bytes:
    """A file of the daemon's, which is checked to be the one it means. Raises StagedLost."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StagedLost(
            f"{path} cannot be read inside the server: {error}",
            hint="let the server see the subscriber's staging_dir under the same path",
        ) from error
    if file_hash(data) != wanted:
        raise StagedLost(
            f"{path} is not what the subscriber wrote", hint="give each subscriber its own staging_dir"
        )
    return data


def _write(path: Path, data: bytes) -> None:
    with _writing(path):
        path.write_bytes(data)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """The block writes a file for the daemon. Raises StagedLost, StagingFull."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise StagingFull(
                f"{path} cannot be written inside the server: {error}",
                hint="free space there, or set staging_dir to a larger file system that the server sees",
            ) from error
        raise StagedLost(
            f"{path} cannot be written inside the server: {error}",
            hint="let the server's user write in the subscriber's staging_dir, under the same path",
        ) from error
