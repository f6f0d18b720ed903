"""What attach says about ZeRO-3 that is wrong or cannot be followed, and what is published when it is unusual."""

import pytest

from tests.deepspeed.zero3_probes import main
from tests.trainers.probes import answers

Told = dict[str, str]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    """What each of two ranks was told."""
    return answers(main, tmp_path_factory.mktemp("probes"))


@pytest.mark.parametrize(
    ("probe", "words"),
    [
        (
            "shifted",
            ["mapping", "rank 1: down.weight holds other values than DeepSpeed gathers in its place"],
        ),
        ("beyond", ["mapping", "rank 1: down.weight would reach element 1119 of 120"]),
        ("swapped", ["mapping", "elements of down.weight from 68 on are more than the 72 of sub group 1"]),
        ("moved", ["mapping", "rank 0: down.bias does not lie in sub group 1", "rank 1: down.bias does not"]),
        ("stale", ["mapping", "rank 1: down.weight differs from its master, which the next step would copy"]),
        (
            "all_at_once",
            [
                "optimizer_refused",
                "zenflow",
                "offload_optimizer to nvme",
                "offload_param to nvme",
                "zero_hpz_partition_size",
                "zero_quantized_weights",
                "zero_quantized_nontrainable_weights",
                "docs/trainers.md",
            ],
        ),
        ("another_kind", ["optimizer_refused", "SuperOffload is not DeepSpeedZeroOptimizer_Stage3 itself"]),
        ("another_model", ["optimizer_refused", "no parameter of the model is in the optimizer"]),
        ("other_ranks", ["optimizer_refused", "down.weight is cut among ranks ["]),
        ("in_place", ["['digest', 'inversion'] 0 unproved, [] wrong"]),
        ("in_place_by_another", ["optimizer_refused", "is stepped by SGD, which is not torch.optim.Adam"]),
        ("two_optimizers", ["['copy', 'digest'] 0 unproved, [] wrong"]),
        ("edited", ["['copy', 'digest'] ", "unproved, [] wrong"]),
        (
            "masters_offloaded",
            ["0 kept, ['copy', 'digest'] 0 unproved, [] wrong; ['copy', 'digest'] 0 unproved"],
        ),
        (
            "offloaded_between",
            ["mapping: DeepSpeed has offloaded its 16-bit shards", "after engine.reload_states", "[] wrong"],
        ),
        ("attached_while_offloaded", ["mapping: ", "DeepSpeed has offloaded its 16-bit shards"]),
    ],
)
def test_all_ranks_are_told(told: list[Told], probe: str, words: list[str]) -> None:
    for rank, one in enumerate(told):
        for word in words:
            assert word in one[probe], f"rank {rank}"


def test_the_table_shows_what_each_rank_publishes(told: list[Told]) -> None:
    assert told[0]["table"].splitlines() == [
        "DeepSpeed ZeRO-3 (AdamW); writer 0 of 2: 155 of 306 elements in 8 shards of 8 tensors",
        "  copy 140, digest 15",
        "",
        "tensor       dtype  shape   elements here  which  source",
        "again.bias   BF16   15      8              0…8    copy",
        "down.bias    BF16   8       4              0…4    copy",
        "down.weight  BF16   8×15    60             0…60   copy",
        "last.bias    BF16   3       2              0…2    digest",
        "last.weight  BF16   3×8     12             0…12   digest",
        "steps        BF16   scalar  1              all    digest",
        "up.bias      BF16   15      8              0…8    copy",
        "up.weight    BF16   15×8    60             0…60   copy",
        "",
        "every element has one owner",
    ]
    assert "up.weight    BF16   15×8   60             60…120  copy" in told[1]["table"]
    assert "steps" not in told[1]["table"]
