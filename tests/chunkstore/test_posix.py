"""What is particular to the store in a directory: crashes, durability, full disks, network file systems."""

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from chunkstore.errors import (
    AccessDenied,
    CorruptObject,
    InvalidKey,
    ObjectMissing,
    StoreError,
    StoreFull,
    StoreUnavailable,
    StoreUnsuitable,
)
from chunkstore.posix import TEMPORARY, PosixStore

Fail = Callable[[str, int], None]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "root"


@pytest.fixture
def store(root: Path) -> PosixStore:
    return PosixStore(root)


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Make one function of `os` fail with an errno from now on."""

    def install(function: str, number: int) -> None:
        def failing(*args: object, **kwargs: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, function, failing)

    return install


CALLS: dict[str, Callable[[PosixStore], object]] = {
    "get": lambda store: store.get("a/b", limit=10),
    "get_range": lambda store: store.get_range("a/b", 0, 1),
    "head": lambda store: store.head("a/b"),
    "list": lambda store: list(store.list_after("")),
    "put": lambda store: store.put("a/c", b"x"),
    "put_if_absent": lambda store: store.put_if_absent("a/c", b"x"),
    "delete": lambda store: store.delete("a/b"),
    "temporaries": lambda store: list(store.temporaries()),
}


@pytest.mark.parametrize("met", CALLS)
@pytest.mark.parametrize("call", CALLS)
def test_a_root_that_is_gone_is_told_and_not_made_anew(call: str, met: str, root: Path) -> None:
    """It may be a mount: what were written meanwhile would be in no store, and what is read is not missing."""
    PosixStore(root).put_if_absent("a/b", b"x")
    store = PosixStore(root)
    CALLS[met](store)
    root.rename(root.with_name("elsewhere"))
    for _ in range(2):
        with pytest.raises(AccessDenied, match=f"{store.url} is not there any more"):
            CALLS[call](store)
    assert not root.exists()
    root.with_name("elsewhere").rename(root)
    store.put_if_absent("a/d", b"x")
    assert store.get("a/d", limit=10) == b"x"


@pytest.mark.parametrize("make", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_only_a_write_makes_a_root_and_only_where_it_may(call: str, make: bool, root: Path) -> None:
    store = PosixStore(root, make=make)
    writes = call.startswith("put")
    if not make:
        with pytest.raises(AccessDenied, match=f"{store.url} is not there"):
            CALLS[call](store)
    elif call.startswith("get"):
        with pytest.raises(ObjectMissing):
            CALLS[call](store)
    else:
        CALLS[call](store)
    assert root.exists() == (writes and make)
    root.mkdir(parents=True, exist_ok=True)
    assert store.put_if_absent("a/e", b"x")


def temporaries(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.name.startswith(".")]


def test_a_writer_killed_before_the_link_leaves_only_an_invisible_temporary(
    store: PosixStore, root: Path
) -> None:
    """FIELD_REPORTS: prime-rl#3316: what a dead writer left behind is no object and hinders nobody."""
    program = f"from chunkstore.posix import PosixStore; PosixStore({str(root)!r}).put_if_absent('versions/1', b'x')"
    environment = os.environ | {"DELTASYNC_CRASH_AT": "chunkstore.posix.before_link"}
    died = subprocess.run([sys.executable, "-c", program], env=environment, check=False)
    assert died.returncode == -signal.SIGKILL
    [left] = temporaries(root)
    assert left.parent == root / "versions"
    assert store.head("versions/1") is None
    assert list(store.list_after("")) == list(store.list_after("versions/")) == []
    with pytest.raises(InvalidKey):
        store.get(f"versions/{left.name}", limit=10)
    assert store.put_if_absent("versions/1", b"y")
    assert [info.key for info in store.list_after("")] == ["versions/1"]
    assert store.get("versions/1", limit=1) == b"y"


@pytest.mark.parametrize("method", ["put", "put_if_absent"])
def test_the_file_and_every_directory_above_it_are_flushed(
    store: PosixStore, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    flushed: list[str] = []
    real = os.fsync

    def fsync(file: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        flushed.append("temporary" if path.name.startswith(TEMPORARY) else str(path.relative_to(tmp_path)))
        if path.is_dir():
            assert (root / "a/b/k").exists() == ("temporary" in flushed), (
                "a name appeared before its bytes were safe"
            )
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    getattr(store, method)("a/b/k", b"data")
    written = flushed.index("temporary")
    # Each created directory is flushed into its parent first; the new name, and all above it, after the bytes.
    assert flushed[:written] == [".", "deep", "deep/root", "deep/root/a"]
    assert flushed[written + 1 :] == ["deep/root/a/b", "deep/root/a", "deep/root"]


def test_a_name_that_another_has_just_made_is_flushed_for_it(
    store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever lost builds on the winner's object, which dies with the winner's cache unless somebody flushes it."""
    flushed: list[Path] = []
    real = os.fsync

    def fsync(file: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{file}")))
        real(file)

    assert store.put_if_absent("a/k", b"first")
    monkeypatch.setattr(os, "fsync", fsync)
    assert not store.put_if_absent("a/k", b"second")
    assert flushed[-2:] == [root / "a", root]


@pytest.mark.parametrize("method", ["put", "put_if_absent"])
def test_a_write_that_the_system_cuts_short_is_continued(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """As Linux does beyond 2 GiB, and where a signal comes."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:3]))
    getattr(store, method)("k", b"more than three bytes")
    assert store.get("k", limit=100) == b"more than three bytes"


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, StoreFull),
        (errno.EDQUOT, StoreFull),
        (errno.EACCES, AccessDenied),
        (errno.EPERM, AccessDenied),
        (errno.EROFS, AccessDenied),
        (errno.EIO, StoreUnavailable),
        (errno.ESTALE, StoreUnavailable),
        (errno.ENOTSUP, StoreUnsuitable),
        (errno.EINVAL, StoreUnsuitable),
    ],
)
def test_a_failed_write_is_a_typed_error_and_leaves_nothing(
    store: PosixStore, root: Path, fail: Fail, number: int, expected: type[StoreError]
) -> None:
    store.put("k", b"before")
    fail("fsync", number)
    for write in (store.put, store.put_if_absent):
        with pytest.raises(expected, match=f"{write.__name__} file://.*/root/k") as caught:
            write("k", b"after")
        assert type(caught.value) is expected
    assert temporaries(root) == []
    assert store.get("k", limit=10) == b"before"


@pytest.mark.parametrize("place", ["/proc/no-such-process/stream", "file/stream"])
def test_a_place_that_cannot_be_made_is_refused_with_a_hint(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = PosixStore(tmp_path / place)
    with pytest.raises(StoreError, match=r"put_if_absent file://.*/stream/a: ") as caught:
        store.put_if_absent("a", b"x")
    assert caught.value.hint
    assert not isinstance(caught.value, StoreUnavailable), "nobody repeats this for a minute"


def test_a_full_disk_is_noticed_while_writing(store: PosixStore, root: Path, fail: Fail) -> None:
    fail("write", errno.ENOSPC)
    with pytest.raises(StoreFull, match="garbage collection"):
        store.put_if_absent("k", b"data")
    assert store.head("k") is None
    assert temporaries(root) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_reading_without_permission(store: PosixStore, fail: Fail, number: int) -> None:
    fail("open", number)
    for call in (lambda: store.get("k", limit=1), lambda: store.head("k"), lambda: store.put("k", b"")):
        with pytest.raises(AccessDenied):
            call()


@pytest.mark.parametrize("number", [errno.EEXIST, errno.EIO, errno.ETIMEDOUT])
def test_a_link_whose_reply_was_lost_is_a_win(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """FIELD_REPORTS: aws-sdk-java-v2#6580, hudi#14373, as NFS has it: the repeated link fails on its own success."""
    real = os.link

    def link(source: Path, target: Path) -> None:
        real(source, target)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    assert store.put_if_absent("k", b"mine")
    monkeypatch.undo()
    assert store.put_if_absent("k", b"other") is False
    assert store.get("k", limit=4) == b"mine"


def test_a_link_that_failed_is_an_unknown_outcome_not_a_loss(store: PosixStore, fail: Fail) -> None:
    fail("link", errno.EIO)
    with pytest.raises(StoreUnavailable):
        store.put_if_absent("k", b"data")


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_hard_links_is_refused(store: PosixStore, fail: Fail, number: int) -> None:
    """FIELD_REPORTS: minio#21603, juicefs gateway: no put-if-absent, no publishing."""
    fail("link", number)
    with pytest.raises(StoreUnsuitable, match="hard links"):
        store.put_if_absent("k", b"data")


def test_a_remembered_absence_is_asked_again(
    store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FIELD_REPORTS: prime-rl#3026, Megatron-Bridge#4865: an NFS client that remembers an absence must look.

    The client is imitated: a lookup that failed once fails until the directory has been opened, as close-to-open
    consistency has it.
    """
    store.put("versions/0", b"")
    real = os.open
    absent: set[str] = set()

    def caching_open(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECTORY:
            absent.difference_update({name for name in absent if Path(name).parent == Path(path)})
        elif str(path) in absent:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        try:
            return real(path, flags, mode)
        except FileNotFoundError:
            absent.add(str(path))
            raise

    monkeypatch.setattr(os, "open", caching_open)
    assert store.head("versions/1") is None
    (root / "versions/1").write_bytes(b"by another machine")
    assert str(root / "versions/1") in absent
    assert store.head("versions/1") is not None
    assert store.get("versions/1", limit=100) == b"by another machine"


def test_only_regular_files_are_objects(store: PosixStore, root: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"outside")
    store.put("d/object", b"")
    os.mkfifo(root / "d/pipe")
    (root / "d/link").symlink_to(secret)
    (root / "d/folder").symlink_to(tmp_path)
    with pytest.raises(ObjectMissing):
        store.get("d/pipe", limit=10)
    with pytest.raises(StoreUnsuitable, match="regular file"):
        store.get("d/link", limit=10)
    assert [info.key for info in store.list_after("")] == ["d/object"]


def test_a_truncated_object_reads_short_and_never_as_zeros(store: PosixStore, root: Path) -> None:
    """FIELD_REPORTS: vmlx-swift#217: what is cut off is missing, for whoever checks length and hash to see."""
    store.put("k", b"0123456789")
    os.truncate(root / "k", 4)
    assert store.get("k", limit=10) == b"0123"
    with pytest.raises(CorruptObject, match="ends at byte 4, before byte 10"):
        store.get_range("k", 0, 10)


def test_keys_above_and_below_an_object_are_refused(store: PosixStore) -> None:
    store.put("a/b", b"")
    for write in (store.put, store.put_if_absent):
        for key in ("a", "a/b/c", "a/b/c/d", "x" * 300):
            with pytest.raises(InvalidKey):
                write(key, b"")
    assert [info.key for info in store.list_after("")] == ["a/b"]


def test_deleting_the_last_object_prunes_its_directories(store: PosixStore, root: Path) -> None:
    store.put("chunks/1/a", b"")
    store.put("chunks/2/a", b"")
    store.delete("chunks/1/a")
    assert sorted(path.name for path in (root / "chunks").iterdir()) == ["2"]
    store.delete("chunks/2/a")
    assert list(root.iterdir()) == []
    store.delete("chunks")


def test_writers_and_a_pruning_delete_do_not_disturb_each_other(store: PosixStore) -> None:
    failures: list[Exception] = []

    def churn(key: str) -> None:
        try:
            for _ in range(60):
                assert store.put_if_absent(key, key.encode())
                assert store.get(key, limit=20) == key.encode()
                store.delete(key)
        except (StoreError, AssertionError) as error:
            failures.append(error)

    threads = [threading.Thread(target=churn, args=(f"a/b/{number}",)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert list(store.list_after("")) == []


def test_files_are_readable_by_whom_the_umask_allows(store: PosixStore, root: Path) -> None:
    before = os.umask(0o022)
    try:
        store.put("k", b"")
    finally:
        os.umask(before)
    assert (root / "k").stat().st_mode & 0o777 == 0o644


def test_a_dead_writers_temporary_can_be_found_and_removed(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "root")
    store.put("a/b/kept", b"1")
    left = [tmp_path / "root" / name for name in (".tmp-1", "a/.tmp-2", "c/d/.tmp-3")]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    (tmp_path / "root" / ".tmp-dir").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / ".tmp-4").touch()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    found = list(store.temporaries())
    assert [(info.key, info.size) for info in found] == [(".tmp-1", 4), ("a/.tmp-2", 4), ("c/d/.tmp-3", 4)]
    for info in found:
        store.delete_temporary(info.key)
        store.delete_temporary(info.key)
    assert list(store.temporaries()) == []
    assert not (tmp_path / "root" / "c").exists()
    assert [info.key for info in store.list_after("")] == ["a/b/kept"]


def test_directories_that_a_dead_process_left_empty_can_be_found_and_removed(
    store: PosixStore, root: Path
) -> None:
    store.put("chunks/1/a", b"")
    store.put("chunks/2/a/b", b"")
    program = f"from chunkstore.posix import PosixStore; PosixStore({str(root)!r}).delete('chunks/2/a/b')"
    environment = os.environ | {"DELTASYNC_CRASH_AT": "chunkstore.posix.after_unlink"}
    died = subprocess.run([sys.executable, "-c", program], env=environment, check=False)
    assert died.returncode == -signal.SIGKILL
    assert [info.key for info in store.temporaries()] == ["chunks/2/a/"]
    store.delete_temporary("chunks/2/a/")
    store.delete_temporary("chunks/2/a/")
    store.delete_temporary("chunks/1/")  # somebody has put something there since
    assert sorted(path.name for path in root.rglob("*")) == ["1", "a", "chunks"]
    for name in ("", "/", "../", "chunks/1", "chunks//", "chunks/../1/"):
        with pytest.raises(InvalidKey):
            store.delete_temporary(name)
