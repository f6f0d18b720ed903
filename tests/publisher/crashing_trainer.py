"""A trainer that can be killed and started again, for a process of its own."""

from pathlib import Path
from typing import Any

import torch

from chunkstore.posix import PosixStore
from chunkstore.store import Store
from publisher.publisher import Publisher
from tests.publisher.zoo import Zoo, adamw, attach, make, train


def main(place: str, state: str, steps: int, base: str | None = None, published: str | None = None) -> None:
    """Train a Zoo up to step `steps`, publishing every step after saving a checkpoint to `state`, and resume from that.

    The second step is stored whole as well. `place`: the store's directory, or the publisher.yaml of a publisher
    process. `base`: a folder; version 0 refers to the checkpoint in it. `published`: file that ends with the version
    that was reached.
    """
    torch.manual_seed(0)
    config: dict[str, object] = {}
    model = Zoo()
    if base is not None:
        model, folder = make(Path(base))
        config = {"base_checkpoint": str(folder), "refer_to_base": True}
    optimizer = adamw(model, lr=1e-4)
    saved = Path(state)
    done = 0
    if saved.exists():
        checkpoint = torch.load(saved, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        done = checkpoint["step"]
    with _attached(place, model, optimizer, config) as publisher:
        for step in range(done + 1, steps + 1):
            train(model, optimizer, step)
            saved_now = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(saved_now, saved.with_suffix(".tmp"))
            saved.with_suffix(".tmp").replace(saved)
            publisher.publish(step, anchor=step == 2).result()
        publisher.publish(steps).result()
    if published is not None:
        Path(published).write_text(str(publisher.version))


def _attached(place: str, model: Zoo, optimizer: Any, config: dict[str, object]) -> Publisher:
    if place.endswith(".yaml"):
        return Publisher.attach(optimizer, model, place)
    store: Store = PosixStore(Path(place))
    return attach(model, optimizer, store, **config)
