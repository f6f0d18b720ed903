"""Finding the few uncertain elements whose other value makes a block's digest come out right."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from publisher.find import Found
from publisher.fingerprint import Fingerprint
from publisher.proof import block_sums, find_flips

U64 = st.integers(0, 2**64 - 1)


@given(st.lists(U64, min_size=1, max_size=30, unique=True), st.data())
def test_flips_are_found_and_add_up(terms: list[int], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(range(len(terms))), min_size=1, max_size=3, unique=True))
    residual = sum(terms[i] for i in chosen) % 2**64
    flips = find_flips(np.uint64(residual), np.array(terms, np.uint64))
    assert flips is not None
    assert len(set(flips)) == len(flips) <= 3
    assert sum(terms[i] for i in flips) % 2**64 == residual


@given(st.lists(U64, max_size=12), U64)
def test_none_means_that_no_subset_fits(terms: list[int], residual: int) -> None:
    if find_flips(np.uint64(residual), np.array(terms, np.uint64)) is None:
        for size in (1, 2, 3):
            for subset in itertools.combinations(terms, size):
                assert sum(subset) % 2**64 != residual


def test_too_many_uncertain_elements_give_up_instead_of_searching_for_ever() -> None:
    rng = np.random.default_rng(0)
    terms = rng.integers(0, 2**64, 5000, dtype=np.uint64)
    assert find_flips(terms[1] + terms[2], terms) is None
    assert find_flips(terms[77], terms) == (77,)


def test_one_element_is_flipped_once() -> None:
    terms = np.array([1, 10, 100], np.uint64)
    for residual in (2, 3, 12, 21, 30, 102, 120, 201):
        assert find_flips(np.uint64(residual), terms) is None


@given(st.lists(st.tuples(st.integers(0, 9), U64), max_size=50))
def test_block_sums(pairs: list[tuple[int, int]]) -> None:
    pairs.sort()
    sums = block_sums(
        np.array([v for _, v in pairs], np.uint64), np.array([b for b, _ in pairs], np.int64), 10
    )
    assert sums.tolist() == [sum(v for b, v in pairs if b == k) % 2**64 for k in range(10)]


def _found(guess: list[int], low: int, high: int, truth: list[int], name: str) -> tuple[Found, Fingerprint]:
    """One block of the given elements, each between `low` and `high` before the step, and 1.0 after it."""
    fingerprint = Fingerprint(name)
    local = np.arange(len(guess), dtype=np.int64)
    old, right = np.array(guess, np.uint16), np.array(truth, np.uint16)
    difference = right.astype(np.uint64) - old.astype(np.uint64)
    missing = (fingerprint.weights(local) * difference).sum(dtype=np.uint64, keepdims=True)
    bounds = (np.full_like(old, low), np.full_like(old, high))
    return Found(
        0, np.zeros(1, np.uint64), missing, local, np.full_like(old, 0x3F80), old, *bounds
    ), fingerprint


@given(st.lists(st.sampled_from([0x2001, 0xA003, 0x2000]), min_size=5, max_size=40), st.text(max_size=5))
def test_any_number_of_zeros_is_one_assumption(guess: list[int], name: str) -> None:
    """A few of them may be negative, or be no zeros at all, and are flipped from there."""
    truth = [0x8000, *[0] * (len(guess) - 2), guess[-1]]
    found, fingerprint = _found(guess, 0xA010, 0x2010, truth, name)
    assert found.prove(fingerprint).tolist() == [True]
    assert found.old.tolist() == truth


def test_two_flips_of_one_element_prove_nothing() -> None:
    """−0 and the guess together add up to the guess with its sign changed, which is neither."""
    found, fingerprint = _found([0x2001], 0xA010, 0x2010, [0xA001], "w")
    assert found.prove(fingerprint).tolist() == [False]
    assert found.old.tolist() == [0x2001]
