"""Prove a reconstruction by its block digest, correcting the few elements whose old value was not certain."""

from typing import Final

import numpy as np
import numpy.typing as npt

from publisher.changes import Digests

MAX_FLIPS: Final = 3
MAX_TRIALS: Final = 1 << 16

Terms = npt.NDArray[np.uint64]


def find_flips(residual: np.uint64, terms: Terms) -> tuple[int, ...] | None:
    """Indices of at most three `terms` whose sum mod 2⁶⁴ is `residual`; None if there are none within 2¹⁶ trials.

    terms[i]: what the digest changes by when uncertain element i takes its other possible value. A wrong answer
    has probability 2⁻⁴⁸ (2¹⁶ sums against 64 bits).
    """
    if residual == 0:
        return ()
    n = len(terms)
    singles = np.flatnonzero(terms == residual)
    if len(singles):
        return (int(singles[0]),)
    if n * (n - 1) // 2 > MAX_TRIALS:
        return None
    first, second = np.triu_indices(n, k=1)
    pairs = terms[first] + terms[second]
    hits = np.flatnonzero(pairs == residual)
    if len(hits):
        return int(first[hits[0]]), int(second[hits[0]])
    if n * (n - 1) * (n - 2) // 6 > MAX_TRIALS:
        return None
    for third in range(n):
        hits = np.flatnonzero((pairs + terms[third] == residual) & (first > third))
        if len(hits):
            return third, int(first[hits[0]]), int(second[hits[0]])
    return None


def block_sums(contributions: Terms, blocks: npt.NDArray[np.int64], count: int) -> Digests:
    """Sum mod 2⁶⁴ of `contributions` by block; `blocks` is ascending, 0 ≤ block < `count`."""
    running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(contributions, dtype=np.uint64)])
    edges = np.searchsorted(blocks, np.arange(count + 1))
    sums: Digests = running[edges[1:]] - running[edges[:-1]]
    return sums
