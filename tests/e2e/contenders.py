"""Trainers that contend for one stream through a store that cannot be relied on, each a process that may be killed."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.optim import AdamW

from chunkstore.errors import DeltasyncError, StoreError
from chunkstore.retry import Backoff, RetryStore
from chunkstore.s3 import S3Store
from manifest.errors import CommitUnknown, Fenced
from publisher.publisher import Publisher
from tests.support.fault_proxy import CLIENT

_BACKOFF = Backoff(first=0.01, longest=0.2, deadline=20.0)


@dataclass(frozen=True)
class Said:
    """What a trainer was told of a version.

    `what`: `won`, `fenced` or `unknown`; or, of no version, the kind of error that kept it from starting.
    `manifest`, `weights`: SHA-256 of the committed manifest, and of the trainer's own bf16 weights when it published.
    `at`: when, by this machine's monotonic clock.
    """

    what: str
    version: int = -1
    manifest: str = ""
    weights: str = ""
    at: float = field(default_factory=time.monotonic)


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(70, 90), nn.Linear(90, 30))


def weights_of(module: nn.Module) -> str:
    state = module.state_dict()
    bits = [state[name].bfloat16().view(torch.int16).numpy().tobytes() for name in sorted(state)]
    return hashlib.sha256(b"".join(bits)).hexdigest()


def contend(bucket: str, prefix: str, endpoint: str, name: str, seed: int, versions: int, told: Path) -> None:
    """Attach, publish until `versions` are committed, and append what is said to `told`; the end when fenced."""
    os.environ[CLIENT] = name
    torch.set_num_threads(1)
    store = RetryStore(S3Store(bucket, prefix, endpoint_url=endpoint, path_style=True), _BACKOFF)
    config = {
        "store": {"url": "memory://unused"},
        "inference_dtype": "bfloat16",
        "detect": "snapshot",
        "commit_deadline": 0.01,
    }
    model = network(seed)
    optimizer = AdamW(model.parameters(), lr=1e-4)
    with told.open("a", buffering=1) as file:

        def say(said: Said) -> None:
            file.write(json.dumps(asdict(said)) + "\n")

        try:
            publisher = Publisher.attach(optimizer, model, config, store=store)
        except DeltasyncError as error:
            say(Said(error.kind))
            return
        say(Said("won", publisher.version))
        try:
            _publish(publisher, model, optimizer, versions, say)
        except Fenced:
            say(Said("fenced", publisher.version + 1))


def _publish(
    publisher: Publisher, model: nn.Module, optimizer: AdamW, versions: int, say: Callable[[Said], None]
) -> None:
    committed = 0
    while committed < versions:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        try:
            handle = publisher.publish()
            weights = weights_of(model)
            commit = handle.result()
        except CommitUnknown:
            say(Said("unknown", publisher.version + 1))
        except StoreError:
            pass  # an upload failed: the next version has its changes
        else:
            assert commit is not None, "every step changes something"
            say(Said("won", commit.version, hashlib.sha256(commit.manifest.data).hexdigest(), weights))
            committed += 1
    publisher.close()
