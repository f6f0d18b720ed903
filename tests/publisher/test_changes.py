"""Changes over many steps: the first old bits win, whatever happens in between."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from publisher.changes import BLOCK, ChangeSet, block_count

NUMEL = 3 * BLOCK + 5
Step = st.dictionaries(st.integers(0, NUMEL - 1), st.integers(0, 0xFFFF), max_size=40)


def _add(changes: ChangeSet, step: dict[int, int]) -> None:
    offsets = np.array(sorted(step), np.int64)
    changes.add(offsets, np.array([step[i] for i in sorted(step)], np.uint16))


def _empty() -> ChangeSet:
    return ChangeSet.empty(np.arange(block_count(NUMEL), dtype=np.uint64))


def _expected(steps: list[dict[int, int]], whole: set[int]) -> dict[int, int]:
    first: dict[int, int] = {}
    for step in steps:
        first = {**step, **first}
    return {i: first[i] for i in sorted(first) if i // BLOCK not in whole}


@given(st.lists(Step, max_size=6), st.sets(st.integers(0, 3), max_size=2))
def test_first_old_bits_are_kept_outside_whole_blocks(steps: list[dict[int, int]], whole: set[int]) -> None:
    changes = _empty()
    for i, step in enumerate(steps):
        _add(changes, step)
        if i == len(steps) // 2:
            changes.add_whole(np.array(sorted(whole), np.int64))
    marked = whole if steps else set()
    assert dict(zip(changes.offsets.tolist(), changes.old.tolist(), strict=True)) == _expected(steps, marked)
    assert np.all(np.diff(changes.offsets) > 0)


@given(st.lists(Step, max_size=4), st.lists(Step, max_size=4), st.sets(st.integers(0, 3), max_size=2))
def test_a_failed_version_is_put_back_before_what_came_since(
    pending: list[dict[int, int]], since: list[dict[int, int]], whole: set[int]
) -> None:
    """FIELD_REPORTS: prime-rl#3386, slime#2104: a change that was not committed is in the next version."""
    first, second = _empty(), ChangeSet.empty(np.full(block_count(NUMEL), 99, np.uint64))
    for step in pending:
        _add(first, step)
    for step in since:
        _add(second, step)
    second.add_whole(np.array(sorted(whole), np.int64))
    merged = first.before(second)
    found = dict(zip(merged.offsets.tolist(), merged.old.tolist(), strict=True))
    assert found == _expected(pending + since, whole)
    assert merged.base.tolist() == first.base.tolist()


def test_a_block_changed_by_more_than_a_third_goes_whole() -> None:
    changes = _empty()
    _add(changes, dict.fromkeys(range(BLOCK, BLOCK + BLOCK // 3 + 1), 1) | {0: 7})
    assert changes.whole.tolist() == [False, True, False, False]
    assert changes.offsets.tolist() == [0]
