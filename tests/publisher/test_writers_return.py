"""Several writers of one stream that restart, all or some, in another number, or beside others."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from manifest.errors import Fenced
from manifest.history import find_plan
from manifest.key_files import generate_key, read_private_key
from manifest.log import VersionLog, open_stream
from manifest.verify import verify_stream
from publisher.commit import Commit
from publisher.errors import (
    AttemptAbandoned,
    PublisherStopped,
    WriterMissing,
    WriterReplaced,
)
from publisher.publisher import Publisher
from tests.publisher.ranks import Crew, Model, outcomes
from tests.publisher.zoo import fresh_store


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 1), (1, 4)])
def test_another_number_of_writers_continues_the_chain(before: int, after: int) -> None:
    store = fresh_store()
    with Crew(before, run="first").attach(store) as crew:
        crew.step(1)
        crew.commit(1)
    with crew.restart(after, run="second").attach(store) as again:
        assert {p.version for p in again.publishers} == {2}
        assert again.publish(1) == [None] * after
        again.step(2)
        manifest = again.commit(2)
        assert manifest.version == 3
        assert not any(
            section.whole for chunk in manifest.chunks for section in chunk.sections if section.tensor != 0
        )
        again.assert_published(store, 3)
    assert not verify_stream(store).problems


def test_a_signing_group_starts_anew_on_an_unsigned_stream(tmp_path: Path) -> None:
    """Calls, parts and versions are signed; who trusts the key alone gets an anchor."""
    store, key = fresh_store(), generate_key(tmp_path)[0]
    Crew(1, run="unsigned").attach(store).close()
    with Crew(3, run="signed").attach(store, signing={"key_file": str(key)}) as crew:
        crew.step(1)
        assert crew.commit(1).kind == "anchor"
        crew.step(2)
        assert crew.commit(2).kind == "delta"
        trust = read_private_key(key).trust
        log = VersionLog(store, open_stream(store), trust=trust)
        assert len(find_plan(log, None, 3).steps) == 2
        crew.assert_published(store, 3)


def test_a_restart_from_an_older_checkpoint_sends_whole_what_differs() -> None:
    store = fresh_store()
    with Crew(2, run="first").attach(store) as crew:
        crew.step(1)
        crew.commit(1)
        saved = crew.restart(3, run="second")
        with torch.no_grad():  # what is lost by the crash: one tensor only
            next(one for one in crew.ranks[1].owned if one.name == "norm").tensor.add_(1)
        crew.commit(2)
    with saved.attach(store) as again:
        manifest = again.commit(1)
        assert manifest.version == 4
        ids = again.publishers[0].catalog.ids
        assert {s.tensor for c in manifest.chunks for s in c.sections} == {ids["norm"]}
        again.assert_published(store, 4)


def test_one_writer_that_comes_back_alone() -> None:
    """Its weights are those of the last step, but what it had not published is not known to have changed."""
    store = fresh_store()
    with Crew(3).attach(store, writers_timeout=0.7) as crew:
        crew.step(1)
        crew.commit(1)
        crew.step(2)
        told = outcomes(
            [Crew.publishing(p, 2) for i, p in enumerate(crew.publishers) if i != 1]
        )  # it is dead
        assert isinstance(told[0], WriterMissing)
        assert isinstance(told[1], AttemptAbandoned)
        crew.publishers[1] = crew.attaching(1)()
        crew.step(3)
        told = crew.publish(3)
        assert all(isinstance(one, AttemptAbandoned) for one in told)  # its weights are not the base's
        assert crew.commit(4).version == 2
        crew.assert_published(store, 2)


def test_a_coordinator_that_comes_back_alone() -> None:
    """It takes over; the others answer it from within their next publish, and the chain goes on."""
    store = fresh_store()
    with Crew(3).attach(store, writers_timeout=2.0) as crew:
        crew.step(1)
        crew.commit(1)
        crew.step(2)

        def go_on(publisher: Publisher) -> Callable[[], object]:
            return lambda: [outcomes([Crew.publishing(publisher, step)]) for step in (2, 3)]

        back, *_ = outcomes([crew.attaching(0, writers_timeout=5.0), *map(go_on, crew.publishers[1:])])
        crew.publishers[0] = back
        assert back.version == 2
        crew.step(4)
        crew.publish(4)
        crew.step(5)
        told = crew.publish(5)
        assert all(isinstance(one, Commit) for one in told), told
        crew.assert_published(store, told[0].version)
    assert not verify_stream(store).problems


def test_an_old_group_is_fenced_and_never_mixes_with_the_new_one() -> None:
    """FIELD_REPORTS: two trainers on one stream: neither ever publishes a mixture of both."""
    store = fresh_store()
    with Crew(2, run="old").attach(store, writers_timeout=1.0) as old:
        old.step(1)
        old.commit(1)
        with Crew(2, Model(seed=5), run="new").attach(store) as new:
            old.step(2)
            told = old.publish(2)
            assert isinstance(told[0], Fenced)
            assert isinstance(told[1], AttemptAbandoned | WriterMissing)
            new.step(2)
            assert new.commit(2).version == 3
            new.assert_published(store, 3)
            for error in (Fenced, PublisherStopped):
                with pytest.raises(error):
                    old.publishers[0].publish(3)
    assert not verify_stream(store).problems


def test_two_processes_of_one_rank_never_both_answer() -> None:
    store = fresh_store()
    with Crew(2).attach(store, writers_timeout=1.0) as crew:
        twin = crew.attaching(1)()
        crew.step(1)
        told = outcomes([Crew.publishing(p, 1) for p in (*crew.publishers, twin)])
        assert sum(isinstance(one, WriterReplaced) for one in told[1:]) == 1
        loser = crew.publishers[1] if isinstance(told[1], WriterReplaced) else twin
        with pytest.raises(WriterReplaced):
            loser.publish(2)
        with pytest.raises(PublisherStopped):
            loser.publish(3)
        outcomes([twin.close])
    assert not verify_stream(store).problems
