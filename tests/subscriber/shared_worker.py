"""A rollout process whose weights outlive it: a module in file-backed shared memory."""

import asyncio
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from chunkstore.dtypes import WIDTH
from chunkstore.open import StoreConfig
from chunkstore.torch_dtypes import TORCH_DTYPES
from subscriber.config import SubscriberConfig
from subscriber.daemon import Subscriber
from subscriber.fleet import Fleet
from subscriber.torch_engine import TorchEngine
from tests.subscriber.parts import put_tensor

BOOT_ID = "one-life"


def shared_module(file: Path, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]) -> nn.Module:
    """Tensors of these shapes, BF16 unless `dtypes` says otherwise, that lie in `file` one after the other."""
    module = nn.Module()
    sizes = {name: prod(shape) * WIDTH[dtypes.get(name, "BF16")] for name, shape in shapes.items()}
    places = {name: (size + 63) // 64 * 64 for name, size in sizes.items()}
    memory = torch.from_file(str(file), shared=True, size=sum(places.values()), dtype=torch.uint8)
    start = 0
    for name, shape in shapes.items():
        kind = TORCH_DTYPES[dtypes.get(name, "BF16")]
        put_tensor(module, name, memory[start : start + sizes[name]].view(kind).view(shape))
        start += places[name]
    return module


def config_for(options: dict[str, Any]) -> SubscriberConfig:
    return SubscriberConfig(
        store=StoreConfig(url=options["store"]),
        id="worker",
        poll_interval=0.02,
        state_dir=Path(options["state"]),
        http=None,
    )


def subscriber_for(options: dict[str, Any]) -> tuple[nn.Module, Subscriber]:
    """`options`: `weights` (file), `store` and `state` (directories), `shapes`, `dtypes`."""
    module = shared_module(Path(options["weights"]), options["shapes"], options["dtypes"])
    return module, Subscriber(config_for(options), TorchEngine(module, boot_id=BOOT_ID))


def fleet_for(options: dict[str, Any]) -> tuple[dict[str, nn.Module], Fleet]:
    """The same for several engines, `options["names"]`; all tell the same boot id."""
    modules = {
        name: shared_module(Path(f"{options['weights']}-{name}"), options["shapes"], options["dtypes"])
        for name in options["names"]
    }
    engines = {name: TorchEngine(module, boot_id=BOOT_ID) for name, module in modules.items()}
    return modules, Fleet(config_for(options), engines)


def run_once(options: dict[str, Any]) -> None:
    """Catch up with the stream, in a process of its own."""
    daemon = fleet_for(options)[1] if "names" in options else subscriber_for(options)[1]
    asyncio.run(daemon.run(once=True))
