"""`deltasync status`: what it says of versions, chain and subscribers, and its exit code."""

import json
from pathlib import Path

import pytest

from chunkstore.posix import PosixStore
from deltasync.cli import main
from deltasync.overview import overview
from manifest.keys import chunk_key, status_key
from subscriber.status import RefusedVersion, SubscriberStatus
from tests.support.streams import StreamBuilder, random_weights

NOW = 1_700_000_100.0
SHAPES = {"w": (40, 50), "b": (50,)}


@pytest.fixture
def stream(tmp_path: Path) -> StreamBuilder:
    """Versions 0 … 3: an anchor and three deltas of about 10 %; created at 1 700 000 000 + version."""
    built = StreamBuilder(PosixStore(tmp_path), random_weights(SHAPES))
    built.train(steps=3)
    return built


def report(stream: StreamBuilder, name: str, applied: int | None, **changes: object) -> None:
    """Write a subscriber's status object."""
    fields: dict[str, object] = {
        "id": name, "stream": stream.log.stream.id.hex(), "boot_id": "boot", "state": "serving", "reason": None,
        "applied_version": applied, "applied_root": None, "applied_at": NOW - 5, "newest_version": stream.version,
        "needs_version": applied, "updated_at": NOW - 4, "renew_seconds": 30.0, "last_error": None, "refused": [],
        "host": "node-1", "release": "0.1.0",
    }  # fmt: skip
    status = SubscriberStatus.model_validate(fields | changes)
    stream.store.put(status_key(name), status.model_dump_json().encode())


def test_versions_sizes_and_chain(stream: StreamBuilder) -> None:
    seen = overview(stream.store, NOW)
    assert (seen.newest, seen.epoch, seen.tensors, seen.elements) == (3, 1, 2, 2050)
    assert seen.dense_bytes == 4100
    assert [row.nbytes for row in seen.versions] == [m.nbytes for m in stream.manifests]
    assert [row.kind for row in seen.versions] == ["anchor", "delta", "delta", "delta"]
    assert seen.cold_start_bytes == sum(m.nbytes for m in stream.manifests)
    assert (seen.cold_start_anchor, seen.cold_start_steps, seen.chain_problem) == (0, 4, None)


def test_an_alternate_anchor_shortens_the_cold_start(stream: StreamBuilder) -> None:
    alternate = stream.alternate(2)
    seen = overview(stream.store, NOW)
    assert [row.alternate for row in seen.versions] == [False, False, True, False]
    assert seen.cold_start_anchor == 2
    assert seen.cold_start_bytes == alternate.nbytes + stream.manifests[3].nbytes


def test_only_the_newest_versions_are_listed(stream: StreamBuilder) -> None:
    stream.train(steps=12)
    assert [row.version for row in overview(stream.store, NOW).versions] == list(range(6, 16))


def test_a_broken_chain_is_reported_not_raised(stream: StreamBuilder) -> None:
    stream.store.delete("versions/00000000000000000001")
    seen = overview(stream.store, NOW)
    assert seen.cold_start_bytes is None
    assert "version 1" in (seen.chain_problem or "")
    assert [row.version for row in seen.versions] == [0, 2, 3]


def test_lag_of_each_subscriber(stream: StreamBuilder) -> None:
    report(stream, "current", 3)
    report(stream, "late", 1)
    report(stream, "new", None, state="held", reason="no verified version has been loaded yet")
    rows = {row.status.id: row for row in overview(stream.store, NOW).subscribers}
    assert (rows["current"].lag_versions, rows["current"].lag_seconds) == (0, 0.0)
    assert (rows["late"].lag_versions, rows["late"].lag_seconds) == (2, NOW - 1_700_000_002)
    assert (rows["new"].lag_versions, rows["new"].lag_seconds) == (4, NOW - 1_700_000_000)
    assert rows["late"].silent_seconds == 4.0


def test_a_subscriber_that_stopped_renewing_is_silent(stream: StreamBuilder) -> None:
    report(stream, "dead", 3, updated_at=NOW - 91)
    report(stream, "slow", 3, updated_at=NOW - 89)
    report(stream, "off", 3, updated_at=NOW - 9999, state="stopped")
    rows = {row.status.id: row for row in overview(stream.store, NOW).subscribers}
    assert {name: row.silent for name, row in rows.items()} == {"dead": True, "slow": False, "off": False}
    assert {name: row.within(0) for name, row in rows.items()} == {"dead": False, "slow": True, "off": True}


def test_refused_versions_are_not_well(stream: StreamBuilder) -> None:
    refused = RefusedVersion(version=3, kind="corrupt_object", message="chunk x is damaged")
    report(stream, "picky", 2, refused=[refused.model_dump()])
    (row,) = overview(stream.store, NOW).subscribers
    assert not row.within(5)


def test_a_status_object_that_does_not_parse_is_named(stream: StreamBuilder) -> None:
    stream.store.put(status_key("vandal"), b'{"id": "vandal"}')
    report(stream, "fine", 3)
    seen = overview(stream.store, NOW)
    assert seen.unreadable == ("subscribers/vandal.json",)
    assert [row.status.id for row in seen.subscribers] == ["fine"]


def test_text_and_json_say_the_same(
    stream: StreamBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(stream, "late", 1)
    assert main(["status", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert main(["status", str(tmp_path), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert f"stream {seen['stream']} at {seen['url']}" in text
    assert "newest version 3, epoch 1" in text
    assert seen["newest"] == 3
    assert [row["nbytes"] for row in seen["versions"]] == [m.nbytes for m in stream.manifests]
    (subscriber,) = seen["subscribers"]
    assert (subscriber["id"], subscriber["applied_version"], subscriber["lag_versions"]) == ("late", 1, 2)
    assert "late" in text


def test_an_empty_stream_has_a_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from manifest.log import create_or_open_stream

    create_or_open_stream(PosixStore(tmp_path))
    assert main(["status", str(tmp_path)]) == 0
    assert "no version is committed yet" in capsys.readouterr().out
    assert main(["status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["newest"] is None


def test_max_lag_decides_the_exit_code(stream: StreamBuilder, tmp_path: Path) -> None:
    import time

    report(stream, "late", 1, updated_at=time.time())
    assert main(["status", str(tmp_path)]) == 0
    assert main(["status", str(tmp_path), "--max-lag", "2"]) == 0
    assert main(["status", str(tmp_path), "--max-lag", "1"]) == 1


def test_no_stream_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error[object_missing]: there is no stream at ")
    assert lines[1].startswith("hint: ")


def test_a_missing_chunk_does_not_matter_to_status(stream: StreamBuilder, tmp_path: Path) -> None:
    stream.store.delete(stream.manifests[1].chunks[0].key)
    assert chunk_key(1, stream.manifests[1].attempt, 0, 0) == stream.manifests[1].chunks[0].key
    assert main(["status", str(tmp_path)]) == 0
