"""A publisher with a key signs all it commits, and makes sure that who trusts that key alone gets to its versions."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from torch.optim import Optimizer

from chunkstore.config import load_config
from chunkstore.errors import ConfigError
from chunkstore.store import Store
from manifest.errors import ChainError, Untrusted
from manifest.key_files import generate_key, read_private_key
from manifest.log import VersionLog, open_stream
from manifest.restore import restore
from manifest.schema import Manifest
from manifest.signing import Trust
from manifest.verify import verify_stream
from publisher.config import PublisherConfig
from publisher.group import Meeting
from publisher.publisher import Publisher
from publisher.takeover import empty_version
from tests.publisher.sidecars import sidecar_thread, store_of, write_config
from tests.publisher.zoo import Zoo, adamw, attach, fresh_store, live, published, train


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return generate_key(tmp_path / "a")[0]


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return generate_key(tmp_path / "b")[0]


def trust_of(key: Path) -> Trust:
    return read_private_key(key).trust


def signed_attach(model: Zoo, optimizer: Optimizer, store: Store, key: Path | None) -> Publisher:
    return attach(model, optimizer, store, **({} if key is None else {"signing": {"key_file": str(key)}}))


def step(model: Zoo, optimizer: Optimizer, publisher: Publisher, seed: int) -> Manifest:
    train(model, optimizer, seed)
    commit = publisher.publish(seed).result()
    assert commit is not None
    return commit.manifest


def rebuilt(store: Store, version: int, trust: Trust) -> dict[str, bytes]:
    """The version as who holds nothing and trusts `trust` rebuilds it."""
    log = VersionLog(store, open_stream(store, trust), trust=trust)
    parts: dict[str, bytes] = {}
    for spec, _, _, bits in restore(store, log, version):
        parts[spec.name] = parts.get(spec.name, b"") + bits.tobytes()
    return parts


def truth(publisher: Publisher, model: Zoo) -> dict[str, bytes]:
    return {name: bits.tobytes() for name, bits in live(publisher, model).items()}


def test_everything_is_signed_alternates_and_takeovers_too(key: Path) -> None:
    model, store = Zoo(), fresh_store()
    optimizer = adamw(model)
    for start in range(2):
        with signed_attach(model, optimizer, store, key) as publisher:
            step(model, optimizer, publisher, start)
            publisher.publish(anchor=True).result()
            train(model, optimizer, 10 + start)
            commit = publisher.publish(anchor=True).result()
            assert commit is not None
            assert rebuilt(store, commit.version, trust_of(key)) == truth(publisher, model)
    report = verify_stream(store, trust=trust_of(key))
    assert report.ok, report.problems
    assert (report.versions, report.alternates) == (6, 4)


def test_without_a_key_nothing_is_signed() -> None:
    model, store = Zoo(), fresh_store()
    optimizer = adamw(model)
    with signed_attach(model, optimizer, store, None) as publisher:
        assert step(model, optimizer, publisher, 1).signature is None


def test_a_restart_with_the_same_key_goes_on_with_small_versions(key: Path) -> None:
    model, store = Zoo(), fresh_store()
    optimizer = adamw(model)
    with signed_attach(model, optimizer, store, key) as publisher:
        step(model, optimizer, publisher, 1)
    with signed_attach(model, optimizer, store, key) as publisher:
        assert step(model, optimizer, publisher, 2).kind == "delta"


@pytest.mark.parametrize("before", ["unsigned", "signed by another"])
def test_who_trusts_the_new_key_alone_gets_an_anchor(before: str, key: Path, other: Path) -> None:
    model, store = Zoo(), fresh_store()
    optimizer = adamw(model)
    with signed_attach(model, optimizer, store, None if before == "unsigned" else other) as publisher:
        step(model, optimizer, publisher, 1)
    with signed_attach(model, optimizer, store, key):
        pass  # killed before it had anything to publish: the next start must not take its empty version for ground
    with signed_attach(model, optimizer, store, key) as publisher:
        with pytest.raises((ChainError, Untrusted)):
            rebuilt(store, publisher.version, trust_of(key))
        assert step(model, optimizer, publisher, 2).kind == "anchor"
        delta = step(model, optimizer, publisher, 3)
        assert delta.kind == "delta"
        assert rebuilt(store, delta.version, trust_of(key)) == truth(publisher, model)
        trusting_both = Trust([read_private_key(k).public for k in (key, other)])
        if before != "unsigned":
            assert verify_stream(store, trust=trusting_both).ok
    found = published(store, 5)
    assert {name: bits.tobytes() for name, bits in found.items()} == truth(publisher, model)


def test_weights_that_a_stranger_has_committed_are_not_built_upon(key: Path) -> None:
    """A consistent version by somebody who can write but not sign. The publisher that takes over signs none of it."""
    model, store = Zoo(), fresh_store()
    optimizer = adamw(model)
    with signed_attach(model, optimizer, store, key) as publisher:
        last = step(model, optimizer, publisher, 1)
    log = VersionLog(store, open_stream(store))
    stranger = empty_version(last, last.epoch + 1, b"stranger" * 2)
    assert log.commit(stranger.model_copy(update={"signature": last.signature})).won
    with signed_attach(model, optimizer, store, key) as publisher:
        anchor = step(model, optimizer, publisher, 2)
        assert anchor.kind == "anchor"
        assert rebuilt(store, anchor.version, trust_of(key)) == truth(publisher, model)
    assert [p.kind for p in verify_stream(store, trust=trust_of(key)).problems] == ["untrusted"]


def test_a_key_that_cannot_be_used_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    model, store = Zoo(), fresh_store()
    threads = threading.active_count()
    with pytest.raises(ConfigError, match="cannot be read"):
        signed_attach(model, adamw(model), store, tmp_path / "none")
    assert not list(store.list_after(""))
    assert threading.active_count() == threads


def test_with_a_spool_the_trainer_needs_no_key(key: Path, tmp_path: Path) -> None:
    more = "inference_dtype: bfloat16\nsigning: {key_file: '%s'}"
    config = write_config(tmp_path, more=more % key)
    mine = load_config(config, PublisherConfig).model_copy(
        update={"signing": PublisherConfig.model_validate({"store": {"url": "/x"}, "inference_dtype": "bfloat16",
                                                           "signing": {"key_file": "/none"}}).signing}
    )  # fmt: skip
    model = Zoo()
    optimizer = adamw(model)
    with sidecar_thread(config), Publisher.attach(optimizer, model, mine) as publisher:
        manifest = step(model, optimizer, publisher, 1)
        assert rebuilt(store_of(config), manifest.version, trust_of(key)) == truth(publisher, model)


def test_ranks_with_other_keys_do_not_meet() -> None:
    """Whatever one of them signed, the other would not believe."""
    first = Meeting("memory://a", bytes(16), "ed25519:one")
    first.check(Meeting("memory://b", bytes(16), "ed25519:one"))
    for key in ("ed25519:two", None):
        with pytest.raises(ConfigError, match="writer 0 signs with ed25519:one, this one with"):
            first.check(replace(first, key=key))
    with pytest.raises(ConfigError, match="there is no stream"):
        first.check(replace(first, stream=None))
