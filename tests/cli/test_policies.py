"""The bucket policies of docs/security.md, enforced against the running code: enough for it, and no grant unused."""

import asyncio
import os
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chunkstore import qualify
from chunkstore.errors import AccessDenied, DeltasyncError
from chunkstore.open import StoreConfig, open_store
from chunkstore.store import Store
from deltasync.cli import main
from deltasync.s3server import BUCKET, CREDENTIALS, EmbeddedS3Server
from manifest.board import Board
from manifest.collect import delete_garbage
from manifest.gc import Doomed, Reason
from manifest.keys import attempt_key, chunk_key, manifest_key, part_key, status_key
from manifest.log import open_stream
from manifest.settle import Patience
from subscriber.config import SubscriberConfig
from subscriber.fleet import Fleet
from subscriber.torch_engine import TorchEngine
from tests.manifest.test_parts import LAYOUT, a_call, a_part
from tests.publisher.zoo import Zoo, adamw, attach, train
from tests.subscriber.parts import differing, module_for, small_weights
from tests.support.iam import Policy, Request, enforcing
from tests.support.streams import StreamBuilder

SECURITY = (Path(__file__).resolve().parents[2] / "docs" / "security.md").read_text()
DOCUMENTED = dict(re.findall(r"^```json (\w+)\n(.*?)^```$", SECURITY, flags=re.MULTILINE | re.DOTALL))
ID = "node-1"


class World:
    """One stream's prefix in the embedded server: `root` may do everything there."""

    def __init__(self, server: EmbeddedS3Server, tmp_path: Path) -> None:
        self.prefix = f"runs/{uuid.uuid4().hex}"
        self.url = f"s3://{BUCKET}/{self.prefix}"
        self.tmp_path = tmp_path
        self.root = self.store(server.url)

    def config(self, endpoint: str) -> StoreConfig:
        return StoreConfig(url=self.url, endpoint_url=endpoint, path_style=True)

    def store(self, endpoint: str) -> Store:
        return open_store(self.config(endpoint))

    def policy(self, name: str) -> Policy:
        return Policy.parse(DOCUMENTED[name], BUCKET=BUCKET, PREFIX=self.prefix, ID=ID)

    def stream(self) -> StreamBuilder:
        """Versions 0 … 2 and an alternate, all by root."""
        builder = StreamBuilder(self.root, small_weights())
        builder.train(steps=2)
        builder.alternate(1)
        return builder


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in (CREDENTIALS | {"NO_PROXY": "127.0.0.1", "AWS_EC2_METADATA_DISABLED": "true"}).items():
        monkeypatch.setenv(name, value)
    with EmbeddedS3Server() as server:
        yield World(server, tmp_path)


@pytest.fixture(autouse=True)
def quick_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qualify, "_RACE_SECONDS", 0.0)
    monkeypatch.setattr(qualify, "_RACED_AT_LEAST", 2)
    monkeypatch.setattr(qualify, "_ROUNDS", 1)
    monkeypatch.setattr(qualify, "_SIZES", (0, 1000))


def publish(world: World, endpoint: str) -> None:
    """Start, versions, anchors on the side, a takeover; compaction; and what several writers say to each other.

    Before them `store check`, which is to be run with these permissions.
    """
    assert main(["store", "check", world.url, "--endpoint-url", endpoint, "--path-style"]) == 0
    model, store = Zoo(), world.store(endpoint)
    optimizer = adamw(model)
    for start in range(2):
        with attach(model, optimizer, store) as publisher:
            train(model, optimizer, start)
            assert publisher.publish(anchor=True).result() is not None
            train(model, optimizer, 10 + start)
            assert publisher.publish().result() is not None
    assert main(["store", "compact", world.url, "--endpoint-url", endpoint, "--path-style"]) == 0
    stream = open_stream(store)
    board = Board(store, stream, LAYOUT, Patience())
    board.call(a_call(stream=stream.id))
    assert board.answer(a_part(stream=stream.id))
    assert board.calls(5, a_call().base)
    assert board.answered(5, a_call().attempt) == {1}


def subscribe(world: World, endpoint: str) -> None:
    """One server, then two; cold, and from version to version."""
    builder = world.stream()
    for names in (("torch",), ("a", "b")):
        config = SubscriberConfig(
            store=world.config(endpoint), id=ID, state_dir=world.tmp_path / "-".join(names), http=None
        )
        engines = {name: TorchEngine(module_for(builder.weights[0])) for name in names}
        for _ in range(2):
            asyncio.run(Fleet(config, engines).run(once=True))
            builder.train()
    written = [info.key for info in world.root.list_after("subscribers/")]
    assert sorted(written) == [status_key(f"{ID}.a"), status_key(f"{ID}.b"), status_key(ID)]


def read(world: World, endpoint: str) -> None:
    builder = world.stream()
    world.root.put(status_key(ID), b"{}")
    options = [world.url, "--endpoint-url", endpoint, "--path-style"]
    assert main(["status", *options]) == 0
    assert main(["store", "show", *options]) == 0
    assert main(["store", "show", *options, "--version", "1", "--alternate"]) == 0
    assert main(["store", "verify", *options]) == 0
    assert main(["store", "export", *options, str(world.tmp_path / "out")]) == 0
    assert builder.version == 2


def collect(world: World, endpoint: str) -> None:
    """The command, and the deletes that nothing here is old enough for."""
    world.stream()
    world.root.put(status_key(ID), b"{}")
    assert main(["store", "gc", world.url, "--endpoint-url", endpoint, "--path-style", "--grace", "1s"]) == 0
    attempt = bytes(16)
    keys = [
        chunk_key(0, attempt, 0, 0),
        part_key(0, attempt, 0),
        attempt_key(0, attempt),
        "probes/x",
        status_key("x"),
    ]
    for key in keys:
        world.root.put(key, b"x")
    delete_garbage(world.store(endpoint), tuple(Doomed(key, 1, Reason.ORPHAN) for key in keys))


RUNS: dict[str, Callable[[World, str], None]] = {
    "publisher": publish,
    "subscriber": subscribe,
    "reader": read,
    "collector": collect,
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_policy_allows_what_the_code_does_and_nothing_that_it_never_does(name: str, world: World) -> None:
    policy = world.policy(name)
    with enforcing(policy) as endpoint:
        RUNS[name](world, endpoint)
    assert policy.denied == []
    assert policy.grants - policy.used == set()


@pytest.mark.parametrize(
    ("name", "action", "key", "context"),
    [
        ("publisher", "PutObject", manifest_key(3), {}),  # unconditional: would overwrite
        ("publisher", "PutObject", "stream.msgpack", {}),
        ("publisher", "DeleteObject", manifest_key(3), {}),
        ("publisher", "DeleteObject", chunk_key(3, bytes(16), 0, 0), {}),
        ("publisher", "PutObject", status_key(ID), {}),
        ("subscriber", "PutObject", manifest_key(3), {"s3:if-none-match": "*"}),
        ("subscriber", "PutObject", chunk_key(3, bytes(16), 0, 0), {}),
        ("subscriber", "PutObject", status_key("node-2"), {}),
        ("subscriber", "PutObject", status_key(f"{ID}0"), {}),
        ("subscriber", "DeleteObject", status_key(ID), {}),
        ("reader", "PutObject", status_key(ID), {}),
        ("reader", "DeleteObject", status_key(ID), {}),
    ],
)
def test_least_privilege(name: str, action: str, key: str, context: dict[str, str], world: World) -> None:
    resource = f"arn:aws:s3:::{BUCKET}/{world.prefix}/{key}"
    assert not world.policy(name).allows(Request(f"s3:{action}", resource, context))


@pytest.mark.parametrize("name", DOCUMENTED)
def test_no_policy_reaches_another_stream(name: str, world: World) -> None:
    policy = world.policy(name)
    for other in (f"{world.prefix}2", "runs/other", "runs"):
        for action in ("GetObject", "PutObject", "DeleteObject"):
            for key in (manifest_key(0), "stream.msgpack", status_key(ID), "probes/x", "chunks/x"):
                request = Request(
                    f"s3:{action}", f"arn:aws:s3:::{BUCKET}/{other}/{key}", {"s3:if-none-match": "*"}
                )
                assert not policy.allows(request)
        listing = Request("s3:ListBucket", f"arn:aws:s3:::{BUCKET}", {"s3:prefix": f"{other}/versions/"})
        assert not policy.allows(listing)
    assert not policy.allows(Request("s3:ListBucket", f"arn:aws:s3:::{BUCKET}", {"s3:prefix": ""}))


def test_a_subscriber_that_may_only_read_follows_all_the_same(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    builder = world.stream()
    policy = world.policy("reader")
    module = module_for(builder.weights[0])
    with enforcing(policy) as endpoint:
        config = SubscriberConfig(store=world.config(endpoint), id=ID, state_dir=world.tmp_path, http=None)
        asyncio.run(Fleet(config, {"torch": TorchEngine(module)}).run(once=True))
    assert not differing(module, builder.weights[2])
    assert {request.resource.rpartition("/")[2] for request in policy.denied} == {f"{ID}.json"}
    warnings = [
        record.message for record in caplog.records if record.message.startswith("status_not_written")
    ]
    assert warnings
    assert all('needs="put under subscribers/"' in warning for warning in warnings)


def test_what_is_not_allowed_really_is_refused(world: World) -> None:
    """So that the tests above can fail."""
    builder = world.stream()
    policy = world.policy("subscriber")
    with enforcing(policy) as endpoint:
        store = world.store(endpoint)
        with pytest.raises(AccessDenied):
            store.put_if_absent(manifest_key(3), b"x")
        with pytest.raises(DeltasyncError):
            StreamBuilder(store, builder.weights[0])
    assert policy.denied
