"""The task: additions, written out with two solved examples; a program checks the answer."""

import random
import re
from dataclasses import dataclass
from typing import Final

ALPHABET: Final = "0123456789+= \n"
"""Every character that a prompt may hold."""

MAX_NEW_TOKENS: Final = 6
_NUMBER = re.compile(r"\s*([0-9]{1,9})")
_LARGEST_OPERAND: Final = 20
_CREDIT_RANGE: Final = 10


@dataclass(frozen=True, slots=True)
class Problem:
    """Two numbers to add."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"3 + 4 = 7\n12 + 5 = 17\n{self.left} + {self.right} ="

    @property
    def answer(self) -> int:
        return self.left + self.right


def make_problems(count: int, seed: int) -> list[Problem]:
    """`count` problems; the same ones for the same seed."""
    chosen = random.Random(seed)
    return [
        Problem(chosen.randint(1, _LARGEST_OPERAND), chosen.randint(1, _LARGEST_OPERAND))
        for _ in range(count)
    ]


def reward(problem: Problem, completion: str) -> float:
    """1.0 for the right sum at the start of `completion`, less the further off it is, 0.0 if no number stands there.

    A wrong number earns 0.1, and up to 0.5 when it is close: answers differ in reward even where none is right.
    """
    found = _NUMBER.match(completion)
    if found is None:
        return 0.0
    distance = abs(int(found[1]) - problem.answer)
    if distance == 0:
        return 1.0
    return 0.1 + 0.4 * max(0.0, 1 - distance / _CREDIT_RANGE)
