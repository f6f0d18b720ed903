"""HTTP with one SGLang server: whatever it or the way to it does is a typed error, and no key is ever part of one."""

import asyncio
import errno
import json
import os
import socket
import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from subscriber.config import ServerConfig, SGLangEngineConfig, unsendable
from subscriber.errors import EngineDenied, EngineFailed

_MAX_ANSWER: Final = 64 << 20  # bytes; what ranks say of themselves takes kilobytes
_MAX_KEY: Final = 4096
_SAID: Final = 500  # characters of an answer in an error's message

# What may lie below a failed connection, and what is to be done about it; the first that fits.
_HINTS: Final[tuple[tuple[type[BaseException], str], ...]] = (
    (
        ssl.SSLCertVerificationError,
        "the certificate has to be for this host name and by a public authority; on one host http:// will do",
    ),
    (ssl.SSLError, "correct the server's url: http:// unless the server itself speaks TLS"),
    (socket.gaierror, "correct the server's url: this host cannot resolve the name"),
    (httpx.ConnectError, "start the server, or correct its url; it is attached by itself"),
    (httpx.NetworkError, "look at the server's log; it is attached again by itself"),
)
_NO_HTTP: Final = "correct the server's url if something else listens there, or look at the server's log"


@dataclass(frozen=True, slots=True)
class Answer:
    """`body`: of JSON, else None. `said`: status and words for an error's message, without the key."""

    status: int
    body: Any
    said: str

    @property
    def message(self) -> object:
        """What an answer of SGLang's form says; None if it is of another form."""
        return self.body.get("message") if isinstance(self.body, dict) else None

    @property
    def well(self) -> bool:
        """Whether it is SGLang's word for success, not merely a status code."""
        return 200 <= self.status < 300 and self.message is not None and self.body.get("success") is not False


class Http:
    """Requests to `server`, with the key that `config` names."""

    def __init__(self, config: SGLangEngineConfig, server: ServerConfig) -> None:
        self._config, self._server = config, server
        # Not through a proxy, which the environment may name for the object store: servers are on this host.
        self._http = httpx.AsyncClient(
            base_url=server.url.rstrip("/"), timeout=config.request_timeout, trust_env=False
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def post(self, path: str, body: Mapping[str, object], timeout: float | None = None) -> Answer:
        """Whatever the server answers, whole within `timeout` seconds, by default `request_timeout`.

        Raises EngineDenied if there is no key that can be sent, EngineFailed if no answer comes.
        """
        seconds = timeout or self._config.request_timeout
        key = key_of(self._config, self._server.name)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        place = f"{self._server.name}: {self._server.url.rstrip('/')}{path}"
        try:
            async with (
                asyncio.timeout(seconds),
                self._http.stream("POST", path, json=body, headers=headers, timeout=seconds) as response,
            ):
                data = bytearray()
                async for part in response.aiter_bytes():
                    data += part
                    if len(data) > _MAX_ANSWER:
                        raise EngineFailed(f"{place} answers more than {_MAX_ANSWER} bytes", hint=_NO_HTTP)
        except (httpx.TimeoutException, TimeoutError) as error:
            raise EngineFailed(f"{place} gave no answer in time", hint="look at the server's log") from error
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError, OSError) as error:
            what = (
                "gave no answer"
                if isinstance(error, httpx.ProtocolError | httpx.DecodingError)
                else "cannot be reached"
            )
            why = str(error) or type(error).__name__
            raise EngineFailed(f"{place} {what}: {why}", hint=_hint(error)) from error
        return _answer(response, bytes(data), key)


def key_of(config: SGLangEngineConfig, whose: str) -> str | None:
    """The key that requests are sent with, if the servers want one. `whose`: what an error begins with.

    All requests here are of SGLang's level that wants the admin key, if there is one, else the plain one. Raises
    EngineDenied.
    """
    for name in ("admin_api_key", "api_key"):
        given, file = getattr(config, name), getattr(config, f"{name}_file")
        if given is not None:
            return str(given.get_secret_value())
        if file is not None:
            return _read_key(f"{whose}: engine.{name}_file", file.expanduser())
    return None


def _read_key(setting: str, file: Path) -> str:
    try:
        key = _text_of(file)
        why = unsendable(key)
    except OSError as error:
        key, why = "", f"cannot be read: {error.strerror}"
    if why is not None:
        raise EngineDenied(
            f"{setting}: {file} {why}",
            hint="write the key into it, alone and on one line; it is read anew for every request",
        )
    return key


def _text_of(file: Path) -> str:
    """What a key file holds, without space around it. Raises OSError."""
    # Not to wait for whoever writes into a pipe.
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        data = opened.read(_MAX_KEY + 1)
    if len(data) > _MAX_KEY:
        raise OSError(errno.EFBIG, f"it is longer than {_MAX_KEY} bytes")
    return data.decode(errors="replace").strip(" \t\r\n")


def _answer(response: httpx.Response, data: bytes, key: str | None) -> Answer:
    kind = response.headers.get("content-type", "no Content-Type").partition(";")[0]
    try:
        body = json.loads(data)
        words = body
        if isinstance(body, dict):
            words = next((body[name] for name in ("message", "error", "detail") if name in body), body)
        text = str(words)
    except (ValueError, RecursionError):  # also of what is no text at all
        body, text = None, f"{len(data)} bytes of {kind}"
    if key is not None:  # some services answer with the request that they did not like
        text = text.replace(key, "…")
    return Answer(response.status_code, body, f"HTTP {response.status_code}: {_plain(text)}")


def _plain(text: str) -> str:
    """At most `_SAID` characters, on one line and nothing that a terminal would obey."""
    cut = text[:_SAID] + ("…" if len(text) > _SAID else "")
    return "".join(char if char.isprintable() else " " for char in cut)


def _hint(error: BaseException) -> str:
    below: BaseException | None = error
    causes: list[BaseException] = []
    while below is not None and below not in causes:
        causes.append(below)
        below = below.__cause__ or below.__context__
    for kind, hint in _HINTS:
        if any(isinstance(cause, kind) for cause in causes):
            return hint
    return _NO_HTTP
