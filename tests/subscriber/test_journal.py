"""The journal: atomic, per boot id, one process at a time."""

from pathlib import Path

import pytest

from subscriber.errors import SubscriberBusy
from subscriber.journal import AppliedRecord, ApplyingRecord, Entry, Journal, locked

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


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"format": 2}', b"\xff\xfe"])
def test_a_damaged_journal_means_nothing_is_known(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "journal-boot.json").write_bytes(data)
    journal = Journal(tmp_path)
    journal.begin("boot")
    assert journal.read() is None
    journal.write(ENTRY)
    assert journal.read() == ENTRY


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(SubscriberBusy, match="another subscriber"), locked(tmp_path):
        pytest.fail("locked twice")
    with locked(tmp_path):
        pass


def test_a_boot_id_cannot_leave_the_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="boot id"):
        Journal(tmp_path).begin("../boot")
