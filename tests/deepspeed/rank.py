"""One rank of a real DeepSpeed trainer as a process, over gloo."""

import os
import random
from pathlib import Path

from tests.trainers.rank import SKIPPED, STEPS, await_absence, save


def main(name: str, rank: int, world_size: int, root: str, meeting: str, crash_at: str) -> None:
    """As `tests.trainers.rank.main`; what is saved is what DeepSpeed's own `save_16bit_model` writes."""
    os.environ["DELTASYNC_CRASH_AT"] = crash_at
    import torch
    from torch import distributed

    import deltasync
    from tests.deepspeed.layouts import LAYOUTS
    from tests.deepspeed.trainer import Trainer

    torch.set_num_threads(1)
    folder, layout = Path(root), LAYOUTS[name]
    distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=world_size)
    saved = folder / "trainer.pt"
    weights, done = None, 0
    if saved.exists():
        checkpoint = torch.load(saved, weights_only=True)
        weights, done = checkpoint["model"], checkpoint["step"]
    trainer = Trainer(layout, weights)
    config = {
        "store": {"url": str(folder / "stream")},
        "inference_dtype": layout.inference_dtype,
        "writers_timeout": 60.0,
        "commit_deadline": 5.0,
        **layout.publisher,
    }
    explained = deltasync.explain(trainer.optimizer, trainer.engine, config)
    assert (explained.kind, explained.problems) == (layout.kind, ())
    publisher = deltasync.Publisher.attach(trainer.optimizer, trainer.engine, config)
    chance, left = random.Random(7 + done), 0

    def publish(step: int) -> None:
        state = trainer.state(folder)
        if rank == 0:
            save(saved, {"model": state, "step": step})
        distributed.barrier()
        commit = publisher.publish(step).result()
        version = publisher.version if commit is None else commit.version
        if rank == 0:
            asked = folder / f"state-{version}-{step}.pt"
            save(asked, state)
            await_absence(asked)
        distributed.barrier()

    if done == 0:
        publish(0)
    for step in range(done + 1, STEPS + 1):
        trainer.step(skipped=step == SKIPPED)
        left = left or chance.randint(1, 3)
        left -= 1
        if not left:
            publish(step)
    publish(STEPS + 1)
    publisher.close()
    distributed.destroy_process_group()
