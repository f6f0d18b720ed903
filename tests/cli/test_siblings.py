"""`import deltasync` notices when another package answers to the name of one of its siblings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deltasync._siblings import SIBLINGS

ROOT = Path(__file__).resolve().parents[2]


def import_deltasync(
    pythonpath: list[Path], cwd: Path, statement: str = "import deltasync"
) -> tuple[int, str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, pythonpath))}
    done = subprocess.run(
        [sys.executable, "-c", statement],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


def test_our_own_siblings_are_accepted(tmp_path: Path) -> None:
    assert import_deltasync([], tmp_path) == (0, "")


@pytest.mark.parametrize("name", SIBLINGS)
def test_a_shadowing_package_is_named_with_its_path(tmp_path: Path, name: str) -> None:
    other = tmp_path / "other" / name
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    code, stderr = import_deltasync([other.parent], tmp_path)
    assert code == 1
    assert f"package '{name}' is shadowed by {other}: expected {ROOT / name}" in stderr.splitlines()[-1]


def test_a_shadowing_module_is_named_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "manifest.py").write_text("")
    code, stderr = import_deltasync([tmp_path], tmp_path)
    assert code == 1
    assert f"package 'manifest' is shadowed by {tmp_path / 'manifest.py'}" in stderr


def test_a_package_imported_before_is_noticed(tmp_path: Path) -> None:
    other = tmp_path / "manifest"
    other.mkdir()
    (other / "__init__.py").write_text("")
    statement = "import sys, manifest; sys.path.remove(''); import deltasync"
    code, stderr = import_deltasync([], tmp_path, statement)
    assert code == 1
    assert f"package 'manifest' is shadowed by {other}" in stderr


def test_a_missing_sibling_is_named(tmp_path: Path) -> None:
    (tmp_path / "deltasync").mkdir()
    for name in ("__init__.py", "_siblings.py"):
        (tmp_path / "deltasync" / name).write_text((ROOT / "deltasync" / name).read_text())
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import deltasync"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    for name in SIBLINGS:
        assert f"package '{name}' is missing: expected {tmp_path / name}" in done.stderr
