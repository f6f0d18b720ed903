"""A trainer that can be killed and started again: python -m tests.publisher.crashing_trainer STORE STATE STEPS.

Trains a Zoo, publishing every step, saving its own checkpoint before each publish as trainers do, and resumes from it.
"""

import sys
from pathlib import Path

import torch

from chunkstore.posix import PosixStore
from tests.publisher.zoo import Zoo, adamw, attach, train


def main(store: str, state: str, steps: int) -> None:
    torch.manual_seed(0)
    model = Zoo()
    optimizer = adamw(model, lr=1e-4)
    saved = Path(state)
    done = 0
    if saved.exists():
        checkpoint = torch.load(saved, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        done = checkpoint["step"]
    with attach(model, optimizer, PosixStore(Path(store))) as publisher:
        for step in range(done + 1, steps + 1):
            train(model, optimizer, step)
            saved_now = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(saved_now, saved.with_suffix(".tmp"))
            saved.with_suffix(".tmp").replace(saved)
            publisher.publish(step).result()
        publisher.publish(steps).result()
    print(publisher.version)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
