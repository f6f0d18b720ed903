"""One rank of a real torch trainer as a process, over gloo."""

import os
import random
import time
from pathlib import Path
from typing import Any

STEPS, SKIPPED = 12, 5


def main(name: str, rank: int, world_size: int, root: str, meeting: str, crash_at: str) -> None:
    """Train `STEPS` steps from the checkpoint in `root`, if there is one, publishing after 1 to 3 of them.

    Saves the gathered weights of each version as `state-<version>-<step>.pt`, and goes on when that is gone.
    """
    os.environ["DELTASYNC_CRASH_AT"] = crash_at
    import torch
    from torch import distributed
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )
    from torch.optim.lr_scheduler import LambdaLR

    import deltasync
    from tests.trainers.layouts import LAYOUTS, clip
    from tests.trainers.policies import policy

    torch.set_num_threads(1)
    folder, layout = Path(root), LAYOUTS[name]
    distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=world_size)
    torch.manual_seed(1000 + rank // layout.same_data)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model = layout.spread(policy(layout.policy, seed=0).to(layout.dtype), world_size)
    done, saved = 0, folder / "trainer.pt"
    if saved.exists():
        checkpoint = torch.load(saved, weights_only=True)
        done = checkpoint["step"]
        set_model_state_dict(model, checkpoint["model"], options=StateDictOptions(full_state_dict=True))
    optimizer = layout.optimizer(model)
    scheduler = LambdaLR(optimizer, lambda step: 1.0 / (1 + step % 4))
    publisher = None
    if layout.everyone or rank == 0:
        publisher = deltasync.Publisher.attach(
            optimizer, model, settings(folder, layout.config), writer=layout.writer()
        )
    chance, left = random.Random(7 + done), 0

    def publish(step: int) -> None:
        state: dict[str, Any] = get_model_state_dict(model, options=full)
        if rank == 0:
            save(saved, {"model": state, "step": step})
        distributed.barrier()
        if publisher is None:
            distributed.barrier()
            return
        commit = publisher.publish(step).result()
        version = publisher.version if commit is None else commit.version
        if rank == 0:
            asked = folder / f"state-{version}-{step}.pt"
            save(asked, layout.truth(model, state))
            await_absence(asked)
        distributed.barrier()

    if done == 0:
        publish(0)
    for step in range(done + 1, STEPS + 1):
        optimizer.zero_grad()
        model(torch.randint(0, 500, (2, 24))).backward()
        clip(model, 1.0)
        if step != SKIPPED:  # as after gradients that are not finite
            optimizer.step()
        scheduler.step()
        left = (left or chance.randint(1, 3)) - 1
        if not left:
            publish(step)
    publish(STEPS + 1)
    if publisher is not None:
        publisher.close()
    distributed.destroy_process_group()


def settings(folder: Path, more: dict[str, Any] | None) -> dict[str, Any]:
    """Of a publisher."""
    return {
        "store": {"url": str(folder / "stream")},
        "inference_dtype": "bfloat16",
        "writers_timeout": 60.0,
        "commit_deadline": 5.0,
        **(more or {}),
    }


def save(path: Path, value: object) -> None:
    import torch

    torch.save(value, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def await_absence(path: Path) -> None:
    """Until the test has looked at it."""
    deadline = time.monotonic() + 60
    while path.exists():
        assert time.monotonic() < deadline, f"nobody takes {path}"
        time.sleep(0.005)
