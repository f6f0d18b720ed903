"""A real, unmodified SGLang server on the CPU: start, wait until it generates, end it and all its processes.

SGLang runs in an environment of its own (`make venv-sglang`), with the substitutes of `sglang_cpu` for what has no
build for the CPU. It is configured small: little cache, few requests, and no core kept busy while idle.
"""

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import httpx

from deltasync.demo.child import log_tail
from deltasync.demo.errors import DemoFailed

READY_TIMEOUT: Final = 300.0
"""Seconds until a server must generate; most of them pass with imports."""

_POLL: Final = 0.2
_HOST: Final = "127.0.0.1"
_SHIMS: Final = Path(__file__).with_name("sglang_cpu")
_SHARED: Final = "/dev/shm/sgl"
"""How the names of SGLang's shared memory begin, up to 25 MB per server, which it leaves behind however it ends."""

_LONGEST_FOLDER: Final = 70
"""Characters; the name of a Unix socket has 107 at most."""

_FLAGS: Final = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
    *("--mem-fraction-static", "0.1", "--max-total-tokens", "2048", "--max-running-requests", "4"),
    *("--context-length", "512", "--skip-server-warmup", "--sleep-on-idle"),
)

_ENVIRONMENT: Final = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCHDYNAMO_DISABLE": "1",  # compiling needs triton
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}

_GUARDED: Final = (
    "sh",
    "-c",
    'exec 3<&0 </dev/null; { read _; kill -KILL 0; } <&3 & exec "$@" 3<&-',
    "guard",
)
"""Becomes the command in its arguments, beside a shell that kills the whole process group when nobody holds the other
end of its stdin any more: the server never outlives the process that started it, however that one ends."""


def find_sglang(given: Path | None = None) -> Path:
    """The interpreter of SGLang's environment: `given`, or of .venv-sglang in the working directory or the repository.

    Raises DemoFailed if there is none.
    """
    places = (Path.cwd(), Path(__file__).resolve().parents[2])
    candidates = [place / ".venv-sglang" / "bin" / "python" for place in places] if given is None else [given]
    for python in candidates:
        if python.exists():
            return python.absolute()
    raise DemoFailed(
        f"there is no SGLang environment: {' and '.join(map(str, candidates))} do not exist",
        hint="`make venv-sglang` in the repository builds it (1.7 GB, some minutes); or name one with --sglang-python",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangOptions:
    """How to start a server.

    `python`: of SGLang's environment. `model`: a Hugging Face folder. `tokenizer`: likewise, for servers that are to
    take text; without it they take and return token ids only. `overlap`: prepare each batch while the one before runs,
    which is SGLang's default. `flags` come last, so they override the defaults. `path`: folders with further modules,
    such as plugins.
    """

    python: Path
    model: Path
    tp_size: int = 1
    tokenizer: Path | None = None
    api_key: str | None = None
    admin_api_key: str | None = None
    overlap: bool = False
    flags: Sequence[str] = ()
    path: Sequence[Path] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, port: int) -> list[str]:
        """The server's command line."""
        command = [str(self.python), "-m", "sglang.launch_server", "--model-path", str(self.model)]
        command += ["--host", _HOST, "--port", str(port), "--tp-size", str(self.tp_size), *_FLAGS]
        command += (
            ["--skip-tokenizer-init"] if self.tokenizer is None else ["--tokenizer-path", str(self.tokenizer)]
        )
        if not self.overlap:
            command.append("--disable-overlap-schedule")
        if self.api_key is not None:
            command += ["--api-key", self.api_key]
        if self.admin_api_key is not None:
            command += ["--admin-api-key", self.admin_api_key]
        return [*command, *self.flags]

    def variables(self, scratch: Path) -> dict[str, str]:
        """The environment of the server's processes; their temporary files go to `scratch`."""
        return {
            **os.environ,
            **_ENVIRONMENT,
            # One entry per rank, or SGLang wants a NUMA node for each; without its kernels it binds nothing.
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(self.tp_size))),
            "TMPDIR": str(scratch),
            "PYTHONPATH": os.pathsep.join(map(str, (_SHIMS, *self.path))),
            **self.environment,
        }


class SglangServer:
    """A running server. Use as a context manager: leaving it kills all its processes.

    Starting returns at once, so that several can start side by side; `wait_ready` waits. Output goes to file `log`.
    """

    def __init__(self, options: SglangOptions, log: Path, port: int | None = None) -> None:
        """`port`: a free one unless given. Raises DemoFailed if SGLang's environment is not there."""
        if not options.python.exists():
            raise DemoFailed(
                f"there is no SGLang environment: {options.python} does not exist",
                hint="make venv-sglang builds it (1.7 GB, some minutes)",
            )
        self.options = options
        self.log = log
        self.port = port or free_port()
        self._shared: set[Path] = set()
        self._scratch = _make_scratch()
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                [*_GUARDED, *options.command(self.port)],
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=options.variables(self._scratch),
                start_new_session=True,  # so a process group of its own
            )
        assert self._process.stdin is not None
        self._lifeline = self._process.stdin

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """Of the main process, and the number of the process group that all of the server's processes are in."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the main process lives. When a scheduler dies, it soon ends too."""
        return self._process.poll() is None

    def pids(self) -> tuple[int, ...]:
        """All living processes of the server, the small one included that guards it."""
        return tuple(sorted(_members(self.pid)))

    def wait_ready(self, timeout: float = READY_TIMEOUT) -> Self:
        """Wait until the server has generated a token, at most `timeout` seconds.

        Raises DemoFailed, with the end of the log, if it does not come to that or the server ends.
        """
        deadline = time.monotonic() + timeout
        with self.client(timeout=30) as client:
            while not self._generates(client):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = self._process.wait(_POLL)
                    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                    raise DemoFailed(
                        f"the SGLang server {how} before it was ready{log_tail(self.log)}",
                        hint="the log says why",
                    )
                if time.monotonic() > deadline:
                    raise DemoFailed(
                        f"the SGLang server was not ready within {timeout:.0f} s{log_tail(self.log)}",
                        hint="the machine may be too busy, or the server hangs",
                    )
        self._shared = _shared_memory(self.pids())
        return self

    def client(self, timeout: float) -> httpx.Client:
        """For the server's HTTP API, with its keys, never through a proxy. `timeout`: seconds for each phase."""
        key = self.options.admin_api_key or self.options.api_key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=False)

    def stop(self) -> None:
        """Kill all processes of the server and remove what they leave behind; idempotent.

        There is nothing to save, and an orderly end takes SGLang ten seconds.
        """
        if self._lifeline.closed:
            return
        self._shared |= _shared_memory(self.pids())
        while members := self.pids():
            # Not the tracker: it ends when nobody is left, and removes the others' semaphores first.
            for pid in itertools.filterfalse(_tracks_resources, members):
                with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)  # they are not our children, so there is nothing to wait on
        self._process.wait()
        self._lifeline.close()
        for path in self._shared:
            path.unlink(missing_ok=True)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @staticmethod
    def _generates(client: httpx.Client) -> bool:
        try:
            return client.get("/health_generate").status_code == httpx.codes.OK
        except httpx.TransportError:  # not listening yet
            return False


def _make_scratch() -> Path:
    """A folder for temporary files. SGLang binds Unix sockets in it, so its name must be short."""
    usual = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="sglang-", dir=usual if len(usual) <= _LONGEST_FOLDER else "/tmp"))


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _members(group: int) -> set[int]:
    """The living processes of a process group; not those that only wait for their parent to notice their end."""
    members = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                # Behind the name, which may contain anything, in parentheses: state, parent, process group.
                state, _, number = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(number) == group and state != "Z":
                    members.add(int(entry.name))
    return members


def _tracks_resources(pid: int) -> bool:
    """Whether a process is the one that multiprocessing keeps to clean up after the others."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _shared_memory(pids: Sequence[int]) -> set[Path]:
    """SGLang's shared memory that any of the processes has mapped, as files."""
    files = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                name = line[line.find("/") :] if "/" in line else ""
                if name.startswith(_SHARED):
                    files.add(Path(name.removesuffix(" (deleted)")))
    return files
