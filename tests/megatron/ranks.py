"""Ranks of Megatron-Core as processes over gloo, forked from one that has imported it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.support.processes import PROCESSES

_PATIENCE = 120.0


def rank_main(rank: int, meeting: str, layout: Any, main: Callable[..., None], args: Sequence[Any]) -> None:
    """In the process of one rank."""
    import torch
    from torch import distributed

    from tests.megatron.models import begin, cpu

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=layout.world_size)
    with cpu.on_cpu():
        begin(layout)
        main(layout, *args)
        distributed.barrier()
    distributed.destroy_process_group()


@contextmanager
def ranks(meeting: Path, layout: Any, main: Callable[..., None], *args: Any) -> Iterator[Callable[[], None]]:
    """All ranks of `layout` run `main(layout, *args)`; on leaving, all must have ended well.

    Yields what to call while waiting for them: it raises if one has failed.
    """
    processes = [
        PROCESSES.Process(target=rank_main, args=(rank, str(meeting), layout, main, args))
        for rank in range(layout.world_size)
    ]

    def check() -> None:
        failed = [p.name for p in processes if p.exitcode not in (None, 0)]
        assert not failed, f"failed: {failed}; their stderr says why"

    try:
        for process in processes:
            process.start()
        yield check
        running = list(processes)
        while running:
            ended = wait([p.sentinel for p in running], _PATIENCE)
            assert ended, f"{len(running)} ranks do not end"
            running = [p for p in running if p.sentinel not in ended]
            check()
    finally:
        for process in processes:
            process.kill()
            process.join()
