"""What attach and explain say about what is wrong with a DeepSpeed trainer, or cannot be published."""

import pytest

from tests.deepspeed.probes import main
from tests.trainers.probes import answers

Told = dict[str, str]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    """What each of two ranks was told."""
    return answers(main, tmp_path_factory.mktemp("probes"))


@pytest.mark.parametrize(
    ("probe", "words"),
    [
        ("shifted", ["mapping", "rank 1: model.model.", " has other values where this rank's part"]),
        ("master_alone", ["mapping", "rank 1: ", " differs from its master, which the next step"]),
        (
            "drifted",
            ["mapping", "rank 1: model.model.embed_tokens.weight differs from what rank 0 holds of it"],
        ),
        ("elsewhere", ["mapping", "shape (1, 7) lies outside the flat buffer of its group"]),
        ("spool", ["config", "DeepSpeed ZeRO-1 (AdamW)", "with `spool` one process"]),
        ("lora", ["config", "lora: adapter is set, but "]),
        ("masters", ["optimizer_refused", "DeepSpeed's optimizer is given together with masters"]),
        ("another_model", ["optimizer_refused", "no parameter of the model is in the optimizer"]),
        ("some_of_the_ranks", ["optimizer_refused", "2 ranks share a group of parameters, and 1 attach"]),
        ("inner_optimizer", ["optimizer_refused", "AdamW is the optimizer inside DeepSpeed's"]),
        ("module_alone", ["DeepSpeed ZeRO-1 (AdamW); writer ", " of 2", "every element has one owner"]),
        ("stage_0_of_16_bits", ["optimizer_refused", "FP16_UnfusedOptimizer cannot be followed: every rank"]),
        ("zenflow", ["optimizer_refused", "ZenFlowZeroOptimizerSequential cannot be followed: with zenflow"]),
        ("pipeline", ["optimizer_refused", "PipelineModule: each stage has layers of its own"]),
        ("experts", ["optimizer_refused", "MoE layers: ranks have different experts"]),
    ],
)
def test_all_ranks_are_told(told: list[Told], probe: str, words: list[str]) -> None:
    for rank, one in enumerate(told):
        for word in words:
            assert word in one[probe], f"rank {rank}"


def test_of_ranks_that_all_have_the_model_only_the_first_publishes_it_alone(told: list[Told]) -> None:
    assert told[0]["stage_0_of_32_bits"] == "plain torch"
    assert "config: rank 1 of 2 would publish the whole model" in told[1]["stage_0_of_32_bits"]
