"""`deltasync store`: show, verify and export over real streams."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from chunkstore.open import StoreConfig, open_store
from chunkstore.posix import PosixStore
from deltasync.cli import main
from deltasync.s3server import BUCKET, CREDENTIALS, EmbeddedS3Server
from manifest.keys import manifest_key
from tests.support.crashes import age
from tests.support.streams import StreamBuilder, random_weights

SHAPES = {"w": (40, 50), "b": (50,)}


@pytest.fixture
def stream(tmp_path: Path) -> StreamBuilder:
    """Versions 0 … 2 in `store`: an anchor and two deltas."""
    built = StreamBuilder(PosixStore(tmp_path / "store"), random_weights(SHAPES))
    built.train(steps=2)
    return built


@pytest.fixture
def url(stream: StreamBuilder, tmp_path: Path) -> str:
    return str(tmp_path / "store")


def json_of(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    seen: dict[str, object] = json.loads(capsys.readouterr().out)
    return seen


def test_show_lists_the_log(stream: StreamBuilder, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    stream.alternate(1)
    assert main(["store", "show", url, "--json"]) == 0
    seen = json_of(capsys)
    assert seen["stream"] == stream.log.stream.id.hex()
    assert seen["versions"] == [
        {
            "version": m.version, "kind": m.kind, "base": m.base_version, "epoch": 1, "train_step": m.version,
            "changed": m.stats.changed, "elements": m.stats.elements, "chunks": len(m.chunks), "nbytes": m.nbytes,
            "signer": None, "alternate": m.version == 1,
        }
        for m in stream.manifests
    ]  # fmt: skip
    assert main(["store", "show", url]) == 0
    text = capsys.readouterr().out
    assert f"stream {stream.log.stream.id.hex()} at file://{url}: 3 versions" in text
    assert len(text.splitlines()) == 1 + 1 + 3


def test_show_lists_what_can_be_read_and_fails_by_what_cannot(
    stream: StreamBuilder, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in (1, 77):
        stream.store.put(manifest_key(version), b"garbage")
    assert main(["store", "show", url, "--json"]) == 1
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert [row["version"] for row in document["versions"]] == [0, 2]
    assert [row["version"] for row in document["unreadable"]] == [1, 77]
    assert said.err.startswith("error[manifest_invalid]: ")
    assert main(["store", "show", url]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(": 2 versions")
    assert [line.split(":")[0] for line in lines[-2:]] == [f"version {v} cannot be read" for v in (1, 77)]


def test_show_prints_a_manifest_in_full(
    stream: StreamBuilder, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = stream.manifests[2]
    assert main(["store", "show", url, "--version", "2", "--json"]) == 0
    seen = json_of(capsys)
    assert seen["hash"] == manifest.hash.hex()
    assert seen["root"] == manifest.root.hex()
    assert seen["digests"] == [f"{int(d):016x}" for d in manifest.digest_array]
    assert set(seen) == {"hash", "signer", *manifest.model_dump()}
    assert main(["store", "show", url, "--version", "2"]) == 0
    text = capsys.readouterr().out
    assert manifest.root.hex() in text
    assert manifest.chunks[0].key in text


def test_show_finds_the_alternate(
    stream: StreamBuilder, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", "show", url, "--version", "1", "--alternate"]) == 1
    assert "version 1 has no alternate anchor" in capsys.readouterr().err
    alternate = stream.alternate(1)
    assert main(["store", "show", url, "--version", "1", "--alternate", "--json"]) == 0
    assert json_of(capsys)["hash"] == alternate.hash.hex()


def test_show_of_a_version_that_is_not_there(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "show", url, "--version", "9"]) == 1
    assert "error[object_missing]" in capsys.readouterr().err


@pytest.mark.parametrize("version", [0, 1, 2, None])
def test_export_writes_the_very_bits(
    stream: StreamBuilder, url: str, tmp_path: Path, version: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    chosen = [] if version is None else ["--version", str(version)]
    assert main(["store", "export", *chosen, url, str(target), "--json"]) == 0
    seen = json_of(capsys)
    expected = stream.version if version is None else version
    assert seen == {
        "version": expected, "root": stream.manifests[expected].root.hex(), "directory": str(target),
        "files": ["model.safetensors"], "nbytes": 4100,
    }  # fmt: skip
    with safe_open(target / "model.safetensors", "pt") as file:
        for name, tensor in stream.weights[expected].items():
            bits = file.get_tensor(name).view(torch.uint16).numpy()
            np.testing.assert_array_equal(bits, tensor.bits)


def test_export_fills_an_empty_folder_that_somebody_stands_in(
    stream: StreamBuilder, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    inode = Path().stat().st_ino
    assert main(["store", "export", url, "."]) == 0
    assert [path.name for path in Path().iterdir()] == ["model.safetensors"]
    assert (tmp_path / "out").stat().st_ino == inode
    with safe_open("model.safetensors", "pt") as file:
        assert set(file.keys()) == set(stream.weights[2])


def test_export_of_a_damaged_chunk_leaves_an_empty_folder_empty(
    stream: StreamBuilder, url: str, tmp_path: Path
) -> None:
    stream.store.delete(stream.manifests[1].chunks[0].key)
    (tmp_path / "out").mkdir()
    assert main(["store", "export", url, str(tmp_path / "out")]) == 1
    assert list((tmp_path / "out").iterdir()) == []


def test_export_refuses_a_folder_with_something_in_it(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    assert main(["store", "export", url, str(tmp_path / "out")]) == 1
    assert "is not an empty directory" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_export_of_a_damaged_chunk_leaves_nothing(
    stream: StreamBuilder, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = stream.manifests[1].chunks[0].key
    data = stream.store.get(key, limit=1 << 20)
    stream.store.put(key, data[:-1])
    assert main(["store", "export", url, str(tmp_path / "out")]) == 1
    assert key in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_verify_of_a_sound_stream(
    stream: StreamBuilder, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stream.alternate(1)
    assert main(["store", "verify", url]) == 0
    assert capsys.readouterr().out.startswith(f"ok: file://{url}: 3 versions, 1 alternate anchor, ")
    assert main(["store", "verify", url, "--json"]) == 0
    seen = json_of(capsys)
    assert (seen["ok"], seen["newest"], seen["problems"], seen["unverified"]) == (True, 2, [], [])


def test_verify_names_what_is_damaged(
    stream: StreamBuilder, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    key = stream.manifests[1].chunks[0].key
    data = bytearray(stream.store.get(key, limit=1 << 20))
    data[-1] ^= 1
    stream.store.put(key, data)
    assert main(["store", "verify", url]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"{key}: corrupt_object: ")
    assert "not verified, for the problems above: versions 1, 2" in out
    assert main(["store", "verify", url, "--json"]) == 1
    seen = json_of(capsys)
    assert seen["ok"] is False
    assert seen["unverified"] == [1, 2]


def test_verify_without_a_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "verify", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("stream.msgpack: object_missing: ")


def test_compact_stores_the_newest_version_whole(
    stream: StreamBuilder, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", "compact", url, "--json"]) == 0
    anchor = stream.log.read_alternate(2)
    assert anchor is not None
    assert json_of(capsys) == {
        "version": 2, "root": anchor.root.hex(), "nbytes": anchor.nbytes, "chunks": [c.key for c in anchor.chunks],
    }  # fmt: skip
    assert main(["store", "compact", url, "--version", "1"]) == 0
    assert capsys.readouterr().out.startswith("version 1 is stored whole: ")
    assert stream.log.alternates() == [1, 2]
    assert main(["store", "verify", url]) == 0


def test_gc_deletes_exactly_what_a_dry_run_lists(
    stream: StreamBuilder, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream.alternate(1)
    age(tmp_path / "store", 3 * 3600)
    assert main(["store", "gc", url, "--dry-run"]) == 0
    assert "deleted 0 objects" in capsys.readouterr().out.replace("would delete", "deleted")
    command = ["store", "gc", url, "--grace", "2h"]
    before = {info.key for info in stream.store.list_after("")}
    assert main([*command, "--dry-run"]) == 0
    dry = capsys.readouterr().out
    assert {info.key for info in stream.store.list_after("")} == before
    assert main([*command, "--dry-run", "--json"]) == 0
    seen = json_of(capsys)
    assert main(command) == 0
    assert capsys.readouterr().out == dry.replace("would delete", "deleted")
    gone = before - {info.key for info in stream.store.list_after("")}
    assert gone == {c.key for c in stream.manifests[0].chunks}
    assert isinstance(seen["objects"], list)
    assert {one["key"] for one in seen["objects"]} == gone
    assert (seen["floor"], seen["needed_from"], seen["dry_run"]) == (1, 2, True)
    assert main(["store", "verify", url]) == 0
    assert "removed by garbage collection: 1 version" in capsys.readouterr().out


@pytest.mark.parametrize("grace", ["0", "-1", "1w", "", "h", "1.5h"])
def test_gc_refuses_a_grace_that_is_none(url: str, grace: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["store", "gc", url, "--grace", grace])


@pytest.mark.parametrize("command", [["verify"], ["export"]], ids=" ".join)
def test_a_terminal_gets_a_progress_bar(
    stream: StreamBuilder, url: str, tmp_path: Path, command: list[str]
) -> None:
    arguments = [*command, url] + ([str(tmp_path / "out")] if command == ["export"] else [])
    shown = run_on_a_terminal([sys.executable, "-m", "deltasync.cli", "store", *arguments])
    assert command[0] in shown
    assert "\x1b[" in shown


def run_on_a_terminal(command: list[str]) -> str:
    """What the command writes to stderr when that is a terminal."""
    ours, theirs = os.openpty()
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "120"},
    ) as process:
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 4096):
                shown += piece
        except OSError:
            pass  # how a Linux terminal says that the other side has closed it
        finally:
            os.close(ours)
        assert process.wait(60) == 0
    return shown.decode()


def test_a_stream_in_s3_is_reached_by_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with EmbeddedS3Server() as server:
        url = f"s3://{BUCKET}/run"
        reach = ["--endpoint-url", server.url, "--path-style", "--region", "us-east-1"]
        config = StoreConfig(url=url, endpoint_url=server.url, region="us-east-1", path_style=True)
        built = StreamBuilder(open_store(config), random_weights(SHAPES))
        built.train()
        assert main(["status", url, *reach, "--json"]) == 0
        assert json_of(capsys)["newest"] == 1
        assert main(["store", "verify", url, *reach]) == 0
        assert main(["store", "export", url, str(tmp_path / "out"), *reach]) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_relative_path_is_taken_from_here(
    stream: StreamBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["store", "show", "store"]) == 0
    assert f"at file://{tmp_path}/store: 3 versions" in capsys.readouterr().out
