"""The command as a whole: quick help, exit codes, errors for people, tracebacks only on demand."""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chunkstore.errors import ConfigError, DeltasyncError
from chunkstore.posix import PosixStore
from chunkstore.words import counted, human_bytes
from deltasync.cli import build_parser, format_error, main, missing_extra
from deltasync.commands._common import table
from tests.support.streams import StreamBuilder, random_weights

SLOW = ("torch", "boto3", "transformers", "rich", "numpy", "pydantic", "fsspec", "asyncio")
COMMANDS = (
    ["demo"], ["publisher", "run"], ["subscriber", "run"], ["status"], ["store", "show"], ["store", "verify"],
    ["store", "export"], ["keys", "generate"], ["check-config"], ["smoke"],
)  # fmt: skip


def deltasync(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deltasync.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_help_imports_nothing_slow() -> None:
    code = (
        "import sys; from deltasync.cli import build_parser; build_parser().format_help();"
        f"print([name for name in {SLOW!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--help"])
    assert stopped.value.code == 0
    assert f"usage: deltasync {' '.join(command)} " in capsys.readouterr().out


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Those of all commands below `parser`, itself included."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers(below)


def test_every_default_is_in_the_help() -> None:
    shown = {
        f"{parser.prog} {action.option_strings[0]}": f"default: {action.default}"
        in parser._get_formatter()._expand_help(action)
        for parser in parsers(build_parser())
        for action in parser._actions
        if action.option_strings and action.default not in (None, False, argparse.SUPPRESS)
    }
    assert len(shown) > 5
    assert [option for option, told in shown.items() if not told] == []


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["store"],
        ["status"],
        ["store", "show", "x", "--alternate"],
        ["status", "x", "--max-lag", "no"],
        ["status", "x", "--max-lag", "-1"],
        *(
            [*command, "--version", version]
            for command in (["store", "show", "x"], ["store", "export", "x", "y"])
            for version in ("-1", "newest", "1.5", "٣", "9" * 21)
        ),
        ["subscriber", "run", "-c", "x", "--until-version", "-1"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2


def test_an_error_is_one_message_and_a_hint(tmp_path: Path) -> None:
    done = deltasync("status", str(tmp_path))
    assert done.returncode == 1
    assert done.stdout == ""
    first, second = done.stderr.splitlines()
    assert (
        first == f"error[object_missing]: there is no stream at file://{tmp_path}: stream.msgpack is missing"
    )
    assert second.startswith("hint: check the URL")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--debug", "status"],
        ["status", "--debug"],
        ["store", "show", "--debug"],
        ["store", "--debug", "show"],
    ],
    ids=" ".join,
)
def test_debug_shows_the_traceback_wherever_it_stands(arguments: list[str], tmp_path: Path) -> None:
    done = deltasync(*arguments, str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert "there is no stream at" in done.stderr.splitlines()[-1]


def test_store_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    done = deltasync("status", str(tmp_path), "--region", "eu-1")
    assert done.returncode == 1
    assert done.stderr.startswith("error[config]: command line: 1 wrong key")
    assert "region: only for s3:// URLs" in done.stderr


def test_a_reader_that_closes_the_pipe_sees_no_traceback(tmp_path: Path) -> None:
    weights = random_weights({f"tensor_{i}": (3,) for i in range(800)})
    StreamBuilder(PosixStore(tmp_path), weights, per_chunk=800)
    command = [
        sys.executable,
        "-m",
        "deltasync.cli",
        "store",
        "show",
        str(tmp_path),
        "--version",
        "0",
        "--json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


def test_ctrl_c_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("deltasync.commands.status.run", interrupted)
    assert main(["status", "anywhere"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("module", ["importlib.metadata", "deltasync.commands.smoke", "chunkstore.open"])
def test_ctrl_c_is_quiet_while_modules_are_imported(module: str, tmp_path: Path) -> None:
    interrupting = f"""
import sys
sys.modules.pop({module!r}, None)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
from deltasync.cli import main
sys.exit(main(["status", {str(tmp_path)!r}]))
"""
    done = subprocess.run([sys.executable, "-c", interrupting], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_errors_without_a_hint_have_one_line() -> None:
    assert format_error(DeltasyncError("it broke")) == "error[error]: it broke"
    assert format_error(ConfigError("a: wrong", hint="mend it")) == "error[config]: a: wrong\nhint: mend it"


def test_the_version_is_the_distribution_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--version"])
    assert capsys.readouterr().out == "deltasync 0.1.0\n"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (2_500_000, "2.5 MB"),
        (7.2e9, "7.2 GB"),
        (3.4e15, "3400.0 TB"),
    ],
)
def test_sizes_for_people(count: float, text: str) -> None:
    assert human_bytes(count) == text


def test_counts_for_people() -> None:
    assert [counted(n, "step") for n in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]


def test_tables_align_to_the_right() -> None:
    rows: list[dict[str, Any]] = [{"version": 1, "kind": "delta"}, {"version": 10, "kind": None}]
    assert table(rows) == "version   kind\n      1  delta\n     10      -"
    assert table([]) == ""


@pytest.mark.parametrize(
    ("module", "command", "extras"),
    [
        ("rich", ["demo"], "'cli'"),
        ("prometheus_client", ["subscriber", "run", "-c", "x.yaml"], "'publisher' or 'subscriber'"),
        ("safetensors", ["publisher", "run", "-c", "x.yaml"], "'cli' or 'publisher' or 'subscriber'"),
    ],
)
def test_a_library_of_an_extra_that_is_not_installed_is_named(
    module: str, command: list[str], extras: str
) -> None:
    code = f"import sys; sys.modules[{module!r}] = None; from deltasync.cli import main; sys.exit(main({command!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"error[config]: this command needs a package that is not installed: {module}\n"
        f"hint: install deltasync with its extra {extras}\n"
    )


def test_a_module_that_is_missing_for_another_reason_is_a_fault() -> None:
    assert missing_extra(ModuleNotFoundError("no", name="publisher.gone")) is None
