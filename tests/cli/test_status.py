"""`deltasync status`: what it says of versions, chain and subscribers, and its exit code."""

import json
import os
import time
from pathlib import Path

import pytest

from chunkstore.memory import MemoryStore
from chunkstore.metrics import MetricsStore, StoreMetrics
from chunkstore.posix import PosixStore
from deltasync.cli import main
from deltasync.overview import ColdStart, overview
from manifest.keys import catalog_key, chunk_key, manifest_key, status_key
from manifest.lease import MAX_STATUS_BYTES
from manifest.log import VersionLog, create_or_open_stream, put_catalog
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


def report(
    built: StreamBuilder, name: str, applied: int | None, seen: float = NOW - 4, **changes: object
) -> None:
    """Write a subscriber's status object, at `seen` by the store's clock."""
    fields: dict[str, object] = {
        "id": name, "stream": built.log.stream.id.hex(), "boot_id": "boot", "state": "serving", "reason": None,
        "applied_version": applied, "applied_root": None, "applied_at": NOW - 5, "newest_version": built.version,
        "needs_version": applied, "updated_at": NOW - 4, "renew_seconds": 30.0, "last_error": None, "refused": [],
        "host": "node-1", "release": "0.1.0",
    }  # fmt: skip
    status = SubscriberStatus.model_validate(fields | changes)
    built.store.put(status_key(name), status.model_dump_json().encode())
    if isinstance(built.store, PosixStore):  # in memory it was seen now
        date(built, status_key(name), seen)


def date(built: StreamBuilder, key: str, at: float) -> None:
    """Let an object have been written at `at` by the store's clock."""
    os.utime(f"{built.store.url.removeprefix('file://')}/{key}", (at, at))


def test_versions_sizes_and_chain(stream: StreamBuilder) -> None:
    seen = overview(stream.store, NOW)
    assert (seen.newest, seen.epoch, seen.tensors, seen.elements) == (3, 1, 2, 2050)
    assert seen.dense_bytes == 4100
    assert [row.nbytes for row in seen.versions] == [m.nbytes for m in reversed(stream.manifests)]
    assert [row.kind for row in seen.versions] == ["delta", "delta", "delta", "anchor"]
    first, total = stream.manifests[0].nbytes, sum(m.nbytes for m in stream.manifests)
    assert seen.cold_start == ColdStart(0, first, 4, total, reference=False)
    assert (seen.anchors, seen.chain_problem, seen.problems()) == ((0,), None, [])


def test_an_alternate_anchor_shortens_the_cold_start(stream: StreamBuilder) -> None:
    alternate = stream.alternate(2)
    seen = overview(stream.store, NOW)
    assert [row.alternate for row in seen.versions] == [False, True, False, False]
    total = alternate.nbytes + stream.manifests[3].nbytes
    assert seen.cold_start == ColdStart(2, alternate.nbytes, 2, total, reference=False)
    assert seen.anchors == (0, 2)


def test_only_the_newest_versions_are_listed(stream: StreamBuilder) -> None:
    stream.train(steps=12)
    assert [row.version for row in overview(stream.store, NOW).versions] == list(range(15, 5, -1))
    assert [row.version for row in overview(stream.store, NOW, shown=3).versions] == [15, 14, 13]


def test_a_broken_chain_is_reported_not_raised(stream: StreamBuilder) -> None:
    stream.store.delete("versions/00000000000000000001")
    seen = overview(stream.store, NOW)
    assert seen.cold_start is None
    assert "version 1" in (seen.chain_problem or "")
    assert [row.version for row in seen.versions] == [3, 2, 0]
    (problem,) = seen.problems()
    assert problem.startswith("a new subscriber cannot start: there is no verified path")


def test_a_catalog_that_is_gone_is_reported_not_raised(
    stream: StreamBuilder, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stream.store.delete(catalog_key(stream.catalog.hash))
    assert main(["status", str(tmp_path), "--max-lag", "9"]) == 1
    text = capsys.readouterr().out
    assert "its catalog cannot be read" in text
    assert catalog_key(stream.catalog.hash) in text


def test_a_takeover_is_called_so_and_opens_an_epoch(stream: StreamBuilder) -> None:
    stream.takeover(b"another-publishr")
    seen = overview(stream.store, NOW)
    assert (seen.epoch, seen.publisher) == (2, b"another-publishr".hex())
    assert [(row.epoch, row.takeover) for row in seen.versions][:2] == [(2, True), (1, False)]


def test_a_stream_whose_version_0_is_a_reference_is_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    built = StreamBuilder(MemoryStore(), random_weights(SHAPES))
    store = PosixStore(tmp_path)
    log = VersionLog(store, create_or_open_stream(store))
    put_catalog(store, built.catalog)
    first = built.manifests[0].model_copy(update={"stream": log.stream.id, "kind": "reference", "chunks": []})
    assert log.commit(first).won
    seen = overview(store, NOW)
    assert (seen.cold_start, seen.chain_problem, seen.problems()) == (
        ColdStart(0, 0, 1, 0, reference=True),
        None,
        [],
    )
    assert main(["status", str(tmp_path), "--max-lag", "0"]) == 0
    assert "starts from the checkpoint that version 0 refers to (base_checkpoint)" in capsys.readouterr().out


def test_strays_break_nothing_and_are_named(
    stream: StreamBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(stream, "current", 3, seen=time.time())
    names = ["versions/backup", "versions/00000000000000000007.bak", "versions/old/00000000000000000001"]
    for key in [*names, manifest_key(8), manifest_key(10**20 - 1)]:
        stream.store.put(key, b"garbage")
    seen = overview(stream.store, NOW)
    assert (seen.newest, set(seen.strays)) == (3, set(names))
    assert [refused.version for refused in seen.refused] == [8, 10**20 - 1]
    assert [row.lag_versions for row in seen.subscribers] == [0]
    assert main(["status", str(tmp_path), "--max-lag", "0"]) == 1
    text = capsys.readouterr().out
    assert all(key in text for key in [*names, manifest_key(8), manifest_key(10**20 - 1)])
    assert "5 problems:" in text


def test_lag_of_each_subscriber(stream: StreamBuilder) -> None:
    for version in range(4):  # the store's clock counts, not the publisher's
        date(stream, manifest_key(version), NOW - 50 + version)
    report(stream, "current", 3)
    report(stream, "late", 1)
    report(stream, "new", None, state="held", reason="no verified version has been loaded yet")
    rows = {row.status.id: row for row in overview(stream.store, NOW).subscribers}
    assert (rows["current"].lag_versions, rows["current"].lag_seconds) == (0, 0.0)
    assert (rows["late"].lag_versions, rows["late"].lag_seconds) == (2, 48.0)
    assert (rows["new"].lag_versions, rows["new"].lag_seconds) == (4, 50.0)
    assert rows["late"].silent_seconds == 4.0
    assert overview(stream.store, NOW).problems(max_lag=1) == [
        "new serves nothing: no verified version has been loaded yet",
        "late is 2 versions behind",
    ]


def test_a_subscriber_that_stopped_renewing_is_silent(stream: StreamBuilder) -> None:
    """By the store's clock: its own may be hours off."""
    for name, ago, state in (("dead", 91, "serving"), ("slow", 89, "serving"), ("off", 9999, "stopped")):
        report(stream, name, 3, state=state, updated_at=NOW + 7200, seen=NOW - ago)
    rows = {row.status.id: row for row in overview(stream.store, NOW).subscribers}
    assert {name: row.silent for name, row in rows.items()} == {"dead": True, "slow": False, "off": False}
    assert {name: row.within(0) for name, row in rows.items()} == {"dead": False, "slow": True, "off": True}
    assert [row.faults for row in rows.values()] == [["has been silent for 91 s"], [], []]


def test_one_that_serves_nothing_is_not_well(stream: StreamBuilder) -> None:
    report(stream, "held", 3, state="held", reason="a write failed")
    seen = overview(stream.store, NOW)
    assert seen.problems() == ["held serves nothing: a write failed"]
    assert not seen.subscribers[0].within(9)


def test_refused_versions_are_not_well(stream: StreamBuilder) -> None:
    refused = RefusedVersion(version=3, kind="corrupt_object", message="chunk x is damaged")
    report(stream, "picky", 2, refused=[refused.model_dump()])
    (row,) = overview(stream.store, NOW).subscribers
    assert not row.within(5)


def test_a_status_object_that_does_not_parse_is_named(stream: StreamBuilder) -> None:
    stream.store.put(status_key("vandal"), b'{"id": "vandal"}')
    stream.store.put(status_key("huge"), bytes(MAX_STATUS_BYTES + 1))
    for name in ("vandal", "huge"):
        date(stream, status_key(name), NOW)
    report(stream, "stranger", 3, stream="00" * 16)
    report(stream, "fine", 3)
    seen = overview(stream.store, NOW)
    keys = ["subscribers/huge.json", "subscribers/stranger.json", "subscribers/vandal.json"]
    assert list(seen.unreadable) == keys
    assert seen.problems() == [f"{key} is no status object of this stream" for key in keys]
    assert [row.status.id for row in seen.subscribers] == ["fine"]


def test_text_and_json_say_the_same(
    stream: StreamBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = {"kind": "store_unavailable", "action": "retry", "message": "no route", "hint": "", "at": NOW}
    report(stream, "late", 1, seen=time.time(), last_error=error)
    assert main(["status", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert main(["status", str(tmp_path), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert f"stream   {seen['stream']} at {seen['url']}" in text
    assert "newest   version 3, epoch 1, publisher" in text
    assert "late, last error: error[store_unavailable]: no route" in text
    assert "no problems" in text
    assert seen["problems"] == []
    assert seen["newest"] == 3
    assert [row["nbytes"] for row in seen["versions"]] == [m.nbytes for m in reversed(stream.manifests)]
    (subscriber,) = seen["subscribers"]
    assert (subscriber["id"], subscriber["applied_version"], subscriber["lag_versions"]) == ("late", 1, 2)
    assert "late" in text


def test_an_empty_stream_has_a_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    create_or_open_stream(PosixStore(tmp_path))
    assert main(["status", str(tmp_path)]) == 0
    assert "no version is committed yet" in capsys.readouterr().out
    assert main(["status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["newest"] is None


def test_max_lag_decides_the_exit_code(stream: StreamBuilder, tmp_path: Path) -> None:
    report(stream, "late", 1, seen=time.time())
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


def test_hundreds_of_versions_and_fifty_subscribers_stay_readable_and_cheap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrong comes first and is not cut off; of what is well, some is shown. JSON holds everything."""
    url = f"memory://{tmp_path.name}"
    stream = StreamBuilder(MemoryStore.named(tmp_path.name), random_weights({"w": (8,)}))
    stream.train(steps=200)
    stream.alternate(150)
    for number in range(50):
        report(stream, f"worker-{number:02}", 200)
    refused = [RefusedVersion(version=199, kind="corrupt_object", action="reseed", message="x is damaged")]
    report(stream, "worker-37", 198, refused=[r.model_dump() for r in refused])
    report(stream, "worker-21", 150)
    error = {"kind": "store_unavailable", "action": "retry", "message": "503", "hint": "", "at": NOW}
    report(stream, "worker-44", 200, last_error=error)
    counts = StoreMetrics()
    seen = overview(MetricsStore(stream.store, counts), time.time())
    assert [row.status.id for row in seen.subscribers][:3] == ["worker-37", "worker-21", "worker-44"]
    made = {operation: stats.calls for operation, stats in counts.snapshot().items()}
    # The stream, a catalog, 52 manifests of the chain and the link before it, one alternate, 50 status objects.
    assert made == {"get": 1 + 1 + 52 + 1 + 50, "list": 4}
    assert main(["status", url, "--max-lag", "10"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 50
    assert max(map(len, lines)) < 200
    assert "worker-37 refuses version 199: error[corrupt_object]: x is damaged" in "\n".join(lines[:10])
    assert "and 40 more that are serving the newest version" in lines
    assert "worker-44, last error: error[store_unavailable]: 503" in lines
    main(["status", url, "--json", "--versions", "300"])
    document = json.loads(capsys.readouterr().out)
    assert (len(document["subscribers"]), len(document["versions"])) == (50, 201)
    assert document["anchors"] == [0, 150]
