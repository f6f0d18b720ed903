"""What a trainer is told about a version is true, whatever the store does after the version was decided."""

import pytest

from chunkstore.errors import AccessDenied, StoreUnavailable
from chunkstore.store import Buffer, Store
from manifest.errors import CommitUnknown
from manifest.keys import alternate_key, manifest_key
from manifest.log import VersionLog, open_stream
from publisher.commit import Commit
from tests.publisher.ranks import Crew
from tests.publisher.zoo import Zoo, adamw, assert_identical, attach, fresh_store, train
from tests.support.faults import FaultStore


def failing(inner: Store, key: str, times: int) -> FaultStore:
    """Loses the replies of so many reads of `key`."""
    left = iter(range(times))

    def after(operation: str, name: str) -> Exception | None:
        lost = (operation, name) == ("get", key) and next(left, None) is not None
        return StoreUnavailable(f"{operation} {name}: the reply was lost") if lost else None

    return FaultStore(inner, after=after)


def test_a_member_that_gets_no_answer_keeps_looking_for_the_outcome() -> None:
    store = fresh_store()
    with Crew(2).attach([store, failing(store, manifest_key(1), 3)]) as crew:
        crew.step(1)
        assert crew.commit(1).version == 1
        crew.assert_published(store, 1)


def test_a_member_that_never_gets_an_answer_does_not_say_that_the_version_failed() -> None:
    store = fresh_store()
    member = failing(store, manifest_key(1), 1000)
    with Crew(2).attach([store, member], writers_timeout=1.0) as crew:
        crew.step(1)
        first, second = crew.publish(1)
        assert isinstance(first, Commit)
        assert isinstance(second, CommitUnknown)
        assert "the reply was lost" in second.message
        member._after = lambda operation, key: None
        crew.step(2)
        assert crew.commit(2).version == 2
        crew.assert_published(store, 2)


@pytest.mark.parametrize("error", [StoreUnavailable("503"), AccessDenied("403")])
def test_an_anchor_that_fails_does_not_unsay_its_version(error: Exception) -> None:
    inner, refused = fresh_store(), {alternate_key(1)}
    store = FaultStore(
        inner, before=lambda operation, key: error if operation != "list" and key in refused else None
    )
    model = Zoo()
    optimizer = adamw(model)
    with attach(model, optimizer, store) as publisher:
        train(model, optimizer)
        commit = publisher.publish(anchor=True).result()
        assert commit is not None
        assert (commit.version, commit.anchored) == (1, False)
        log = VersionLog(inner, open_stream(inner))
        assert log.alternates() == []
        refused.clear()
        again = publisher.publish(anchor=True).result()
        assert again is not None
        assert (again.version, again.anchored) == (1, True)
        assert log.alternates() == [1]


def test_an_unknown_commit_stays_unknown_where_the_store_then_denies_the_next_try() -> None:
    """The first manifest may still be on its way: other bytes under its version would lose to it."""
    inner = fresh_store()
    late: list[bytes] = []

    class Gateway(FaultStore):
        answer: Exception | None = None

        def put_if_absent(self, key: str, data: Buffer) -> bool:
            if key != manifest_key(1) or self.answer is None:
                return super().put_if_absent(key, data)
            late.append(bytes(data))
            raise self.answer

    store = Gateway(inner)
    model = Zoo()
    optimizer = adamw(model)
    with attach(model, optimizer, store) as publisher:
        store.answer = StoreUnavailable("timed out")
        train(model, optimizer)
        with pytest.raises(CommitUnknown):
            publisher.publish().result()
        store.answer = AccessDenied("the credentials have expired")
        train(model, optimizer, 1)
        with pytest.raises(CommitUnknown):
            publisher.publish()
        assert inner.put_if_absent(manifest_key(1), late[0])
        store.answer = None
        commit = publisher.publish().result()
        assert commit is not None
        assert commit.version == 2
        assert_identical(publisher, model, inner, 2)
