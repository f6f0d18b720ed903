"""The journal: atomic, per boot id, one process at a time."""

from pathlib import Path

import pytest

from subscriber.errors import SubscriberBusy
from subscriber.journal import AppliedRecord, ApplyingRecord, Entry, Journal

ENTRY = Entry("ab" * 16, AppliedRecord(3, "cd" * 32, "ef" * 32), ApplyingRecord(4, "/staged", "01" * 32))


def test_an_entry_outlives_the_process_but_not_the_boot(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.begin("first")
        assert journal.read() is None
        journal.write(ENTRY)
    with Journal(tmp_path) as journal:
        journal.begin("first")
        assert journal.read() == ENTRY
    with Journal(tmp_path) as journal:
        journal.begin("second")
        assert journal.read() is None
    with Journal(tmp_path) as journal:
        journal.begin("first")
        assert journal.read() is None  # the life it told of ended when another began


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"format": 2}', b"\xff\xfe"])
def test_a_damaged_journal_means_nothing_is_known(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "journal-boot.json").write_bytes(data)
    with Journal(tmp_path) as journal:
        journal.begin("boot")
        assert journal.read() is None
        journal.write(ENTRY)
        assert journal.read() == ENTRY


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with Journal(tmp_path), pytest.raises(SubscriberBusy, match="another subscriber"):
        Journal(tmp_path)
    Journal(tmp_path).close()


def test_a_boot_id_cannot_leave_the_directory(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal, pytest.raises(ValueError, match="boot id"):
        journal.begin("../boot")
