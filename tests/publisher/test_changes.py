"""Changes over many steps: the first old bits win, whatever happens in between."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from publisher.changes import BLOCK, ChangeSet, Digests, block_count

NUMEL = 3 * BLOCK + 5
BASE = np.arange(block_count(NUMEL), dtype=np.uint64)
Step = st.dictionaries(st.integers(0, NUMEL - 1), st.integers(0, 0xFFFF), max_size=40)


def _add(changes: ChangeSet, step: dict[int, int], digests: Digests = BASE) -> None:
    offsets = np.array(sorted(step), np.int64)
    blocks = np.unique(offsets // BLOCK)
    changes.note(blocks, digests[blocks])
    changes.add(offsets, np.array([step[i] for i in sorted(step)], np.uint16))


def _expected(steps: list[dict[int, int]], whole: set[int]) -> dict[int, int]:
    first: dict[int, int] = {}
    for step in steps:
        first = {**step, **first}
    return {i: first[i] for i in sorted(first) if i // BLOCK not in whole}


@given(st.lists(Step, max_size=6), st.sets(st.integers(0, 3), max_size=2))
def test_first_old_bits_are_kept_outside_whole_blocks(steps: list[dict[int, int]], whole: set[int]) -> None:
    changes = ChangeSet.empty()
    for i, step in enumerate(steps):
        _add(changes, step)
        if i == len(steps) // 2:
            blocks = np.array(sorted(whole), np.int64)
            changes.add_whole(blocks, BASE[blocks])
    marked = whole if steps else set()
    assert dict(zip(changes.offsets.tolist(), changes.old.tolist(), strict=True)) == _expected(steps, marked)
    assert np.all(np.diff(changes.offsets) > 0)


@given(st.lists(Step, max_size=4), st.lists(Step, max_size=4), st.sets(st.integers(0, 3), max_size=2))
def test_a_failed_version_is_put_back_before_what_came_since(
    pending: list[dict[int, int]], since: list[dict[int, int]], whole: set[int]
) -> None:
    """FIELD_REPORTS: prime-rl#3386, slime#2104: a change that was not committed is in the next version."""
    first, second = ChangeSet.empty(), ChangeSet.empty()
    since_digests, now = BASE + np.uint64(50), BASE + np.uint64(90)
    for step in pending:
        _add(first, step)
    for step in since:
        _add(second, step, since_digests)
    blocks = np.array(sorted(whole), np.int64)
    second.add_whole(blocks, since_digests[blocks])
    merged = first.before(second)
    found = dict(zip(merged.offsets.tolist(), merged.old.tolist(), strict=True))
    assert found == _expected(pending + since, whole)
    assert merged.whole_blocks.tolist() == sorted(whole)
    in_first, in_second = ({i // BLOCK for step in steps for i in step} for steps in (pending, since))
    assert merged.blocks.tolist() == sorted(in_first | in_second | whole)
    digests = [BASE if b in in_first else since_digests if b in in_second | whole else now for b in range(4)]
    assert merged.base_digests(0, now).tolist() == [int(of[b]) for b, of in enumerate(digests)]


@given(st.sets(st.integers(0, 3)), st.sets(st.integers(0, 3)))
def test_a_block_keeps_the_digest_it_was_first_noted_with(first: set[int], later: set[int]) -> None:
    changes, now = ChangeSet.empty(), BASE + np.uint64(9)
    for blocks, digests in ((first, BASE), (later, BASE + np.uint64(5))):
        at = np.array(sorted(blocks), np.int64)
        changes.note(at, digests[at])
    expected = [b if b in first else b + 5 if b in later else b + 9 for b in range(4)]
    assert changes.base_digests(0, now).tolist() == expected
    assert changes.base_digests(2, now[2:]).tolist() == expected[2:]


def test_a_block_changed_by_more_than_a_third_goes_whole() -> None:
    changes = ChangeSet.empty()
    _add(changes, dict.fromkeys(range(BLOCK, BLOCK + BLOCK // 3 + 1), 1) | {0: 7})
    assert changes.is_whole(0, 4).tolist() == [False, True, False, False]
    assert changes.is_whole(1, 2).tolist() == [True, False]
    assert changes.offsets.tolist() == [0]
