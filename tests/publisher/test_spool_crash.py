"""kill −9 of either side while files in the spool come and go: the next start leaves none of them behind."""

from pathlib import Path

import pytest

from tests.publisher import crashing_trainer
from tests.publisher.sidecars import sidecar_thread, write_config
from tests.support.crashes import assert_nothing_leaks, command, dies_at, succeeds

STEPS = 2


def train(config: Path) -> tuple[str, str, int]:
    return str(config), str(config.with_name("trainer.pt")), STEPS


def check(config: Path) -> None:
    assert [path.name for path in (config.parent / "spool").iterdir()] == ["publisher.lock"]
    assert_nothing_leaks(config.parent / "store")


@pytest.mark.parametrize(
    "point",
    [
        "spool.before_state",
        "spool.after_state",
        "spool.before_layout",
        "spool.after_layout",
        "spool.mid_remove:1",
        "spool.mid_remove:2",
        "spool.mid_remove:3",
    ],
)
def test_a_trainer_killed_while_it_shares_its_state_or_takes_it_back(point: str, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with sidecar_thread(config):
        dies_at(point, crashing_trainer.main, *train(config))
        succeeds(crashing_trainer.main, *train(config))
    check(config)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_publisher_process_killed_while_it_removes_a_dead_trainers_state(nth: int, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    dies_at("spool.after_layout", crashing_trainer.main, *train(config))
    dies_at(f"spool.mid_remove:{nth}", command, "publisher", "run", "-c", str(config))
    with sidecar_thread(config):
        succeeds(crashing_trainer.main, *train(config))
    check(config)
