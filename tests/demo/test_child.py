"""Processes that answer, fail, die, hang, and never stay behind."""

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltasync.demo.child import Child
from deltasync.demo.errors import DemoFailed

SCRIPT = """
import os, signal, sys, threading
from chunkstore.errors import StoreFull
from deltasync.demo.child import claim_stdout, serve

def fail():
    raise StoreFull("no room for x", hint="make room")

def bug():
    raise ZeroDivisionError("a bug")

def die():
    os.kill(os.getpid(), signal.SIGKILL)

replies = claim_stdout()
print("chatter on stdout")
serve({"add": lambda a, b: {"sum": a + b}, "fail": fail, "bug": bug, "die": die, "hang": threading.Event().wait,
       "env": lambda name: {"value": os.environ[name]}}, replies)
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    with Child("worker", (sys.executable, "-c", SCRIPT), tmp_path / "log", {"MARK": "7"}) as running:
        yield running


def test_request_and_reply(child: Child) -> None:
    assert child.call("add", timeout=30, a=2, b=3) == {"sum": 5}
    assert child.call("env", timeout=30, name="MARK") == {"value": "7"}
    assert "chatter on stdout" in child.log.read_text()


def test_expected_error_arrives_with_its_hint_and_the_child_lives(child: Child) -> None:
    with pytest.raises(
        DemoFailed, match=r"worker process failed in 'fail': error\[store_full\]: no room for x"
    ) as caught:
        child.call("fail", timeout=30)
    assert caught.value.hint == "make room"
    assert child.call("add", timeout=30, a=1, b=1) == {"sum": 2}


REFUSES = """
from chunkstore.errors import AccessDenied
from deltasync.demo.child import claim_stdout, work

def start():
    raise AccessDenied("no access to bucket b", hint="set AWS_PROFILE")

work(start, claim_stdout())
"""


def test_a_start_that_fails_is_told_when_something_is_asked(tmp_path: Path) -> None:
    with (
        Child("worker", (sys.executable, "-c", REFUSES), tmp_path / "log") as child,
        pytest.raises(DemoFailed, match=r"error\[access_denied\]: no access to bucket b"),
    ):
        child.call("anything", timeout=30)


@pytest.mark.parametrize(
    ("do", "how"), [("bug", "ended with exit code 1"), ("die", "was killed by signal 9")]
)
def test_death_is_reported_with_the_end_of_the_log(child: Child, do: str, how: str) -> None:
    child.call("add", timeout=30, a=1, b=1)
    with pytest.raises(DemoFailed, match=how) as caught:
        child.call(do, timeout=30)
    assert "chatter on stdout" in str(caught.value) or "ZeroDivisionError: a bug" in str(caught.value)
    with pytest.raises(DemoFailed, match=how):
        child.call("add", timeout=30, a=1, b=1)


def test_hang_is_cut_and_the_process_ended(tmp_path: Path) -> None:
    with Child("worker", (sys.executable, "-c", SCRIPT), tmp_path / "log") as child:
        child.call("add", timeout=30, a=1, b=1)
        with pytest.raises(DemoFailed, match="did not finish 'hang' within 0 s"):
            child.call("hang", timeout=0.01)
        child.stop(grace=0.01)
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_child_ends_with_its_parent_even_if_that_is_killed(tmp_path: Path) -> None:
    parent_script = f"""
import os, signal, sys
from pathlib import Path
from deltasync.demo.child import Child
child = Child("worker", (sys.executable, "-c", {SCRIPT!r}), Path({str(tmp_path / "log")!r}))
child.call("add", timeout=30, a=1, b=1)
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    parent = subprocess.run([sys.executable, "-c", parent_script], capture_output=True, text=True, timeout=60)
    assert ends_soon(int(parent.stdout))


def ends_soon(pid: int) -> bool:
    """True if process `pid`, no child of ours, ends within 30 seconds."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True  # gone already
    with os.fdopen(watched, "rb"):
        return bool(select.select([watched], [], [], 30)[0])
