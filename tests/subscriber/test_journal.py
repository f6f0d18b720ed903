"""The journal: atomic, per boot id, one process at a time."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from subscriber.errors import SubscriberBusy
from subscriber.journal import AppliedRecord, ApplyingRecord, Entry, Journal, locked, locked_folder

ENTRY = Entry("ab" * 16, AppliedRecord(3, "cd" * 32, "ef" * 32), ApplyingRecord(4, "/staged", "01" * 32))


def test_an_entry_outlives_the_process_but_not_the_boot(tmp_path: Path) -> None:
    def read(boot_id: str) -> Entry | None:
        journal = Journal(tmp_path)
        journal.begin(boot_id)
        return journal.read()

    journal = Journal(tmp_path)
    journal.begin("first")
    assert journal.read() is None
    journal.write(ENTRY)
    assert read("first") == ENTRY
    assert read("second") is None
    assert read("first") is None  # the life it told of ended when another began


@pytest.mark.parametrize("what", ["entry", "high water"])
def test_what_was_written_outlives_a_power_loss(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are flushed before it has its name, and the name before `write` returns."""
    journal = Journal(tmp_path)
    journal.begin("boot")
    path = tmp_path / "journal-boot.json" if what == "entry" else journal.high_water
    done: list[tuple[str, bool]] = []
    real = os.fsync

    def fsync(file: int) -> None:
        done.append((Path(os.readlink(f"/proc/self/fd/{file}")).name, path.exists()))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    if what == "entry":
        journal.write(ENTRY)
    else:
        journal.reach("ab" * 16, 3)
    assert done == [(path.with_suffix(".tmp").name, False), (tmp_path.name, True)]


OTHERS = '{"format": %d, "boot_id": "%s", "entry": {"stream": "ab", "applied": null, "applying": null}}'


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'{"format": 2}',
        b"\xff\xfe",
        (OTHERS % (2, "boot")).encode(),
        (OTHERS % (1, "other")).encode(),
    ],
)
def test_a_damaged_journal_means_nothing_is_known(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "journal-boot.json").write_bytes(data)
    journal = Journal(tmp_path)
    journal.begin("boot")
    assert journal.read() is None
    journal.write(ENTRY)
    assert journal.read() == ENTRY


def test_the_high_water_only_rises_and_belongs_to_one_stream(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.reached("ab" * 16) == -1
    for version, reached in ((0, 0), (3, 3), (2, 3), (4, 4)):
        journal.reach("ab" * 16, version)
        assert journal.reached("ab" * 16) == reached
    journal.begin("another-life")
    assert journal.reached("ab" * 16) == 4
    assert journal.reached("cd" * 16) == -1
    journal.reach("cd" * 16, 1)
    assert (journal.reached("cd" * 16), journal.reached("ab" * 16)) == (1, -1)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(SubscriberBusy, match="another subscriber"), locked(tmp_path):
        pytest.fail("locked twice")
    with locked(tmp_path):
        pass


def test_a_folder_is_locked_without_a_file_until_the_process_is_gone(tmp_path: Path) -> None:
    holding = (
        "import sys; from pathlib import Path; from subscriber.journal import locked_folder\n"
        "with locked_folder(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", holding, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(SubscriberBusy, match="another subscriber"), locked_folder(tmp_path):
            pytest.fail("locked twice")
        other.kill()
    with locked_folder(tmp_path), locked(tmp_path):  # of a folder that is both
        pass


def test_a_file_system_that_locks_no_folders_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, how: int) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr("fcntl.flock", refuse)
    with locked_folder(tmp_path):
        pass


def test_a_boot_id_cannot_leave_the_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="boot id"):
        Journal(tmp_path).begin("../boot")
