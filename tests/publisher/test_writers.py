"""Several writers of one stream, over a store in memory: whole models, bit for bit, whatever goes wrong."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim import AdamW

from chunkstore.errors import ConfigError, StoreUnavailable
from chunkstore.store import Store
from manifest.errors import CommitUnknown
from manifest.log import VersionLog, open_stream
from manifest.verify import verify_stream
from publisher.commit import Commit
from publisher.errors import (
    AttemptAbandoned,
    MappingMismatch,
    WriterMissing,
    WritersDisagree,
)
from publisher.group import Writer
from publisher.publisher import LocalFeed, Publisher
from tests.publisher.ranks import SHAPES, Crew, Model, gradient, in_parallel, outcomes
from tests.publisher.zoo import fresh_store, published
from tests.support.faults import FaultStore


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_all_make_one_stream(world_size: int) -> None:
    store = fresh_store()
    with Crew(world_size).attach(store) as crew:
        crew.assert_published(store, 0)
        for step in range(1, 5):
            crew.step(step)
            manifest = crew.commit(step)
            assert manifest.version == step
            assert {publisher.version for publisher in crew.publishers} == {step}
            assert manifest.kind == "delta"
            assert manifest.stats.unproved_blocks == 0
            assert manifest.stats.elements == sum(manifest.stats.sources.values())
            assert (
                len({chunk.key.rpartition("/")[2].split("-")[0] for chunk in manifest.chunks}) == world_size
            )
            crew.assert_published(store, step)
    assert not verify_stream(store).problems


def test_every_step_of_several_is_in_the_version() -> None:
    store = fresh_store()
    with Crew(3).attach(store) as crew:
        crew.step(1, 2, 3)
        for publisher in crew.publishers:
            publisher.check_copies()  # what is named belongs to one rank: there are no copies
        assert crew.commit(3).optimizer_steps == 3
        crew.assert_published(store, 1)


def test_no_change_is_no_version() -> None:
    store = fresh_store()
    with Crew(3).attach(store) as crew:
        assert crew.publish(0) == [None, None, None]
        assert crew.publish(1) == [None, None, None]
        crew.step(1)
        assert crew.commit(2).version == 1
        crew.assert_published(store, 1)


def test_one_writer_s_change_is_enough() -> None:
    store = fresh_store()
    with Crew(3).attach(store) as crew:
        with torch.no_grad():
            crew.ranks[1].owned[0].tensor[3] = 7.0
        crew.commit(1)
        crew.assert_published(store, 1)


def test_where_all_ranks_have_the_whole_model_the_tensors_are_dealt_out() -> None:
    """As with DDP: every rank steps everything, and publishes its share."""
    store, models = fresh_store(), [Model() for _ in range(3)]
    optimizers = [AdamW([model.get_parameter(n) for n in SHAPES], lr=1e-5) for model in models]
    config = {"store": {"url": "memory://unused"}, "inference_dtype": "bfloat16"}

    def attaching(rank: int) -> Callable[[], Publisher]:
        writer = Writer(rank, 3, "run")
        return lambda: Publisher.attach(optimizers[rank], models[rank], config, store=store, writer=writer)

    publishers = in_parallel([attaching(rank) for rank in range(3)])
    for publisher in publishers:
        with pytest.raises(ConfigError, match="3 ranks"):
            publisher.check_copies()
    for step in range(1, 3):
        for model, optimizer in zip(models, optimizers, strict=True):
            for name in SHAPES:
                model.get_parameter(name).grad = gradient(name, step).view(SHAPES[name])
            optimizer.step()
        models[0].get_buffer("count")[:] = step
        commits = outcomes([Crew.publishing(publisher, step) for publisher in publishers])
        assert {commit.version for commit in commits} == {step}
        assert {k.key.rpartition("/")[2][0] for k in commits[0].manifest.chunks} == {"0", "1", "2"}
        found = published(store, step)
        for name, tensor in models[0].state_dict().items():
            wire = tensor.bfloat16().view(torch.uint16) if tensor.is_floating_point() else tensor
            assert np.array_equal(found[name], wire.reshape(-1).numpy().view(found[name].dtype)), name
    outcomes([publisher.close for publisher in publishers])


def test_a_rank_whose_share_is_frozen_is_a_writer_too() -> None:
    """What nothing steps is the first rank's; where that is most of the model, all that is stepped is the second's."""
    store, models = fresh_store(), [nn.Sequential(nn.Linear(40, 40), nn.Linear(3, 3)) for _ in range(2)]
    config = {"store": {"url": "memory://unused"}, "inference_dtype": "bfloat16"}
    optimizers = [AdamW(model[1].parameters(), lr=1e-3) for model in models]

    def attaching(rank: int) -> Callable[[], Publisher]:
        writer = Writer(rank, 2, "run")
        return lambda: Publisher.attach(optimizers[rank], models[rank], config, store=store, writer=writer)

    publishers = in_parallel([attaching(rank) for rank in range(2)])
    assert not verify_stream(store).problems
    outcomes([publisher.close for publisher in publishers])


# Coverage


def shift(crew: Crew, rank: int, by: int) -> None:
    """Make a rank's first range begin somewhere else."""
    first = crew.ranks[rank].owned[0]
    crew.ranks[rank].owned[0] = replace(first, start=first.start + by)


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize(
    ("by", "problem"),
    [
        (-2, r"layers.1.w: writer 0 and writer 1 both have elements among \d+…\d+"),
        (1, "beyond the last|not "),
    ],
)
def test_an_overlap_is_refused_naming_the_writers(by: int, problem: str, existing: bool) -> None:
    store = fresh_store()
    if existing:
        Crew(1, run="before").attach(store).close()
    crew = Crew(2)
    shift(crew, 1, by)
    crew.stores = [store] * 2
    told = outcomes([crew.attaching(rank, writers_timeout=3 if by < 0 else 0.3) for rank in range(2)])
    if by < 0:
        assert isinstance(told[0], WritersDisagree)
        assert re.search(problem, str(told[0]))
        assert isinstance(told[1], AttemptAbandoned | WriterMissing)
        assert re.search(problem, str(told[1]))
    else:
        assert isinstance(told[1], MappingMismatch)  # it knows by itself that its range leaves the tensor


@pytest.mark.parametrize("existing", [False, True])
def test_a_gap_is_refused_naming_it(existing: bool) -> None:
    store = fresh_store()
    if existing:
        Crew(1, run="before").attach(store).close()
    crew = Crew(3)
    crew.ranks[0].owned = [one for one in crew.ranks[0].owned if one.name != "frozen"]
    last = crew.ranks[1].owned.pop()
    crew.stores = [store] * 3
    told = outcomes([crew.attaching(rank, writers_timeout=3) for rank in range(3)])
    assert isinstance(told[0], WritersDisagree)
    assert "frozen: nobody has elements 0…7" in str(told[0])
    assert f"{last.name}: nobody has elements {last.start}…" in str(told[0])
    assert all("nobody has elements" in str(error) for error in told[1:])
    log = VersionLog(store, open_stream(store))
    assert log.newest() is None or log.newest().version == 1  # type: ignore[union-attr]


def test_the_mapping_check_is_of_all_writers_together(tmp_path: Path) -> None:
    crew = Crew(2)
    tensors = {name: t.bfloat16() if t.is_floating_point() else t for name, t in crew.weights().items()}
    for rank in crew.ranks:
        for one in rank.owned:
            if one.tensor.is_floating_point():
                one.tensor.data = one.tensor.detach().bfloat16().float()
    save_file(tensors, tmp_path / "model.safetensors")
    with Crew(2).attach(fresh_store(), base_checkpoint=str(tmp_path)) as right:
        assert right.publishers[1].version == 0
    other = Crew(2, Model(seed=1))
    other.stores = [fresh_store()] * 2
    told = outcomes(
        [other.attaching(rank, base_checkpoint=str(tmp_path), writers_timeout=3) for rank in range(2)]
    )
    assert isinstance(told[0], MappingMismatch)
    assert isinstance(told[1], AttemptAbandoned)


# Failures


def test_writers_that_do_not_come_are_named() -> None:
    crew = Crew(4)
    crew.stores = [fresh_store()] * 4
    told = outcomes([crew.attaching(rank, writers_timeout=0.5) for rank in (0, 2)])
    assert isinstance(told[0], WriterMissing)
    assert "no part of writers 1, 3 of 4" in str(told[0])
    assert isinstance(told[1], AttemptAbandoned | WriterMissing)


def test_a_writer_without_a_coordinator_says_so() -> None:
    crew = Crew(2)
    crew.stores = [fresh_store()] * 2
    with pytest.raises(WriterMissing, match=r"writer 1 of 2 \(run run\) waited 0.5 s .* no stream yet"):
        crew.attaching(1, writers_timeout=0.2)()
    Crew(1, run="other").attach(crew.stores[0]).close()
    with pytest.raises(WriterMissing, match="nobody has called"):
        crew.attaching(1, writers_timeout=0.2)()


def failing(prefix: str, operation: str = "put") -> tuple[Store, list[bool], Store]:
    """A store, the switch that makes `operation` fail below `prefix`, and the same store without faults."""
    inner, broken = fresh_store(), [False]

    def fault(what: str, key: str) -> Exception | None:
        wanted = broken[0] and what.startswith(operation) and key.startswith(prefix)
        return StoreUnavailable("injected") if wanted else None

    return FaultStore(inner, before=fault), broken, inner


@pytest.mark.parametrize("prefix", ["chunks/", "parts/"])
def test_what_one_writer_cannot_store_is_in_the_next_version(prefix: str) -> None:
    faulty, broken, inner = failing(prefix)
    with Crew(3).attach([inner, faulty, inner], writers_timeout=1.0) as crew:
        crew.step(1)
        broken[0] = True
        told = crew.publish(1)
        assert isinstance(told[0], WriterMissing)
        assert "writers 1 of 3" in str(told[0])
        assert isinstance(told[1], StoreUnavailable | CommitUnknown)
        assert isinstance(told[2], AttemptAbandoned)
        broken[0] = False
        crew.step(2)
        assert crew.commit(2).version == 1
        crew.assert_published(inner, 1)


@pytest.mark.parametrize("prefix", ["chunks/", "versions/", "attempts/"])
def test_what_the_coordinator_cannot_store_is_in_the_next_version(prefix: str) -> None:
    faulty, broken, inner = failing(prefix)
    with Crew(3).attach([faulty, inner, inner], writers_timeout=1.0) as crew:
        crew.step(1)
        broken[0] = True
        told = crew.publish(1)
        assert all(isinstance(one, Exception) for one in told)
        broken[0] = False
        crew.step(2)
        version = crew.commit(2).version
        assert version == (2 if prefix == "versions/" else 1)  # an unknown commit is offered again
        crew.assert_published(inner, version)
    assert not verify_stream(inner).problems


def test_a_commit_whose_reply_is_lost_is_known_to_all() -> None:
    inner, dark = fresh_store(), [False]

    def lose(operation: str, key: str) -> Exception | None:
        lost = dark[0] and key.startswith("versions/") and operation in ("put_if_absent", "get")
        return StoreUnavailable("injected") if lost else None

    faulty = FaultStore(inner, after=lose)
    with Crew(3).attach([faulty, inner, inner], writers_timeout=5.0) as crew:
        crew.step(1)
        dark[0] = True
        told = crew.publish(1)
        assert isinstance(told[0], CommitUnknown)
        assert [one.version for one in told[1:] if isinstance(one, Commit)] == [1, 1]
        dark[0] = False
        crew.step(2)
        assert crew.commit(2).version == 2
        crew.assert_published(inner, 2)


def test_different_steps_are_never_mixed() -> None:
    store = fresh_store()
    with Crew(2).attach(store, writers_timeout=0.5) as crew:
        crew.step(1)
        told = outcomes([Crew.publishing(p, 7 + i) for i, p in enumerate(crew.publishers)])
        assert isinstance(told[0], WriterMissing)
        assert isinstance(told[1], WriterMissing)
        assert "it has called for train steps 7; this writer has train step 8" in str(told[1])
        assert crew.commit(9).version == 1
        crew.assert_published(store, 1)


def test_a_call_that_was_given_up_before_this_writer_came_is_told_as_such() -> None:
    """The numbers agree, but the coordinator has waited in vain already."""
    store = fresh_store()
    with Crew(2).attach(store, writers_timeout=0.5) as crew:
        crew.step(1)
        first, second = crew.publishers
        with pytest.raises(WriterMissing):
            first.publish(2).result()
        with pytest.raises(WriterMissing) as caught:
            second.publish(2).result()
        assert "it has called for train steps 2, and given up: WriterMissing: version 1" in str(caught.value)
        assert "at about the same time" in caught.value.hint
        assert crew.commit(3).version == 1
        crew.assert_published(store, 1)


def test_a_train_step_is_needed_and_anchors_are_not_for_several() -> None:
    with Crew(2).attach(fresh_store()) as crew:
        for publisher in crew.publishers:
            with pytest.raises(ConfigError, match="train_step"):
                publisher.publish()
            with pytest.raises(ConfigError, match="single writer"):
                publisher.publish(1, anchor=True)


def test_a_writer_that_lost_track_of_the_base_is_found_out_and_sends_all() -> None:
    """Whatever made one writer wrong about the base, the sums do not fit, and the tensor goes whole."""
    store = fresh_store()
    with Crew(3).attach(store) as crew:
        crew.step(1)
        crew.commit(1)
        feed = crew.publishers[1]._feed
        assert isinstance(feed, LocalFeed)
        feed._watched.shards[0].kept[0] ^= np.uint64(1 << 40)
        crew.step(2)
        told = crew.publish(2)
        assert all(isinstance(one, AttemptAbandoned) for one in told)
        name = feed._watched.shards[0].spec.name
        assert name in str(told[0])
        crew.step(3)
        manifest = crew.commit(3)
        crew.assert_published(store, 2)
        tensor = crew.publishers[0].catalog.ids[name]
        sent = [s for c in manifest.chunks for s in c.sections if s.tensor == tensor]
        assert all(s.whole for s in sent)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_fails_the_next_sound_version_is_all_ranks_weights(seed: int) -> None:
    """Faults before and after any request of any rank, for some publishes; then none: nothing is lost or mixed."""
    inner, rate, chance = fresh_store(), [0.0], random.Random(seed)

    def fault(operation: str, key: str) -> Exception | None:
        return StoreUnavailable("injected") if chance.random() < rate[0] else None

    faulty = [FaultStore(inner, before=fault, after=fault) for _ in range(3)]
    with Crew(3).attach(faulty, writers_timeout=1.0, commit_deadline=0.1) as crew:
        for step in range(1, 4):
            crew.step(step)
            rate[0] = chance.choice([0.02, 0.1, 0.3])
            crew.publish(step)
        rate[0] = 0.0
        for step in range(4, 9):
            crew.step(step)
            told = crew.publish(step)
            if all(isinstance(one, Commit) for one in told):
                break
        assert all(isinstance(one, Commit) for one in told), told
        crew.assert_published(inner, told[0].version)
    assert not verify_stream(inner).problems
