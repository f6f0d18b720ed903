"""Requests to one SGLang server: who is there, what every rank answers, pause and continue.

Whatever differs between SGLang's releases in its HTTP interface belongs here. The body decides, never the status code
alone, and an answer counts only if every rank gave one.
"""

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import httpx

from subscriber.config import ServerConfig, SGLangEngineConfig
from subscriber.errors import (
    EngineChanged,
    EngineDenied,
    EngineFailed,
    EngineMismatch,
    EngineRestarted,
    StagedLost,
    StagingFull,
    SubscriberError,
    name_offenders,
)
from subscriber.report import event
from subscriber.sglang.http import Answer, Http
from subscriber.sglang.wire import PREFIX, PROTOCOL

Ack = dict[str, Any]

_POLL: Final = 0.02  # seconds between looks at work beside serving, at first
_POLL_SHARE: Final = 0.1  # of the time that it has taken so far: each look is a vote between two batches
_POLL_LONGEST: Final = 0.5
_KINDS: Final[Mapping[str, type[SubscriberError]]] = {
    kind.kind: kind for kind in (EngineChanged, EngineFailed, EngineMismatch, StagedLost, StagingFull)
}


class Client:
    """Talks to the server at `server.url`. Every method raises EngineFailed while it cannot be reached or gives no
    answer in time, EngineDenied if there is no key for it that can be used, EngineMismatch if it is none that can be
    driven, EngineRestarted if another life of it answers than the first time.
    """

    def __init__(self, config: SGLangEngineConfig, server: ServerConfig) -> None:
        self._config = config
        self.name = server.name
        self._boots: dict[int, str] = {}
        self._http = Http(config, server)

    async def close(self) -> None:
        await self._http.close()

    async def knock(self) -> int:
        """The HTTP status that the server answers a ping with, whatever it is."""
        action = PREFIX + json.dumps({"op": "ping"})
        return (await self._http.post("/weights_checker", {"action": action})).status

    async def hello(self) -> list[Ack]:
        """What every rank says of itself, in rank order."""
        acks = await self.ask("hello")
        protocols = {str(ack.get("protocol")) for ack in acks}
        if protocols != {str(PROTOCOL)}:
            raise EngineMismatch(
                f"{self.name}: the plugin speaks protocol {sorted(protocols)}, this subscriber {PROTOCOL}",
                hint="install the same release of deltasync in SGLang's environment and for the subscriber",
            )
        return acks

    async def ping(self) -> list[Ack]:
        """The same of the first rank of every replica: cheap."""
        acks = await self._send("ping", None)
        raise_failures(self.name, "ping", acks)
        if {ack["rank"]: ack["boot"] for ack in acks}.items() <= self._boots.items():
            return acks
        raise self._restarted()

    async def ask(self, op: str, timeout: float | None = None, **fields: object) -> list[Ack]:
        """The acknowledgement of every rank, in rank order; raises what any of them could not do."""
        acks = await self.try_ask(op, timeout, **fields)
        raise_failures(self.name, op, acks)
        return acks

    async def try_ask(self, op: str, timeout: float | None = None, **fields: object) -> list[Ack]:
        """The same, with failures left in the acknowledgements."""
        acks = await self._send(op, timeout, **fields)
        ranks = [ack["rank"] for ack in acks]
        if ranks != list(range(len(ranks))):
            raise EngineFailed(
                f"{self.name}: only ranks {ranks} answered {op}", hint="look at the server's log"
            )
        boots = {int(ack["rank"]): str(ack["boot"]) for ack in acks}
        if self._boots and boots != self._boots:
            raise self._restarted()
        self._boots = boots
        return acks

    @property
    def boot_id(self) -> str:
        """Names the life that first answered."""
        return hashlib.sha256(" ".join(self._boots.values()).encode()).hexdigest()[:32]

    def _restarted(self) -> EngineRestarted:
        hint = "it is brought back to the newest version by itself"
        return EngineRestarted(f"{self.name}: the server was restarted", hint=hint)

    async def _send(self, op: str, timeout: float | None, **fields: object) -> list[Ack]:
        action = PREFIX + json.dumps({"op": op, **fields})
        message = await self._post("/weights_checker", {"action": action}, timeout, op)
        try:
            return _acks_in(message)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            self._no_plugin(f"answered {str(message)[:300]!r}", error)

    async def run(self, op: str, name: str, **fields: object) -> list[Ack]:
        """Start long work on every rank, beside serving, and wait until all have done it."""
        await self.ask(op, None, name=name, **fields)
        began = time.monotonic()
        while True:
            acks = await self.ask("poll", task=f"{op} {name}")
            if all(ack["done"] for ack in acks):
                return acks
            taken = time.monotonic() - began
            if taken > self._config.prepare_timeout:
                raise EngineFailed(
                    f"{self.name}: {op} took longer than prepare_timeout, {self._config.prepare_timeout} s",
                    hint="raise engine.prepare_timeout, or look at the server's log",
                )
            await asyncio.sleep(min(max(_POLL, _POLL_SHARE * taken), _POLL_LONGEST))

    async def pause(self) -> None:
        """Let nothing run: requests wait, or are aborted, as configured."""
        await self._post("/pause_generation", {"mode": self._config.pause}, self._config.pause_timeout)

    async def resume(self) -> None:
        """Let generation go on, unless the plugin's gate is closed."""
        await self._post("/continue_generation", {"torch_empty_cache": False}, self._config.pause_timeout)

    async def show_version(self, version: int) -> None:
        """Set the weight version that answers carry."""
        await self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def _post(
        self, path: str, body: Mapping[str, object], timeout: float | None = None, op: str | None = None
    ) -> object:
        """The message of a successful answer. `op`: what a request of ours is about, for the log."""
        began = time.perf_counter()
        answer = await self._http.post(path, body, timeout)
        seconds = round(time.perf_counter() - began, 6)
        event("request", logging.DEBUG, to=op or path, server=self.name, seconds=seconds)
        return self._message(path, answer)

    def _message(self, path: str, answer: Answer) -> object:
        check_access(self.name, answer.status)
        if path == "/weights_checker" and answer.status in (400, 404, 405, 422):
            self._no_plugin(f"answered {answer.said}")
        if not answer.well:
            foreign = answer.message is None
            raise EngineFailed(
                f"{self.name}: {path} failed: {answer.said}",
                hint="look at the server's log"
                + (", or correct its url if something else answers there" if foreign else ""),
            )
        return answer.message

    def _no_plugin(self, answer: str, error: Exception | None = None) -> NoReturn:
        raise EngineMismatch(
            f"{self.name}: the server has no working deltasync plugin: it {answer}",
            hint="install deltasync in SGLang's environment, and name it in SGLANG_PLUGINS if that is set; or correct "
            "the url if no SGLang server answers there",
        ) from error


def _acks_in(message: object) -> list[Ack]:
    """What the ranks answered, in rank order, each with at least what every acknowledgement has.

    Raises ValueError, TypeError, KeyError, OverflowError or RecursionError if `message` is something else.
    """
    acks: list[Ack] = [ack for part in str(message).split(" | ") for ack in json.loads(part)]
    for ack in acks:
        missing = [
            name for name in ("kind", "error", "hint") if not ack["ok"] and not isinstance(ack[name], str)
        ]
        if missing or not isinstance(ack["rank"], int):
            raise ValueError(f"an acknowledgement of the wrong form: {missing or 'rank'}")
    return sorted(acks, key=lambda ack: (int(ack["rank"]), str(ack["boot"])))


def is_gone(error: EngineFailed) -> bool:
    """Whether nothing listens at the server's address any more."""
    return isinstance(error.__cause__, httpx.ConnectError)


def check_access(server: str, status: int) -> None:
    """Raise EngineDenied if the HTTP status says that the key is missing or wrong."""
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise EngineDenied(
            f"{server}: the server refuses the key: HTTP {status}",
            hint="set engine.admin_api_key to the server's --admin-api-key, or engine.api_key to its --api-key",
        )


def check_ranks(server: str, acks: list[Ack]) -> None:
    """Raise EngineMismatch naming every reason why the ranks that greeted cannot be updated."""
    reasons = {str(reason) for ack in acks for reason in ack["refusals"]}
    sizes = {int(ack["size"]) for ack in acks}
    if sizes != {len(acks)}:
        reasons.add(f"{len(acks)} ranks answer of {sorted(sizes)}")
    if reasons:
        raise EngineMismatch(
            f"{server}: this server cannot be updated: {name_offenders(sorted(reasons))}",
            hint="docs/sglang.md says what is supported and what each refusal means",
        )


def raise_failures(server: str, op: str, acks: list[Ack]) -> None:
    """Raise what the ranks could not do: the error of the first, naming all."""
    failed = [ack for ack in acks if not ack["ok"]]
    if not failed:
        return
    first = failed[0]
    reasons = name_offenders([f"rank {ack['rank']}: {ack['error']}" for ack in failed], 8)
    raise _KINDS.get(first["kind"], EngineFailed)(f"{server}: {op} failed: {reasons}", hint=first["hint"])
