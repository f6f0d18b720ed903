"""One rank of a sharded trainer as a process, over torch.distributed with gloo; it can be told where to die."""

import os
from pathlib import Path
from typing import Any


def main(rank: int, world_size: int, store: str, state: str, steps: int, meeting: str, crash_at: str) -> None:
    """Train up to `steps` from the checkpoint in `state`, publishing each step after saving it, as trainers do."""
    os.environ["DELTASYNC_CRASH_AT"] = crash_at
    import torch
    from torch import distributed

    from chunkstore.posix import PosixStore
    from publisher.group import Writer
    from tests.publisher.ranks import Crew, Model, Rank

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=world_size)
    model, saved, done = Model(), Path(state), 0
    if saved.exists():
        checkpoint = torch.load(saved, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        done = checkpoint["step"]
    me = Rank(model, rank, world_size)
    writer = Writer.of_process_group(me.owned)
    with me.attach(
        PosixStore(Path(store)), writer.run, writers_timeout=60.0, commit_deadline=5.0
    ) as publisher:
        for step in range(done + 1, steps + 1):
            me.step(step)
            everyone: list[Any] | None = [None] * world_size if rank == 0 else None
            distributed.gather_object(me.owned, everyone)
            if everyone is not None:
                save(saved, {"model": Crew.joined(model, everyone), "step": step})
            distributed.barrier()
            publisher.publish(step).result()
        publisher.publish(steps + 1).result()
    distributed.destroy_process_group()


def save(path: Path, checkpoint: object) -> None:
    import torch

    torch.save(checkpoint, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)
