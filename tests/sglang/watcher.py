"""Somebody who generates all the time, and remembers which weights every answer says it came from."""

import threading
from dataclasses import dataclass
from typing import Any, Final, Self

import httpx

from deltasync.demo.sglang_server import SglangServer

PROMPT = (9, 8, 7, 6, 5, 4)
TOKENS = 6


@dataclass(frozen=True, slots=True)
class Answer:
    """`versions`: the weight versions that its tokens came from, as the server tells."""

    ids: tuple[int, ...]
    versions: tuple[str, ...]


def answer(server: SglangServer, timeout: float = 60.0) -> Answer | None:
    """One greedy completion; None if it was aborted."""
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    with server.client(timeout) as client:
        response = client.post("/generate", json={"input_ids": list(PROMPT), "sampling_params": sampling})
    body = response.json()
    if response.status_code != httpx.codes.OK or body["meta_info"]["finish_reason"]["type"] == "abort":
        return None
    return Answer(tuple(body["output_ids"]), versions_of(body["meta_info"]))


def versions_of(meta: dict[str, Any]) -> tuple[str, ...]:
    """Every weight version that took part in an answer."""
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"]}]
    return tuple(span["version"] if isinstance(span, dict) else str(span) for span in spans)


_BREATH: Final = 0.2
"""Seconds between two requests: others need the machine too."""


class Watcher:
    """Asks for the same completion again and again while the `with` block runs."""

    def __init__(self, server: SglangServer) -> None:
        self._server = server
        self.answers: list[Answer] = []
        self.aborted = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_BREATH):
            try:
                found = answer(self._server)
            except httpx.HTTPError:  # the server is being killed, or held for long
                continue
            if found is None:
                self.aborted += 1
            else:
                self.answers.append(found)
