"""What attach and explain say about layouts that are wrong, or that cannot be published."""

import pytest

from tests.trainers.probes import answers, main

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
            ["mapping", "rank 1: up.weight holds other values than torch gathers", "rank 1: down.bias"],
        ),
        ("beyond", ["mapping", "rank 1: up.weight would reach element"]),
        (
            "twice",
            [
                "refused: rank 1: up.weight holds other values",
                "refused: up.weight: nobody has elements 48…96",
            ],
        ),
        ("unasked", ["config: ", "has PEFT layers"]),
        ("merged_drifted", ["mapping: ", "model.layers.0.self_attn.q_proj.weight differs from what rank 0"]),
        ("strangers", ["optimizer_refused: no tensor of the model is in the optimizer"]),
        ("merged_shards", ["config: lora: merged is set, but parameters are DTensors"]),
        ("drifted", ["mapping", "rank 1: up.weight differs from what rank 0 holds of it"]),
        ("before", ["optimizer_refused", "no parameter of the model is in the optimizer"]),
        ("first_fsdp", ["optimizer_refused", "wrapped in FullyShardedDataParallel"]),
        (
            "other_tensors",
            [
                "mapping",
                "extra.bias is BF16 (4,) on rank 1, missing on rank 0",
                "extra.weight is BF16 (4, 4)",
            ],
        ),
        ("one_cannot", [" is stepped by SGD, which is not torch.optim.Adam"]),
        ("one_steps_nothing", ["no parameter of the model is in the optimizer"]),
        (
            "partly_before",
            ["optimizer_refused", "made before down.weight, down.bias were sharded", "would never change"],
        ),
        ("sharded_later", ["mapping: ", " is a DTensor, whose elements lie in other tensors"]),
        ("other_place", ["config: writer", " of 3 is rank ", " of 2 in its process group"]),
        ("unfrozen", ["[True, True, True, True]"]),
        ("spool", ["config", "FSDP2 (2: S(0))", "with `spool` one process"]),
        ("not_adam", ["refused: is stepped by SGD", "refused: rank 1: up.weight is stepped by SGD"]),
        ("with_another", ["optimizer_refused", "together with other optimizers"]),
        ("zero", ["ZeroRedundancyOptimizer 2 ()"]),
        ("single_column", ["(), ["]),
        ("cut_twice", ["mapping: ", "0.bias has 1 elements in dimension 0, which are cut in 2 parts"]),
        (
            "part_after_evaluation",
            ["optimizer_refused: the optimizer steps shards, and the model has none (give the whole model"],
        ),
        (
            "outside",
            [
                "rank 1: down.weight differs from what rank 0",
                "as what neither fully_shard nor DDP wraps does",
            ],
        ),
        ("after_evaluation", ["() {'inversion': 107}"]),
    ],
)
def test_all_ranks_are_told(told: list[Told], probe: str, words: list[str]) -> None:
    for rank, one in enumerate(told):
        for word in words:
            assert word in one[probe], f"rank {rank}"


@pytest.mark.parametrize("probe", ["second_rank", "second_rank_compiled", "second_rank_of_a_part"])
def test_of_ranks_that_all_have_the_model_only_the_first_publishes_it_alone(
    told: list[Told], probe: str
) -> None:
    assert told[0][probe] == "DDP"
    assert "config: rank 1 of 2 would publish the whole model" in told[1][probe]


@pytest.mark.parametrize("probe", ["copies_alone", "copies_unwrapped"])
def test_a_rank_that_attached_alone_does_not_say_that_copies_are_equal(told: list[Told], probe: str) -> None:
    assert "config: there are 2 ranks, but this one attached alone" in told[0][probe]


def test_a_model_that_tells_of_no_ranks_is_accepted_on_each(told: list[Told]) -> None:
    assert [one["second_rank_unwrapped"] for one in told] == ["plain torch", "plain torch"]


def test_the_table_shows_what_each_rank_publishes(told: list[Told]) -> None:
    assert told[0]["columns"].splitlines() == [
        "FSDP2 (2: S(1); 2: S(0)); writer 0 of 2: 107 of 214 elements in 4 shards of 4 tensors",
        "  inversion 107",
        "",
        "tensor       dtype  shape  elements here  which                       source",
        "down.bias    BF16   16     8              0…8                         inversion",
        "down.weight  BF16   16×6   48             from 0: 16 every 6, 3 each  inversion",
        "up.bias      BF16   6      3              0…3                         inversion",
        "up.weight    BF16   6×16   48             from 0: 6 every 16, 8 each  inversion",
        "",
        "every element has one owner",
    ]
    assert "from 8: 6 every 16, 8 each" in told[1]["columns"]
