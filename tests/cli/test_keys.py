"""Keys and signatures on the command line: `keys generate`, and `--trusted-key` wherever a chain is read."""

import json
import re
from pathlib import Path

import pytest

from chunkstore.config import load_config
from chunkstore.posix import PosixStore
from deltasync.cli import main
from manifest.key_files import read_private_key
from manifest.keys import manifest_key
from subscriber.config import SubscriberConfig
from tests.support.keys import make_signer
from tests.support.streams import StreamBuilder, random_weights

SIGNER, OTHER = make_signer("a"), make_signer("b")
KEY = ["--trusted-key", str(SIGNER.public)]


@pytest.fixture
def stream(tmp_path: Path) -> StreamBuilder:
    built = StreamBuilder(PosixStore(tmp_path / "store"), random_weights({"w": (40, 50)}), signer=SIGNER)
    built.train(steps=2)
    built.alternate(1)
    return built


@pytest.fixture
def url(stream: StreamBuilder, tmp_path: Path) -> str:
    return str(tmp_path / "store")


COMMANDS = [
    ["status"],
    ["store", "show"],
    ["store", "show", "--version", "2"],
    ["store", "show", "--version", "1", "--alternate"],
    ["store", "verify"],
    ["store", "export"],
]


def run(command: list[str], url: str, tmp_path: Path, *more: str) -> int:
    """The command with its URL in place, and a folder where it wants one."""
    words = [*command[:2], url] if command[0] == "store" else [*command[:1], url]
    folder = [str(tmp_path / "out")] if "export" in command else []
    return main([*words, *folder, *command[2:], *more])


def test_keys_generate_makes_keys_that_the_configs_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "generate", str(tmp_path / "run")]) == 0
    public = capsys.readouterr().out.splitlines()[-1]
    assert (
        public == (tmp_path / "run.pub").read_text().strip() == str(read_private_key(tmp_path / "run").public)
    )
    config = tmp_path / "subscriber.yaml"
    config.write_text(f"store: {{url: /x}}\ntrust: {{keys: ['{public}']}}\n")
    assert load_config(config, SubscriberConfig).trust is not None
    config = tmp_path / "publisher.yaml"
    config.write_text(
        f"store: {{url: /x}}\ninference_dtype: bfloat16\nsigning: {{key_file: '{tmp_path / 'run'}'}}\n"
    )
    assert main(["check-config", str(config)]) == 0
    capsys.readouterr()
    assert main(["keys", "generate", str(tmp_path / "run")]) == 1
    assert "never overwritten" in capsys.readouterr().err
    assert main(["keys", "generate", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["private_key_file"] == str(tmp_path / "signing.key")


def test_check_config_does_not_show_a_key_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "generate", str(tmp_path / "run")]) == 0
    text = (tmp_path / "run").read_text().strip()
    monkeypatch.setenv("SIGNING_KEY", text)
    config = tmp_path / "publisher.yaml"
    config.write_text("store: {url: /x}\ninference_dtype: bfloat16\nsigning: {key: '${SIGNING_KEY}'}\n")
    assert main(["check-config", str(config), "--json"]) == 0
    assert text.partition(":")[2] not in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_trusted_stream_is_read(command: list[str], url: str, tmp_path: Path) -> None:
    assert run(command, url, tmp_path, *KEY) == 0


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_stream_of_another_key_is_refused(
    command: list[str], url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.pub"
    file.write_text(f"{OTHER.public}\n")
    limit = ["--max-lag", "5"] if command == ["status"] else []
    assert run(command, url, tmp_path, "--trusted-key", str(file), *limit) == 1
    said = capsys.readouterr()
    assert "untrusted" in said.out + said.err
    assert str(SIGNER.public) in said.out + said.err
    assert not (tmp_path / "out").exists()
    assert run(command, url, tmp_path, "--trusted-key", str(file), *KEY) == 0


def test_status_shows_what_is_refused_beside_what_is_followed(
    stream: StreamBuilder, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stream.signer = None
    stream.train(steps=2)
    assert main(["status", url, *KEY]) == 0
    text = capsys.readouterr().out
    assert "newest   version 2," in text
    assert len(re.findall(r"version [34] is refused: error\[untrusted\]: .* is not signed", text)) == 2
    assert main(["status", url, *KEY, "--max-lag", "9"]) == 1
    capsys.readouterr()
    assert main(["status", url, *KEY, "--json"]) == 0
    assert [r["version"] for r in json.loads(capsys.readouterr().out)["refused"]] == [3, 4]
    assert main(["status", url, "--max-lag", "9"]) == 0


def test_status_survives_a_damaged_version(
    stream: StreamBuilder, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stream.store.put(manifest_key(2), b"garbage")
    assert main(["status", url]) == 0
    text = capsys.readouterr().out
    assert "newest   version 1," in text
    assert "version 2 is refused: error[manifest_invalid]" in text


def test_show_names_the_signers(stream: StreamBuilder, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    stream.signer = None
    stream.train()
    assert main(["store", "show", url, "--json"]) == 0
    signers = [row["signer"] for row in json.loads(capsys.readouterr().out)["versions"]]
    assert signers == [str(SIGNER.public)] * 3 + [None]
    assert main(["store", "show", url]) == 0
    assert str(SIGNER.public)[:16] in capsys.readouterr().out


def test_compaction_signs_with_its_own_key_and_only_what_it_trusts(
    stream: StreamBuilder, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "generate", str(tmp_path / "own")]) == 0
    own = str(tmp_path / "own.pub")
    compact = ["store", "compact", url, "--signing-key", str(tmp_path / "own")]
    assert main(compact) == 1  # its own key has signed none of it
    assert main(["store", "compact", url, *KEY]) == 1
    assert "error[config]" in capsys.readouterr().err
    assert main([*compact, *KEY]) == 0
    assert main(["store", "verify", url, *KEY, "--trusted-key", own]) == 0
    assert main(["store", "verify", url, *KEY]) == 1
    stream.signer = None
    stream.train()
    capsys.readouterr()
    assert main([*compact, *KEY]) == 1
    assert "error[untrusted]" in capsys.readouterr().err
    assert main([*compact, *KEY, "--version", "2"]) == 1  # there is one by a key that is not trusted here
    assert "error[untrusted]" in capsys.readouterr().err
    assert main([*compact, *KEY, "--version", "2", "--trusted-key", own]) == 0


def test_a_key_that_is_none_is_said(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", url, "--trusted-key", "no/such/file"]) == 1
    assert "neither a public key nor a file" in capsys.readouterr().err
