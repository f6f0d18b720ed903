"""A second SGLang plugin, for tests only: makes ranks fail where a test says so, through files.

`<folder>/<rank>.<point>` arms a point: the rank takes the file and does what it says, once. `raise`, `kill`, or
`wait`, which lasts until `<folder>/go` exists and makes `gone`; `after N …` lets N calls pass first. Points are the
functions of `subscriber.sglang.live` (gather, write, digest), which a rank calls once per piece or box, and `grammar`,
which SGLang calls on a thread to compile one.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

POINTS = ("gather", "write", "digest")
_COUNTING = threading.Lock()  # calls of several threads


def register() -> None:
    """Called by SGLang once per process."""
    folder = os.environ.get("DELTASYNC_FAULTS")
    if folder is None:
        return
    from subscriber.sglang import live

    for point in POINTS:
        setattr(live, point, _breakable(Path(folder), point, getattr(live, point)))
    try:
        from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend as Grammars
    except ImportError:
        return
    Grammars.dispatch_json = _breakable(Path(folder), "grammar", Grammars.dispatch_json)


def _breakable(folder: Path, point: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any) -> Any:
        _meet(folder, point)
        return original(*args)

    return wrapped


def _meet(folder: Path, point: str) -> None:
    from subscriber.sglang import plugin

    assert plugin._rank is not None
    path = folder / f"{plugin._rank._host.rank}.{point}"
    with _COUNTING:
        if not path.exists():
            return
        words = path.read_text().split()
        if words[0] == "after" and int(words[1]) > 0:
            path.write_text(" ".join(["after", str(int(words[1]) - 1), *words[2:]]))
            return
        path.unlink()
    action = words[-1]
    if action == "raise":
        raise OSError(f"{point} fails because a test wants it")
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / f"{path.name}.reached").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    (folder / "gone").touch()
