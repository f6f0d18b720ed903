"""The torch engine: a live nn.Module in this process."""

import secrets
import struct
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Final

import numpy as np
import torch
from torch import nn

from chunkstore.crashpoints import crash_point
from chunkstore.digest import U64
from chunkstore.dtypes import Bits
from manifest.catalog import Catalog
from manifest.merge import Update
from subscriber import torch_bits
from subscriber.engine import EngineState, Prepared, Scattered
from subscriber.errors import EngineChanged, EngineFailed, VerificationFailed, name_offenders
from subscriber.gate import Gate
from subscriber.staging import StagedUpdate
from subscriber.threads import Check, in_thread
from subscriber.torch_names import LiveTensor, live_tensors, reader
from subscriber.verify import verify

_MASK: Final = (1 << 64) - 1


class TorchEngine:
    """Keeps the parameters and persistent buffers of `module` at a stream's versions, in place.

    Of a PEFT model those of the adapter that is active now, and nothing of the base.
    Generate inside `with engine.serving():`; the daemon writes only between such blocks.

    `boot_id`: names this life of the weights. Leave it out unless they outlive the process (shared memory).
    `lock`: a lock the rollout code already holds while it generates; held while weights are written.
    """

    def __init__(
        self,
        module: nn.Module,
        boot_id: str | None = None,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self.module = module
        self._read = reader(module)
        self._boot_id = boot_id or secrets.token_hex(8)
        self._lock: AbstractContextManager[object] = lock or nullcontext()
        self._gate = Gate("no verified version has been loaded yet")
        self._version: int | None = None

    async def attach(self) -> str:
        return self._boot_id

    async def check(self) -> str | None:
        """Lives and dies with this process; what somebody else writes is seen by `scatter` and by the audit."""
        return None

    @property
    def version(self) -> int | None:
        """The version that is served; None while the engine is held."""
        return self._version if self._gate.reason is None else None

    @contextmanager
    def serving(self, timeout: float | None = None) -> Iterator[int]:
        """Keep the weights as they are inside the block; yields their version. May be nested in one thread.

        Waits while weights are written or not verified; raises EngineNotReady after `timeout` seconds of that.
        """
        with self._gate.serving(timeout):
            assert self._version is not None, "the gate is open"
            yield self._version

    async def state(self, catalog: Catalog) -> EngineState:
        with _torch_errors("reading"):
            digests = await in_thread(lambda check: self._digests(catalog, check))
        return EngineState(self._version, digests)

    async def prepare(self, staged: StagedUpdate) -> Prepared:
        with _torch_errors("reading"):
            return await in_thread(lambda check: self._prepare(staged, check))

    async def scatter(self, prepared: Prepared) -> Scattered:
        with _torch_errors("writing"):
            return await in_thread(lambda _: self._scatter(prepared))

    async def hold(self, reason: str) -> None:
        await in_thread(lambda _: self._gate.close(reason))

    async def release(self, version: int) -> None:
        self._version = version
        self._gate.open()

    def _digests(self, catalog: Catalog, check: Check) -> U64:
        out: list[int] = []
        for live in live_tensors(self._read(), catalog):
            check()
            first, *others = [torch_bits.digest(live.name, copy) for copy in live.copies]
            # Copies of one tensor that differ are no version at all: report what no manifest says.
            out.append(first if all(other == first for other in others) else ~first & _MASK)
        return np.array(out, np.uint64)

    def _prepare(self, staged: StagedUpdate, check: Check) -> Prepared:
        live = live_tensors(self._read(), staged.catalog)
        token = None if staged.base is None else _token(live)

        def gather(update: Update) -> list[Bits]:
            return [torch_bits.gather(copy, update) for copy in live[update.tensor].copies]

        resolved, changed = verify(staged, gather, check)
        return Prepared(resolved, token, changed)

    def _scatter(self, prepared: Prepared) -> Scattered:
        staged = prepared.staged
        live = live_tensors(self._read(), staged.catalog)
        paused = time.perf_counter()
        self._gate.close(f"version {staged.target.version} is being written")
        with ExitStack() as stack:
            stack.enter_context(self._lock)
            # Inference tensors may only be written in inference mode; others may be as well.
            stack.enter_context(torch.inference_mode())
            if prepared.token is not None and prepared.token != _token(live):
                self._gate.close("the weights were changed by somebody else")
                raise EngineChanged(
                    f"the live weights changed between prepare and scatter of version {staged.target.version}",
                    hint="write the module only through the subscriber; it checks all weights now",
                )
            _synchronize(live)
            started = time.perf_counter()
            for update in staged.updates():
                for copy in live[update.tensor].copies:
                    torch_bits.scatter(copy, update)
                crash_point("subscriber.mid_scatter")
            _synchronize(live)
            written = time.perf_counter()
            if prepared.token is None:
                self._verify_live(staged)
        self._version = staged.target.version
        self._gate.open()
        return Scattered(staged.target.version, time.perf_counter() - paused, written - started)

    def _verify_live(self, staged: StagedUpdate) -> None:
        digests = self._digests(staged.catalog, lambda: None)
        wrong = np.flatnonzero(digests != staged.target.digest_array)
        if len(wrong):
            names = [repr(staged.catalog.tensors[number].name) for number in wrong]
            raise VerificationFailed(
                f"after writing version {staged.target.version} the live digests of {name_offenders(names)} differ",
                hint="something else writes the module, or its memory is damaged; the engine stays paused",
            )


@contextmanager
def _torch_errors(doing: str) -> Iterator[None]:
    """torch raises RuntimeError for whatever a device cannot do at the moment, running out of memory above all."""
    try:
        yield
    except RuntimeError as error:
        raise EngineFailed(
            f"{doing} the weights failed: {error}", hint="it is tried again by itself"
        ) from error


def _token(live: list[LiveTensor]) -> bytes:
    """Changes when a tensor is replaced, or written by anything that torch counts."""
    values: list[int] = []
    for copy in (copy for tensor in live for copy in tensor.copies):
        values += [copy.data_ptr(), 0 if copy.is_inference() else copy._version]
    return struct.pack(f"<{len(values)}Q", *values)


def _synchronize(live: list[LiveTensor]) -> None:
    for device in {copy.device for tensor in live for copy in tensor.copies if copy.device.type != "cpu"}:
        torch.accelerator.synchronize(device)
