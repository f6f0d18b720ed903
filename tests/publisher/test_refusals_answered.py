"""What subscribers refuse is answered with an anchor: soon, once, and not for ever."""

from collections.abc import Sequence

import torch
from torch import nn

from manifest.lease import Lease, Refusal
from manifest.log import VersionLog, open_stream
from publisher.refusals import Answers
from tests.publisher.zoo import adamw, assert_identical, attach, fresh_store
from tests.subscriber.parts import until
from tests.support.streams import refuse

ONCE = 600.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lease(name: str, *refused: int, applied: int | None = 0, action: str = "reseed") -> Lease:
    refusals = tuple(Refusal(version=v, kind="corrupt_object", action=action) for v in refused)
    return Lease(name, applied, 30.0, 0.0, applied, refusals)


def test_whom_an_anchor_would_help() -> None:
    answers = Answers(Clock())

    def waiting(leases: Sequence[Lease]) -> list[str]:
        return answers.unanswered(leases, whole=3, newest=9)

    assert waiting([lease("a", 5), lease("b", 9), lease("c")]) == ["a", "b"]
    assert waiting([lease("behind", 3)]) == [], "an anchor is there already"
    assert waiting([lease("stray", 10)]) == [], "it is no version"
    assert waiting([lease("misfit", 5, action="fatal"), lease("old", 5, action="")]) == []


def test_an_anchor_that_is_not_taken_is_not_followed_by_another_at_once() -> None:
    clock = Clock()
    answers = Answers(clock)
    answers.answered(["a"], 9)
    assert answers.unanswered([lease("a", 10)], 9, 10) == []
    assert answers.unanswered([lease("b", 10)], 9, 10) == ["b"]
    clock.now = ONCE
    assert answers.unanswered([lease("a", 10)], 9, 10) == ["a"]
    answers.answered(["a"], 11)
    clock.now = 3 * ONCE - 1
    assert answers.unanswered([lease("a", 12)], 11, 12) == []
    clock.now = 3 * ONCE
    assert answers.unanswered([lease("a", 12)], 11, 12) == ["a"]


def test_one_that_was_taken_starts_anew() -> None:
    answers = Answers(Clock())
    answers.answered(["a"], 9)
    assert answers.unanswered([lease("a", 15, applied=14)], 9, 15) == ["a"]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    optimizer.step()


def test_the_publisher_answers_with_an_anchor_of_its_own_accord() -> None:
    store = fresh_store()
    model = nn.Linear(40, 30)
    optimizer = adamw(model, lr=1e-6)
    with attach(model, optimizer, store) as publisher:
        log = VersionLog(store, open_stream(store))
        refuse(store, 1)
        step(model, optimizer)
        publisher.publish().result()
        until(lambda: publisher._feed._refusals.wanted)  # type: ignore[attr-defined]
        step(model, optimizer)
        publisher.publish().result()
        assert log.alternates() == [2]
        assert_identical(publisher, model, store, 2)
        step(model, optimizer)
        publisher.publish().result()
        assert log.alternates() == [2]


def test_fifty_subscribers_that_refuse_a_version_are_answered_with_one_anchor() -> None:
    store = fresh_store()
    model = nn.Linear(40, 30)
    optimizer = adamw(model, lr=1e-6)
    with attach(model, optimizer, store) as publisher:
        log = VersionLog(store, open_stream(store))
        publisher._feed._refusals._interval = 0.0  # type: ignore[attr-defined]
        for number in range(50):
            refuse(store, 1, f"worker-{number}")
        for _ in range(4):
            step(model, optimizer)
            publisher.publish().result()
            until(lambda: publisher._feed._refusals.wanted or bool(log.alternates()))  # type: ignore[attr-defined]
        assert log.alternates() == [2]
