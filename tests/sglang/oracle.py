"""What a server really holds and computes, asked through SGLang's own interfaces and nothing of ours."""

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import httpx

from deltasync.demo.sglang_server import SglangServer

PROMPTS: Final[tuple[tuple[int, ...], ...]] = (
    (9, 8, 7, 6, 5, 4),
    (3, 500, 17, 255, 256, 101, 99, 42, 77),
    tuple(range(40, 72)),
)
TOKENS: Final = 16
"""Generated per prompt."""

_TIMEOUT: Final = 120.0


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of one prompt and its greedy completion. `prompt`: of each prompt token but the first, which has none."""

    prompt: tuple[float, ...]
    completion: tuple[float, ...]
    ids: tuple[int, ...]


def checksums(server: SglangServer) -> list[dict[str, str]]:
    """Per rank, SGLang's checksum of every parameter by its name in the engine. Works while requests run."""
    ranks = post(server, "/weights_checker", action="checksum")["ranks"]
    return [rank["checksums"] for rank in ranks]


def logprobs(
    server: SglangServer, prompts: Sequence[Sequence[int]] = PROMPTS, tokens: int = TOKENS
) -> list[Logprobs]:
    """Exact log probabilities, computed anew: the cache is flushed first, so no request may be running.

    One prompt at a time: which requests share a batch changes the last bits.
    """
    flush_cache(server)
    return [_logprobs(server, prompt, tokens) for prompt in prompts]


def _logprobs(server: SglangServer, prompt: Sequence[int], tokens: int) -> Logprobs:
    answer = post(server, "/generate", **_request(prompt, tokens), return_logprob=True, logprob_start_len=0)
    meta = answer["meta_info"]
    return Logprobs(
        prompt=tuple(entry[0] for entry in meta["input_token_logprobs"][1:]),
        completion=tuple(entry[0] for entry in meta["output_token_logprobs"]),
        ids=tuple(answer["output_ids"]),
    )


def load_from_disk(server: SglangServer, folder: Path, version: str | None = None, **more: Any) -> None:
    """Let SGLang load a Hugging Face folder by itself, over what it holds. It waits for running requests to end.

    SGLang calls the model by this folder's name from now on. `version`: the weight version that people see.
    """
    named = {} if version is None else {"weight_version": version}
    answer = post(server, "/update_weights_from_disk", model_path=str(folder), **named, **more)
    assert answer["success"], answer


def flush_cache(server: SglangServer) -> None:
    """Forget all computed keys and values. SGLang refuses while requests run."""
    with server.client(_TIMEOUT) as client:
        _checked(client.post("/flush_cache"))


def continue_generation(server: SglangServer) -> None:
    """Let a paused server serve again; one that is not paused stays as it is."""
    post(server, "/continue_generation")


def info(server: SglangServer, path: str) -> Any:
    """The answer to GET /server_info, /model_info, …"""
    with server.client(_TIMEOUT) as client:
        return _checked(client.get(path)).json()


def post(server: SglangServer, path: str, **body: Any) -> Any:
    """The answer to a POST of a JSON body, None if empty. Raises AssertionError, with SGLang's message, if not 200."""
    with server.client(_TIMEOUT) as client:
        response = _checked(client.post(path, json=body))
        return response.json() if response.content else None


@dataclass
class Stream:
    """A greedy request that streams its tokens to a thread. As a context manager: waits for its end when left.

    `ids`: tokens so far; `times`: when each arrived, on time.monotonic's clock. `meta`: SGLang's own account of the
    request, with `finish_reason` and `weight_versions`, complete once the request has ended.
    """

    server: SglangServer
    tokens: int
    prompt: Sequence[int] = PROMPTS[0]
    ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    failure: Exception | None = None

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.result()

    def wait_for(self, tokens: int, timeout: float = _TIMEOUT) -> None:
        """Return once that many tokens are there. Raises AssertionError if the request ends or time runs out first."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.ids) >= tokens or self._ended, timeout)
            if len(self.ids) < tokens:
                raise AssertionError(
                    f"{len(self.ids)} of {tokens} tokens; ended: {self._ended}"
                ) from self.failure

    def result(self, timeout: float = _TIMEOUT) -> dict[str, Any]:
        """Wait for the end; `meta`. Raises what ended the request in place of SGLang, AssertionError if it goes on."""
        self._thread.join(timeout)
        if self.failure is not None:
            raise self.failure
        assert self._ended, f"the stream has not ended; {len(self.ids)} tokens so far"
        return self.meta

    def gaps(self) -> list[float]:
        """Seconds between each token and the next."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    @property
    def running(self) -> bool:
        return not self._ended

    def _run(self) -> None:
        try:
            with (
                self.server.client(_TIMEOUT) as client,
                client.stream(
                    "POST", "/generate", json={**_request(self.prompt, self.tokens), "stream": True}
                ) as response,
            ):
                if response.status_code != httpx.codes.OK:
                    response.read()
                _checked(response)
                rest = b""
                for part in response.iter_bytes():
                    # By line feeds alone: text that models make up has every other line separator there is.
                    *lines, rest = (rest + part).split(b"\n")
                    for line in lines:
                        self._take(line.decode())
        except Exception as error:  # noqa: BLE001  # for the thread that waits
            self.failure = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _take(self, line: str) -> None:
        now = time.monotonic()
        data = line.removeprefix("data: ")
        if not data or data == "[DONE]":
            return
        event = json.loads(data)
        with self._changed:
            self.meta = event.get("meta_info", event)  # an event without is an error message
            new = event.get("output_ids", self.ids)[len(self.ids) :]  # each event has all tokens so far
            self.ids += new
            self.times += [now] * len(new)
            self._changed.notify_all()


def _request(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": sampling}


def _checked(response: httpx.Response) -> httpx.Response:
    assert response.status_code == httpx.codes.OK, f"{response.url}: {response.status_code} {response.text}"
    return response
