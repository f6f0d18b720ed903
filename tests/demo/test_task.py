"""Rewards that a program can check."""

import pytest

from deltasync.demo.task import ALPHABET, Problem, make_problems, reward

FIVE = Problem(2, 3)


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (" 5\n", 1.0),
        ("5", 1.0),
        (" 05 apples", 1.0),
        (" 6\n", 0.46),
        (" 15", 0.1),
        (" 999999999999", 0.1),
        ("", 0.0),
        (" five", 0.0),
        (" = 5", 0.0),
        ("-5", 0.0),
    ],
)
def test_reward(completion: str, expected: float) -> None:
    assert reward(FIVE, completion) == pytest.approx(expected)


def test_the_same_seed_gives_the_same_problems() -> None:
    assert make_problems(5, 1) == make_problems(5, 1) != make_problems(5, 2)
    assert all(p.answer == p.left + p.right for p in make_problems(50, 3))


def test_prompts_stay_inside_the_alphabet() -> None:
    assert {c for p in make_problems(50, 0) for c in p.prompt} <= set(ALPHABET)
