"""The folder that `deltasync demo --keep` names."""

from pathlib import Path

import pytest

from deltasync.cli import main


@pytest.mark.parametrize("name", ["file", "file/below", "full"])
def test_a_folder_that_cannot_be_used_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    keep = tmp_path / name
    assert main(["demo", "--model", "tiny", "--keep", str(keep)]) == 1
    message, hint = capsys.readouterr().err.splitlines()
    assert message.startswith(f"error[config]: --keep {keep} ")
    assert hint.startswith("hint: name a ")
    assert (tmp_path / "full" / "mine").exists()
