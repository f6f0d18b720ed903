"""The demo's processes: started as commands, spoken to in lines of JSON over stdin and stdout.

One request, one reply. What a child prints otherwise goes to its log file. A child ends when its stdin closes, so none
outlives the process that started it, however that one ends.
"""

import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, Protocol

from chunkstore.errors import DeltasyncError
from deltasync.demo.errors import DemoFailed

Reply = dict[str, Any]
Handler = Callable[..., Reply]

_LOG_TAIL: Final = 30
_GRACE: Final = 10.0
"""Seconds a child has to end by itself."""

_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "PASSIVE",  # spinning while idle would take the cores from the other processes
}


class Child:
    """A running process of the demo. Use as a context manager: leaving it ends the process.

    `hurry`: seconds it has to end by itself after a failure.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        hurry: float = 0.5,
    ) -> None:
        self.name = name
        self.log = log
        self._hurry = hurry
        self._replies: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env={**os.environ, **_ENVIRONMENT, **(environment or {})},
                start_new_session=True,  # Ctrl-C reaches us alone, and we end the children in order
                text=True,
            )
        self._reader = threading.Thread(target=self._read, name=f"{name}-replies", daemon=True)
        self._reader.start()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        self.stop(grace=_GRACE if failure is None else self._hurry)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def call(self, do: str, *, timeout: float, **arguments: Any) -> Reply:
        """Let the child do something and return its answer.

        Raises DemoFailed if it takes longer than `timeout` seconds, if the child answers with an error, or ends;
        the message has the end of its log.
        """
        try:
            self._stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._stdin.flush()
        except BrokenPipeError:
            raise self._ended(do) from None
        try:
            line = self._replies.get(timeout=timeout)
        except queue.Empty:
            raise DemoFailed(
                f"the {self.name} process did not finish {do!r} within {timeout:.0f} s{log_tail(self.log)}",
                hint="the machine may be too busy, or the process hangs",
            ) from None
        if line is None:
            raise self._ended(do)
        reply: Reply = json.loads(line)
        if "error" in reply:
            error = reply["error"]
            raise DemoFailed(
                f"the {self.name} process failed in {do!r}: error[{error['kind']}]: {error['message']}",
                hint=error["hint"],
            )
        return reply

    def stop(self, grace: float = _GRACE) -> None:
        """End the process: ask it by closing its stdin, and kill it if it is still there after `grace` seconds."""
        with contextlib.suppress(BrokenPipeError):  # it is gone already, with a request unread
            self._stdin.close()
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._stdout.close()

    @property
    def _stdin(self) -> IO[str]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _stdout(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    def _read(self) -> None:
        for line in self._stdout:
            self._replies.put(line)
        self._replies.put(None)

    def _ended(self, do: str) -> DemoFailed:
        code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return DemoFailed(f"the {self.name} process {how} during {do!r}{log_tail(self.log)}")


def log_tail(log: Path) -> str:
    """The end of a process's log, to append to a message about the process; nothing if the log is empty."""
    lines = log.read_text(errors="replace").splitlines()[-_LOG_TAIL:]
    return "".join([f"; the end of {log}:", *(f"\n    {line}" for line in lines)]) if lines else ""


def child_command(module: str) -> tuple[str, ...]:
    """The command that runs `deltasync.demo.<module>` as a child."""
    return (sys.executable, "-m", f"deltasync.demo.{module}")


def claim_stdout() -> IO[str]:
    """In a child: the pipe for replies. From now on everything else that prints or logs goes to stderr, the log."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


class Worker(Protocol):
    """What a child does: answer requests by name, then close."""

    @property
    def handlers(self) -> Mapping[str, Handler]: ...

    def close(self) -> None: ...


def work(start: Callable[[], Worker], replies: IO[str]) -> None:
    """In a child: make the worker and serve until stdin closes. A start that fails is the answer to what is asked."""
    try:
        worker = start()
    except DeltasyncError as error:
        for _ in sys.stdin:
            _answer(replies, _failure(error))
        return
    try:
        serve(worker.handlers, replies)
    finally:
        worker.close()


def serve(handlers: Mapping[str, Handler], replies: IO[str]) -> None:
    """In a child: answer requests until stdin closes. An expected error is answered; any other ends the process."""
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = handlers[request.pop("do")](**request)
        except DeltasyncError as error:
            reply = _failure(error)
        _answer(replies, reply)


def _failure(error: DeltasyncError) -> Reply:
    return {"error": {"kind": error.kind, "message": error.message, "hint": error.hint}}


def _answer(replies: IO[str], reply: Reply) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()
