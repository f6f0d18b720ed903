"""What one rank cannot read or is told otherwise, all ranks refuse at once, and say which rank and why."""

import json
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from tests.support.processes import PROCESSES
from tests.trainers.one_rank import PATIENCE, TRAINERS, main, prepare

Told = dict[str, str]

LONGEST = 240.0
assert LONGEST < PATIENCE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each of two ranks has written down what it was told."""
    folder = tmp_path_factory.mktemp("one")
    prepare(folder)
    ranks = [
        PROCESSES.Process(target=main, args=(rank, str(folder), str(folder / "meeting"))) for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    try:
        running = list(ranks)
        while running:
            ended = wait([rank.sentinel for rank in running], LONGEST)
            assert ended, "ranks wait for each other"
            running = [rank for rank in running if rank.exitcode is None]
            assert all(rank.exitcode in (None, 0) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    return folder


@pytest.fixture(scope="module")
def told(folder: Path) -> list[Told]:
    """What attach said, by rank."""
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("trainer", list(TRAINERS))
@pytest.mark.parametrize(
    ("fault", "rank", "words"),
    [
        ("no_checkpoint", 1, "mapping: * holds no *.safetensors file"),
        ("broken_checkpoint_on_rank_0", 0, "mapping: * cannot read base checkpoint file"),
        ("no_config", 1, "config: * no.yaml"),
        ("misspelt_config", 1, "config: * inference_dtipe"),
        ("no_key", 1, "config: * no.key cannot be read"),
        ("no_key_on_rank_0", 0, "config: * no.key cannot be read"),
        ("other_key", 1, "config: * writer 0 signs with ed25519:*, this one with ed25519:"),
        ("unsigned", 1, "config: * writer 0 signs with no key, this one with ed25519:"),
        ("spool", 1, "config: * with `spool` one process feeds the stream"),
        ("other_store", 1, "config: * there is no stream at *other_store-1, and not *other_store-0"),
        ("unwritable_store_on_rank_0", 0, "invalid_key: * a part of this path is an object"),
        ("unreachable_store", 1, "store_unavailable: * http://127.0.0.1:9/"),
        ("unusable_store", 1, "config: * nosuch"),
        ("taken_stream", 0, "mapping: * holds another model"),
    ],
)
def test_all_ranks_refuse_and_name_the_one_that_cannot(
    told: list[Told], trainer: str, fault: str, rank: int, words: str
) -> None:
    kind, *parts = words.split("*")
    for number, one in enumerate(told):
        found = one[f"{trainer}: {fault}"]
        assert found.startswith(kind.strip()), f"rank {number}: {found}"
        for part in parts:
            assert part.strip() in found, f"rank {number}: {found}"
        assert (f"rank {rank} refuses: " in found) == (number != rank), f"rank {number}: {found}"


@pytest.mark.parametrize("trainer", list(TRAINERS))
def test_ranks_that_are_told_the_same_attach(told: list[Told], trainer: str) -> None:
    assert [one[f"{trainer}: right"] for one in told] == ["attached", "attached"]


@pytest.mark.parametrize("trainer", list(TRAINERS))
def test_ranks_that_would_publish_other_dtypes_are_told_apart(told: list[Told], trainer: str) -> None:
    for one in told:
        assert "up.weight is F16 (6, 16) on rank 1, BF16 (6, 16) on rank 0" in one[f"{trainer}: other_dtype"]


def test_what_one_rank_cannot_follow_all_refuse(told: list[Told]) -> None:
    assert "rank 1 refuses: parameter " in told[0]["not_adam"]
    assert all("is stepped by SGD" in one["not_adam"] for one in told)


def test_copies_that_differ_are_refused(told: list[Told]) -> None:
    for one in told:
        assert one["drifted"].startswith("mapping: ")
        assert "rank 1: up.weight differs from what rank 0 holds of it" in one["drifted"]


def test_a_rank_without_a_share_attaches(told: list[Told]) -> None:
    assert [one["few_tensors"] for one in told] == ["attached", "attached"]


@pytest.mark.parametrize("copies", ["shares", "hybrid", "beside_tensor_parallel"])
def test_copies_that_drift_later_are_found_when_asked(folder: Path, copies: str) -> None:
    for rank in range(2):
        before, meanwhile, after = json.loads((folder / f"said-{rank}.json").read_text())[copies]
        assert [before, after] == ["equal", "equal"]
        assert meanwhile.startswith(
            "mapping: the ranks no longer hold the same: rank 1: up.weight differs from what rank 0"
        )
        assert "down." not in meanwhile
