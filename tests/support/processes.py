"""Processes that start fast: forked from one that has imported what they need.

A test process has one such server, whose imports are set before the first start; so here is the one place.
"""

import os
from multiprocessing.context import ForkServerContext, ForkServerProcess


class _Process(ForkServerProcess):
    """Runs in the environment of the moment it was started, not of that in which the server was, by whichever test."""

    _environment: dict[str, str] | None = None

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        assert self._environment is not None
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class _Context(ForkServerContext):
    Process = _Process


PROCESSES = _Context()
PROCESSES.set_forkserver_preload(
    [
        "deltasync.cli",
        "tests.deepspeed.trainer",  # where there is DeepSpeed
        "tests.e2e.contenders",
        "tests.manifest.rivals",
        "tests.megatron.training",  # where there is Megatron-Core
        "tests.publisher.crashing_trainer",
        "tests.publisher.gloo_rank",
        "tests.publisher.ranks",
        "tests.sglang.worker",
        "tests.subscriber.shared_worker",
        "tests.support.warm",
        "tests.trainers.layouts",
    ]
)
