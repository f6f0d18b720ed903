"""The processes that tests start."""

import os
import sys

import pytest

from tests.support.processes import PROCESSES


def _look(name: str, wanted: str | None) -> None:
    sys.exit(int(os.environ.get(name) != wanted))


def _exitcode(name: str, wanted: str | None) -> int | None:
    process = PROCESSES.Process(target=_look, args=(name, wanted))
    process.start()
    process.join()
    return process.exitcode


def test_a_process_has_the_environment_of_who_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the test that happened to start the first process, which may have had no credentials, or others."""
    name = "DELTASYNC_TEST"
    assert _exitcode(name, None) == 0  # from now on the server is there
    monkeypatch.setenv(name, "1")
    assert _exitcode(name, "1") == 0
    monkeypatch.delenv(name)
    assert _exitcode(name, None) == 0
    assert _exitcode(name, "1") == 1
