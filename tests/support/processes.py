"""Processes that start fast: forked from one that has imported what they need.

A test process has one such server, whose imports are set before the first start; so here is the one place.
"""

import multiprocessing

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "deltasync.cli",
        "tests.deepspeed.trainer",  # where there is DeepSpeed
        "tests.e2e.contenders",
        "tests.manifest.rivals",
        "tests.publisher.crashing_trainer",
        "tests.publisher.gloo_rank",
        "tests.publisher.ranks",
        "tests.subscriber.shared_worker",
        "tests.support.warm",
        "tests.trainers.layouts",
    ]
)
