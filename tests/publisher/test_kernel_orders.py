"""Every kernel's AdamW, exactly: no change missed with the guard, and no miss unnoticed without it.

`benchmarks/orders.py` counts the same over 100 M element-steps for each.
"""

from dataclasses import replace

import pytest
import torch

from publisher.inversion import Hyper
from tests.publisher.orders import ORDERS, Order, Weights, hypers, tally


@pytest.mark.parametrize("lr", [1e-7, 1e-6, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("order", list(ORDERS))
def test_nothing_is_missed_and_no_proved_old_value_is_wrong(order: str, lr: float) -> None:
    for seed, hyper in enumerate(hypers((lr,))):
        counts = tally(ORDERS[order], hyper, numel=40_000, steps=3, seed=seed)
        assert counts.missed == 0
        assert counts.wrong == 0
        assert counts.unproved_sparse == 0
        assert counts.changed > 0
        assert counts.extra <= 0.02 * counts.changed + 10
        assert counts.blind_caught == counts.blind_missed


def test_without_the_guard_a_kernel_with_another_formula_is_caught_every_time() -> None:
    """Here misses are many, so that the proof has something to refuse."""
    real = ORDERS["Apex, TE"]

    def other(weights: Weights, gradient: torch.Tensor, hyper: Hyper) -> None:
        real(weights, gradient, replace(hyper, lr=hyper.lr * 1.3))

    order: Order = other
    counts = tally(order, Hyper(1e-6, 0.9, 0.95, 1e-8, 0.1), numel=200_000, steps=3, seed=0)
    assert counts.blind_missed > 100
    assert counts.blind_caught == counts.blind_missed
    assert counts.wrong == 0
