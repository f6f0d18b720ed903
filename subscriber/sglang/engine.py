"""The SGLang engine: one server, all its ranks, brought from version to version in place."""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import uuid4

import numpy as np

from chunkstore.crashpoints import crash_point
from chunkstore.digest import U64
from chunkstore.dtypes import Bits
from manifest.catalog import Catalog
from manifest.merge import Update
from subscriber.config import ServerConfig, SGLangEngineConfig
from subscriber.disk import disk_errors
from subscriber.engine import EngineState, Prepared, Scattered
from subscriber.errors import (
    EngineBusy,
    EngineChanged,
    EngineFailed,
    StagedLost,
    SubscriberError,
    VerificationFailed,
    name_offenders,
)
from subscriber.report import event
from subscriber.sglang.boxes import MAX_MAP_BYTES, BoxMap, Layout
from subscriber.sglang.client import Ack, Client, check_ranks, is_gone, raise_failures
from subscriber.sglang.exchange import Exchange
from subscriber.sglang.wire import NOT_PAUSED, file_hash
from subscriber.staging import StagedUpdate
from subscriber.threads import Check, in_thread
from subscriber.verify import verify

_MASK: Final = (1 << 64) - 1
_TRIES: Final = 3  # of pausing until nothing runs, and of writing until all ranks have written
_SETTLE: Final = 0.05  # seconds between pauses, for a last batch to end or a grammar to be compiled
_AGAIN: Final = 0.5  # seconds between looks at a server that does not answer while it is being written


@dataclass(frozen=True)
class _Mapped:
    """The maps of all ranks for one catalog, their hashes, who owns what, and how many live elements they cover."""

    catalog: bytes
    maps: tuple[BoxMap, ...]
    hashes: tuple[str, ...]
    layout: Layout
    coverage: Mapping[str, int]


class SGLangEngine:
    """Drives one server through the plugin in its schedulers (docs/sglang.md).

    `directory`: this engine's own, in shared memory or on a disk that the server sees under the same path.
    """

    def __init__(self, config: SGLangEngineConfig, server: ServerConfig, directory: Path) -> None:
        self._config, self._server = config, server
        self._directory = directory
        self._client = Client(config, server)
        self._version: int | None = None
        self._tokens: list[int] = []  # writes that each rank had counted when we last looked
        self._mapped: _Mapped | None = None
        self._loaded: tuple[bytes, str] | None = (
            None  # hash of the staged update that the ranks hold ready, its job
        )

    async def close(self) -> None:
        """Let go of the server; it stays as it is."""
        await self._client.close()

    async def attach(self) -> str:
        await self._client.close()
        self._client = Client(self._config, self._server)
        self._mapped, self._loaded, self._version = None, None, None
        acks = await self._client.hello()
        check_ranks(self._server.name, acks)
        self._tokens = _writes(acks)
        if any(ack["unfinished"] for ack in acks):
            await self._heal(acks)
        elif acks[0]["version"] is not None and len({ack["version"] for ack in acks}) == 1:
            self._version = int(acks[0]["version"])
            await self._client.resume()  # a subscriber may have died between its pause and its first write
        return self._client.boot_id

    async def _heal(self, acks: list[Ack]) -> None:
        """Repeat an order that was written in part, if all ranks still have it: its subscriber died meanwhile."""
        names = {str(ack["unfinished"]) for ack in acks if ack["unfinished"]}
        if len(names) == 1 and {ack["job"] for ack in acks} == names:
            done, _ = await self._write(names.pop(), repair=True)
            self._tokens = _writes(done)
            event("apply_was_healed", server=self._server.name)

    async def check(self) -> str | None:
        acks = await self._client.ping()
        if any(ack["writes"] != self._tokens[ack["rank"]] for ack in acks):
            self._same(_writes(await self._client.hello()))
        if self._version is not None and any(ack["version"] != self._version for ack in acks):
            raise EngineChanged(
                f"{self._server.name}: somebody else holds the server: {acks[0]['gate']}",
                hint="let one subscriber drive it; all its weights are checked now",
            )
        if self._version is not None and any(ack["paused"] for ack in acks):
            return f"{self._server.name}: somebody else has paused the server; POST /continue_generation"
        return None

    def _same(self, tokens: list[int]) -> None:
        if tokens != self._tokens:
            self._tokens = tokens
            raise EngineChanged(
                f"{self._server.name}: somebody else has written weights into the server",
                hint="update a server only through the subscriber; all its weights are checked now",
            )

    async def coverage(self, catalog: Catalog) -> Mapping[str, int]:
        """Live `elements` of all ranks, how many of them are `loaded` from a checkpoint, and how many always `zeros`.

        Raises EngineMismatch if that leaves any; StagedLost if the server does not share `directory`.
        """
        return (await self._map(catalog)).coverage

    async def state(self, catalog: Catalog) -> EngineState:
        return EngineState(self._version, await self._digests(catalog))

    async def prepare(self, staged: StagedUpdate) -> Prepared:
        name = uuid4().hex
        resolved, changed = await self._load(staged, name, proved=False)
        return Prepared(resolved, None if staged.base is None else name.encode(), changed)

    async def scatter(self, prepared: Prepared) -> Scattered:
        staged = prepared.staged
        if self._loaded is None or self._loaded[0] != staged.hash:
            await self._load(staged, uuid4().hex, proved=True)
        assert self._loaded is not None, "just now"
        name, self._loaded = self._loaded[1], None
        began = time.perf_counter()
        try:
            acks, clean = await self._write(name, repair=prepared.token is None)
            self._tokens = _writes(acks)
            crash_point("subscriber.mid_scatter")
            if not clean:
                await self._verify_live(staged)
            await self.release(staged.target.version)
        except SubscriberError as error:
            if not isinstance(error, EngineChanged) and await self._serves_on():
                raise EngineBusy(
                    f"version {staged.target.version} was not written, {self._version} is served on: {error.message}",
                    hint=error.hint,
                ) from error
            self._version = None
            with suppress(
                EngineFailed
            ):  # it cannot be reached, and the plugin's gate is closed if it wrote anything
                await self.hold(error.message)
            raise
        pause = time.perf_counter() - began
        return Scattered(staged.target.version, pause, max(float(ack["seconds"]) for ack in acks))

    async def _serves_on(self) -> bool:
        """Let generation go on if no rank has begun to write, and the version from before was served."""
        try:
            acks = await self._client.hello()
            if self._version is None or any(ack["version"] != self._version or ack["gate"] for ack in acks):
                return False
            await self._client.resume()
        except SubscriberError:
            return False
        return True

    async def hold(self, reason: str) -> None:
        self._version = None
        # In this order: even if the pause fails, nothing is served; and what waits is aborted without another step.
        await self._client.ask("hold", reason=reason)
        crash_point("subscriber.after_hold")
        await self._client.pause()

    async def release(self, version: int) -> None:
        await self._client.show_version(version)
        crash_point("subscriber.before_release")
        await self._client.ask("release", tokens=self._tokens, version=version)
        crash_point("subscriber.before_resume")
        await self._client.resume()
        self._version = version

    async def _load(self, staged: StagedUpdate, name: str, proved: bool) -> tuple[StagedUpdate, int | None]:
        """Hand every rank what it is to write, resolved and verified; it goes on serving.

        `proved`: that was done before, and all that is left of it are the values.
        """
        mapped, gathered = await self._map(staged.catalog), staged.base is not None
        directory = staged.path / f"ranks-{name}"

        def list_targets(check: Check) -> Exchange:
            with disk_errors(directory):
                return Exchange(directory, staged, mapped.maps, mapped.hashes, mapped.layout, check)

        def resolve(check: Check) -> tuple[StagedUpdate, int | None]:
            with disk_errors(directory):
                gather = exchange.gather() if gathered else _nothing
                resolved, changed = (staged, None) if proved else verify(staged, gather, check)
                exchange.write(resolved)
            return resolved, changed

        try:
            exchange = await in_thread(list_targets)
            request = {"directory": str(directory), "orders": exchange.orders, "maps": mapped.hashes}
            if gathered:
                self._same([int(ack["token"]) for ack in await self._client.run("gather", name, **request)])
                crash_point("subscriber.after_gather")
            resolved, changed = await in_thread(resolve)
            version = staged.target.version
            await self._client.run("load", name, gathered=gathered, version=version, **request)
        except (StagedLost, EngineChanged):
            self._mapped = None  # it may be the map that does not hold any more
            raise
        crash_point("subscriber.after_load")
        self._loaded = resolved.hash, name
        return resolved, changed

    async def _write(self, name: str, repair: bool) -> tuple[list[Ack], bool]:
        """Pause and write, again until every rank has.

        Returns the acknowledgements, and whether it went well at once.
        """
        await self._client.pause()
        crash_point("subscriber.after_pause")
        clean = not repair
        for left in reversed(range(_TRIES)):
            try:
                acks = await self._client.try_ask(
                    "scatter", self._config.write_timeout, name=name, repair=repair
                )
            except EngineFailed as error:  # unless the server has gone altogether, the writing may have begun
                event("answer_lost", logging.WARNING, server=self._server.name, error=error)
                if not left or is_gone(error):
                    raise
                await self._wait_for_answer()
                repair, clean = True, False
                continue
            if all(ack["ok"] for ack in acks):
                return acks, clean
            if any("began" in ack for ack in acks):
                errors = [f"rank {ack['rank']}: {ack['error']}" for ack in acks if not ack["ok"]]
                event("write_failed", logging.WARNING, server=self._server.name, errors=errors)
                repair, clean = True, False
            elif {ack["kind"] for ack in acks if not ack["ok"]} == {NOT_PAUSED}:
                await asyncio.sleep(_SETTLE)
                await self._client.pause()
            else:
                break
        raise_failures(self._server.name, "writing", acks)
        raise AssertionError("some rank has failed")

    async def _wait_for_answer(self) -> None:
        deadline = time.monotonic() + self._config.write_timeout
        while True:
            try:
                await self._client.hello()
                return
            except EngineFailed as error:
                if time.monotonic() > deadline or is_gone(error):
                    raise
            await asyncio.sleep(_AGAIN)

    async def _verify_live(self, staged: StagedUpdate) -> None:
        digests = await self._digests(staged.catalog)
        wrong = np.flatnonzero(digests != staged.target.digest_array)
        if len(wrong):
            names = [repr(staged.catalog.tensors[number].name) for number in wrong]
            raise VerificationFailed(
                f"{self._server.name}: after writing version {staged.target.version} the live digests of "
                f"{name_offenders(names)} differ",
                hint="something else writes the server; it stays paused until an anchor has been applied",
            )

    async def _map(self, catalog: Catalog) -> _Mapped:
        """The maps of all ranks, traced anew unless they are known."""
        if self._mapped is not None and self._mapped.catalog == catalog.hash:
            return self._mapped
        directory = self._directory / "map"
        with disk_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "catalog").write_bytes(catalog.data)
        acks = await self._client.ask(
            "map", self._config.prepare_timeout, directory=str(directory), catalog=file_hash(catalog.data)
        )
        hashes = tuple(str(ack["map"]) for ack in acks)
        coverage = {key: sum(int(ack["coverage"][key]) for ack in acks) for key in acks[0]["coverage"]}
        event("mapped", server=self._server.name, **coverage, seconds=acks[0]["seconds"])

        def read(check: Check) -> _Mapped:
            paths = [directory / f"{rank}.map" for rank in range(len(hashes))]
            maps = tuple(
                BoxMap.from_bytes(_read(path, wanted, MAX_MAP_BYTES), catalog)
                for path, wanted in zip(paths, hashes, strict=True)
            )
            return _Mapped(catalog.hash, maps, hashes, Layout(catalog, maps), coverage)

        self._mapped = await in_thread(read)
        return self._mapped

    async def _digests(self, catalog: Catalog) -> U64:
        """Of the live bits, in catalog order; what no version has where copies of a tensor differ."""
        mapped = await self._map(catalog)
        directory = self._directory / "map"
        try:
            acks = await self._client.run("digest", uuid4().hex, directory=str(directory), maps=mapped.hashes)
        except (StagedLost, EngineChanged):
            self._mapped = None
            raise
        self._tokens = [int(ack["token"]) for ack in acks]
        boxes = [
            np.frombuffer(
                _read(directory / f"{rank}.digests", str(ack["hash"]), 8 * len(mapped.maps[rank].boxes)),
                "<u8",
            )
            for rank, ack in enumerate(acks)
        ]
        out: list[int] = []
        for places in mapped.layout.places:
            owned = sum(int(boxes[place.rank][place.box]) for place in places if place.owner) & _MASK
            copies = [(place, place.replica_of) for place in places if place.replica_of is not None]
            same = all(boxes[place.rank][place.box] == boxes[owner[0]][owner[1]] for place, owner in copies)
            out.append(owned if same else ~owned & _MASK)
        return np.array(out, np.uint64)


def _nothing(update: Update) -> list[Bits]:
    raise AssertionError("what replaces everything needs no old bits")


def _writes(acks: list[Ack]) -> list[int]:
    return [int(ack["writes"]) for ack in acks]


def _read(path: Path, wanted: str, limit: int) -> bytes:
    """A file that a rank has just written. Raises StagedLost."""
    try:
        data = path.read_bytes() if path.stat().st_size <= limit else b""
    except OSError as error:
        raise StagedLost(
            f"{path} cannot be read: {error}",
            hint="let the server see the subscriber's staging_dir under the same path",
        ) from error
    if file_hash(data) != wanted:
        raise StagedLost(f"{path} is not what the server wrote", hint="it is written again by itself")
    return data
