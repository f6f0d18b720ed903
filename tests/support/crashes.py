"""Functions in processes of their own that die at a crash point; and what may be there once all is over."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from chunkstore.posix import PosixStore
from deltasync.cli import main
from manifest.checkpoint import Checkpoint
from manifest.collect import delete_garbage, read_holdings
from manifest.gc import Policy, collectable
from manifest.keys import STREAM, alternate_key, catalog_key, manifest_key, parse_attempt_key
from manifest.log import VersionLog, open_stream, read_catalog
from manifest.verify import verify_stream
from publisher.takeover import claim
from tests.support.files import below
from tests.support.processes import PROCESSES

DAY = 86400.0


def started(point: str, target: Callable[..., object], *args: Any) -> ForkServerProcess:
    """A process that calls `target`, a function of a module, and dies at `point`; "" for nowhere."""
    process = PROCESSES.Process(target=_run, args=(point, target, args))
    process.start()
    return process


def dies_at(point: str, target: Callable[..., object], *args: Any) -> None:
    """Call `target` in a process, which has to be killed at `point`."""
    assert _exitcode(started(point, target, *args)) == -signal.SIGKILL, f"{point} was not reached"


def succeeds(target: Callable[..., object], *args: Any) -> None:
    """Call `target` in a process, which has to end well."""
    assert _exitcode(started("", target, *args)) == 0


def command(*arguments: str) -> None:
    """Run `deltasync …`; for the functions above."""
    raise SystemExit(main(list(arguments)))


def _decide(log: VersionLog) -> None:
    """If there are attempts at the next version, let another publisher take it: until then they may be needed."""
    newest = log.newest()
    assert newest is not None
    found = (parse_attempt_key(info.key) for info in log.store.list_after(""))
    if any(attempt is not None and attempt[0] > newest.version for attempt in found):
        claim(log, read_catalog(log.store, newest.catalog), newest, os.urandom(16), insist=False)


def _run(point: str, target: Callable[..., object], args: tuple[Any, ...]) -> None:
    os.environ["DELTASYNC_CRASH_AT"] = point
    target(*args)


def _exitcode(process: ForkServerProcess) -> int | None:
    process.join(120)
    exitcode = process.exitcode
    process.kill()
    return exitcode


def age(directory: Path, seconds: float) -> None:
    """Make everything below `directory`, empty directories included, that much older. Others may be at work there."""
    for path in below(directory):
        with suppress(FileNotFoundError):
            then = path.stat().st_mtime - seconds
            os.utime(path, (then, then))


def assert_nothing_leaks(root: Path, base: Checkpoint | None = None) -> None:
    """After grace, garbage collection leaves of the stream in `root` the log, and what the live versions name.

    Live are those from the newest one on that is stored whole. Looks at the files themselves: also hidden ones and
    empty directories are leaks. `base`: the checkpoint that version 0 may refer to.
    """
    store = PosixStore(root)
    log, policy = VersionLog(store, open_stream(store)), Policy(DAY)
    _decide(log)
    age(root, 2 * DAY)
    delete_garbage(store, collectable(read_holdings(log, policy), policy).objects)
    manifests = [log.read_required(version) for version in log.versions()]
    alternates = {version: log.read_alternate(version) for version in log.alternates()}
    floor = max([m.version for m in manifests if m.kind != "delta"] + list(alternates))
    wanted = {STREAM} | {catalog_key(m.catalog) for m in manifests}
    wanted |= {manifest_key(m.version) for m in manifests} | {
        alternate_key(version) for version in alternates
    }
    live = [m for m in [*manifests, *alternates.values()] if m is not None and m.version >= floor]
    wanted |= {ref.key for manifest in live for ref in manifest.chunks}
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() or (path.is_dir() and not any(path.iterdir()))
    }
    assert {name for name in found if not name.startswith("subscribers/")} == wanted
    report = verify_stream(store, base=base)
    assert (report.problems, report.unverified) == ((), ())
