"""What every store promises (chunkstore/store.py), asked of each of them, bare and in all decorators."""

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from chunkstore.errors import CorruptObject, InvalidKey, LimitExceeded, ObjectMissing
from chunkstore.open import StoreConfig
from chunkstore.probe import require_put_if_absent, store_clock
from chunkstore.store import MAX_KEY, Buffer, Store
from tests.support.race import race

PROPERTY = settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
REFUSED_KEYS = [
    "", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/.", ".tmp-1", "a/.hidden", "a b", "a\\b", "a\0b", "é",
    "a\n", "a:b", "x" * (MAX_KEY + 1),
]  # fmt: skip

# Few characters around "/" (0x2f) in ASCII order, so that names with and without a folder meet in every order.
segments = st.text("-./0a", min_size=1, max_size=3).map(lambda text: "k" + text.replace("/", "_"))
keys = st.lists(segments, min_size=1, max_size=3).map("/".join)


def empty(store: Store) -> None:
    """Between the examples of a property: making a new store each time is slow for S3."""
    for info in list(store.list_after("")):
        store.delete(info.key)


def without_nesting(found: set[str]) -> list[str]:
    """Drop keys that lie above others: a file system cannot hold both, and no key of a stream does that."""
    return sorted(key for key in found if not any(other.startswith(key + "/") for other in found))


@pytest.mark.parametrize("size", [0, 1, 70_000, 9 << 20], ids=["empty", "byte", "small", "large"])
def test_what_is_put_is_what_is_read(store: Store, size: int) -> None:
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    store.put("a/put", data)
    assert store.put_if_absent("a/created", data)
    assert store.get("a/put", limit=size) == data
    assert store.get("a/created", limit=size + 1) == data
    info = store.head("a/created")
    assert info is not None
    assert (info.key, info.size) == ("a/created", size)
    assert abs(info.modified - time.time()) < 60


def test_every_kind_of_buffer_can_be_written(store: Store) -> None:
    buffers: dict[str, Buffer] = {"a": bytearray(b"xyz"), "b": memoryview(b"0xyz0")[1:4]}
    for key, data in buffers.items():
        store.put(key, data)
        assert store.put_if_absent(key + "2", data)
        assert store.get(key, limit=3) == store.get(key + "2", limit=3) == b"xyz"


def test_a_larger_object_than_the_limit_is_refused(store: Store) -> None:
    store.put("large", bytes(1001))
    with pytest.raises(LimitExceeded, match=r"large: .*1001"):
        store.get("large", limit=1000)
    assert len(store.get("large", limit=1001)) == 1001


def test_ranges(store: Store) -> None:
    """FIELD_REPORTS: vmlx-swift#217, a part past the end is an error and never zeros."""
    store.put("r", b"0123456789")
    assert store.get_range("r", 0, 10) == b"0123456789"
    assert store.get_range("r", 3, 4) == b"3456"
    assert store.get_range("r", 9, 1) == b"9"
    assert store.get_range("r", 10, 0) == store.get_range("r", 0, 0) == b""
    for start, length in [(0, 11), (9, 2), (10, 1), (50, 3), (11, 0)]:
        with pytest.raises(CorruptObject, match="r: the object ends"):
            store.get_range("r", start, length)


def test_a_missing_object_is_named(store: Store) -> None:
    store.put("here/too", b"")
    assert store.head("gone") is None
    assert store.head("here") is None
    calls: dict[str, Callable[[], object]] = {
        "get .*/gone": lambda: store.get("gone", limit=1),
        "get_range .*/gone": lambda: store.get_range("gone", 0, 1),
        "get_range .*/gone:": lambda: store.get_range("gone", 0, 0),
        "get .*/here": lambda: store.get("here", limit=1),
    }
    for message, call in calls.items():
        with pytest.raises(ObjectMissing, match=message):
            call()
    store.delete("gone")
    assert list(store.list_after("nothing/")) == []


def test_a_put_replaces_the_whole_object(store: Store) -> None:
    """FIELD_REPORTS: airflow#60223, mountpoint-s3#785: the same key and size is read anew, not cached."""
    for data in (b"first version", b"other version", b"short", b"longer than before"):
        store.put("status", data)
        info = store.head("status")
        assert store.get("status", limit=100) == data
        assert info is not None
        assert info.size == len(data)
    assert [found.key for found in store.list_after("")] == ["status"]


def test_put_if_absent_keeps_the_first(store: Store) -> None:
    assert store.put_if_absent("versions/0", b"first") is True
    assert store.put_if_absent("versions/0", b"second") is False
    assert store.put_if_absent("versions/0", b"first") is False
    assert store.get("versions/0", limit=10) == b"first"
    assert store.put_if_absent("versions/1", b"") is True
    assert store.put_if_absent("versions/1", b"not empty") is False
    assert store.get("versions/1", limit=10) == b""
    assert [found.key for found in store.list_after("")] == ["versions/0", "versions/1"]


def test_a_deleted_key_is_free_again(store: Store) -> None:
    store.put("a/b/c", b"1")
    store.delete("a/b/c")
    store.delete("a/b/c")
    assert store.head("a/b/c") is None
    assert list(store.list_after("")) == []
    assert store.put_if_absent("a/b/c", b"2")
    assert store.get("a/b/c", limit=1) == b"2"


def test_one_of_many_threads_creates_a_key(store: Store) -> None:
    won: list[int] = []
    start = threading.Barrier(8)

    def create(writer: int) -> None:
        start.wait()
        if store.put_if_absent("shared/key", bytes([writer])):
            won.append(writer)

    threads = [threading.Thread(target=create, args=(writer,)) for writer in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [store.get("shared/key", limit=1)] == [bytes([writer]) for writer in won]


@PROPERTY
@given(st.sets(keys, max_size=7), st.data())
def test_listing_is_the_sorted_keys_after(
    store: Store, request: pytest.FixtureRequest, found: set[str], data: st.DataObject
) -> None:
    """Ascending by full key, for every prefix and starting point, whether or not they are keys."""
    held = without_nesting(found)
    cuts = ["", "k", "k/", "kz", "z", *held, *(key[:-1] for key in held), *(key + "/" for key in held)]
    prefix = data.draw(st.sampled_from([cut for cut in cuts if not cut.endswith(("/.", "//"))]))
    after = data.draw(st.sampled_from(cuts))
    if "seaweedfs" in request.node.name:
        # It lists folder by folder, `k/0` before `k-0`, which S3Store refuses. No stream has such keys.
        names = sorted([*held, after])
        assume(names == sorted(names, key=lambda name: name.split("/")))
    try:
        for key in held:
            store.put(key, key.encode())
        listed = list(store.list_after(prefix, after))
    finally:
        for key in held:
            store.delete(key)
    assert [info.key for info in listed] == [key for key in held if key.startswith(prefix) and key > after]
    assert [info.size for info in listed] == [len(info.key) for info in listed]


def test_a_listing_may_start_at_its_prefix_or_outside_it(store: Store) -> None:
    for key in ("b/k", "b/k0", "b/k1", "c"):
        store.put(key, b"")
    for after, listed in {"b/k": ["b/k0", "b/k1"], "a": ["b/k", "b/k0", "b/k1"], "b/l": [], "c": []}.items():
        assert [info.key for info in store.list_after("b/k", after)] == listed, after


def test_listings_are_lazy_and_never_stale(store: Store) -> None:
    """FIELD_REPORTS: s3fs#851, #879, #424: what was written after a listing is in the next one."""
    for number in range(7):
        store.put(f"versions/{number:02}", b"")
    listing = store.list_after("versions/", "versions/02")
    assert next(listing).key == "versions/03"
    assert store.put_if_absent("versions/07", b"")
    store.delete("versions/00")
    assert [info.key for info in listing][:3] == ["versions/04", "versions/05", "versions/06"]
    assert [info.key for info in store.list_after("versions/")] == [f"versions/{n:02}" for n in range(1, 8)]


operations = st.lists(
    st.tuples(st.sampled_from(["put", "put_if_absent", "delete", "get", "head"]), st.sampled_from("abc")),
    max_size=12,
)


@PROPERTY
@given(operations)
def test_any_sequence_behaves_like_a_dict(store: Store, steps: list[tuple[str, str]]) -> None:
    empty(store)
    model: dict[str, bytes] = {}
    for number, (operation, name) in enumerate(steps):
        key, data = f"d/{name}", bytes([number]) * number
        if operation == "put":
            store.put(key, data)
            model[key] = data
        elif operation == "put_if_absent":
            assert store.put_if_absent(key, data) == (key not in model)
            model.setdefault(key, data)
        elif operation == "delete":
            store.delete(key)
            model.pop(key, None)
        elif operation == "head" or key not in model:
            info = store.head(key)
            assert (None if info is None else info.size) == (len(model[key]) if key in model else None)
        else:
            assert store.get(key, limit=20) == model[key]
    assert [info.key for info in store.list_after("d/")] == sorted(model)


def test_a_key_that_could_leave_the_prefix_is_refused(store: Store) -> None:
    for key in REFUSED_KEYS:
        calls: list[Callable[[], object]] = [
            partial(store.get, key, limit=1),
            partial(store.get_range, key, 0, 1),
            partial(store.get_range, key, 0, 0),
            partial(store.head, key),
            partial(store.put, key, b""),
            partial(store.put_if_absent, key, b""),
            partial(store.delete, key),
        ]
        for call in calls:
            with pytest.raises(InvalidKey):
                call()


def test_a_prefix_that_could_leave_the_store_is_refused(store: Store) -> None:
    for prefix in ("/", "../", "..", "a//", "a/../", ".tmp-", "a b/"):
        with pytest.raises(InvalidKey):
            list(store.list_after(prefix))


def test_whole_objects_are_no_temporaries(store: Store) -> None:
    store.put("a/b", b"")
    assert store.put_if_absent("a/c", b"")
    assert list(store.temporaries()) == []
    for name in ("a/b", "a/.tmp-1/../b", "../.tmp-1", "/.tmp-1"):
        with pytest.raises(InvalidKey):
            store.delete_temporary(name)
    assert [found.key for found in store.list_after("")] == ["a/b", "a/c"]


def test_the_stores_clock_goes_by_what_it_says_of_objects(store: Store) -> None:
    before = time.time()
    assert before - 2 <= store_clock(store) <= time.time() + 2
    assert list(store.list_after("")) == []


def test_the_probe_accepts_it_and_leaves_nothing(store: Store) -> None:
    require_put_if_absent(store)
    assert list(store.list_after("")) == []


@pytest.mark.parametrize("kind", ["posix", "s3"])
def test_two_processes_racing_for_200_keys(kind: str, config_of: Callable[[str], StoreConfig]) -> None:
    raced = race(config_of(kind), [f"versions/{number:020}" for number in range(200)])
    assert [one for one in raced if not one.fair] == []
