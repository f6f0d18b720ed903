"""The comparator must be able to fail: one wrong bit, name, dtype or shape is enough."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from deltasync.demo.compare import compare, compare_with_file, dump_bf16
from deltasync.demo.rows import Comparison
from deltasync.demo.sglang_rollout import compare_checksums


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "embed": torch.randn(7, 5, generator=generator).to(torch.bfloat16),
        "norm": torch.randn(5, generator=generator).to(torch.bfloat16),
        "router": torch.randn(3, 2, generator=generator),
        "scale": torch.tensor(2.0, dtype=torch.float16),
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
        "steps": torch.tensor([3], dtype=torch.int64),
        "flag": torch.tensor([True, False]),
    }


def copy(of: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in of.items()}


def test_equal_weights_are_identical_and_all_counted() -> None:
    found = compare(weights(), weights())
    assert found == Comparison(tensors=7, elements=35 + 5 + 6 + 1 + 0 + 1 + 2, problems=())
    assert found.identical


@given(st.sampled_from(["embed", "norm", "router", "scale", "steps"]), st.data())
def test_any_flipped_bit_is_found(name: str, data: st.DataObject) -> None:
    wrong = copy(weights())
    raw = wrong[name].reshape(-1).view(torch.uint8)
    position = data.draw(st.integers(0, raw.numel() - 1))
    raw[position] ^= 1 << data.draw(st.integers(0, 7))
    found = compare(weights(), wrong)
    assert not found.identical
    assert len(found.problems) == 1
    assert found.problems[0].startswith(f"{name} differs in 1 of ")


def test_bits_count_not_values() -> None:
    """FIELD_REPORTS: grail (+0 → −0 is a difference, an equal NaN is none)."""
    zero, minus, nan = (torch.tensor([x], dtype=torch.bfloat16) for x in (0.0, -0.0, float("nan")))
    assert not compare({"w": zero}, {"w": minus}).identical
    assert compare({"w": nan}, {"w": nan.clone()}).identical


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda w: w.pop("norm"), "norm is missing in the rollout"),
        (lambda w: w.update(extra=torch.zeros(1)), "extra is only in the rollout"),
        (lambda w: w.update(norm=w["norm"].float()), "norm is torch.float32 [5], not torch.bfloat16 [5]"),
        (lambda w: w.update(norm=w["norm"][None]), "norm is torch.bfloat16 [1, 5], not torch.bfloat16 [5]"),
    ],
)
def test_names_dtypes_and_shapes_count(change, problem) -> None:  # type: ignore[no-untyped-def]
    wrong = weights()
    change(wrong)
    assert compare(weights(), wrong).problems == (problem,)


def test_nothing_compared_is_not_identical() -> None:
    assert not compare({}, {}).identical


def test_dump_casts_and_covers_tied_names(tmp_path: Path) -> None:
    """FIELD_REPORTS: prime-rl#2823 (tied head): both names are written and compared."""
    model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    dump_bf16(model.state_dict(), tmp_path / "weights")
    rollout = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    found = compare_with_file(tmp_path / "weights", rollout)
    assert found == Comparison(tensors=2, elements=24, problems=())
    rollout["head.weight"] = rollout["head.weight"] + 1
    assert compare_with_file(tmp_path / "weights", rollout).problems[0].startswith("head.weight differs in ")


def test_json_round_trip() -> None:
    found = Comparison(3, 9, ("a differs in 1 of 3 elements",))
    assert Comparison.from_json(found.to_json()) == found


def test_checksums_are_compared_by_name_and_value() -> None:
    expected = {"rank 0: a": "1", "rank 0: b": "2", "rank 1: a": "3"}
    assert compare_checksums(expected, dict(expected), 9) == Comparison(3, 9, ())
    live = {"rank 0: a": "1", "rank 0: b": "3", "rank 1: c": "3"}
    assert compare_checksums(expected, live, 9) == Comparison(
        2,
        9,
        (
            "rank 0: b has another checksum",
            "rank 1: a is missing in the rollout",
            "rank 1: c is only in the rollout",
        ),
    )
