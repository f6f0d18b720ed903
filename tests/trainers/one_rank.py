"""Two ranks of which one cannot begin: it lacks a file, or is told something else. Each writes down how it ended."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import deltasync
from chunkstore.errors import DeltasyncError
from tests.trainers.policies import Small

PATIENCE = 3600.0
"""Seconds that ranks would wait for each other in the store; longer than the test."""


def shared(model: nn.Module) -> tuple[nn.Module, Optimizer, deltasync.Writer | None]:
    """Each rank has all of it, and publishes a share."""
    return DistributedDataParallel(model), AdamW(model.parameters()), deltasync.Writer.of_process_group()


def sharded(model: nn.Module) -> tuple[nn.Module, Optimizer, deltasync.Writer | None]:
    fully_shard(model)
    return model, AdamW(model.parameters()), None


def zero(model: nn.Module) -> tuple[nn.Module, Optimizer, deltasync.Writer | None]:
    whole = DistributedDataParallel(model)
    return whole, ZeroRedundancyOptimizer(whole.parameters(), optimizer_class=AdamW, lr=0.1), None


TRAINERS = {"shared": shared, "sharded": sharded, "zero": zero}


class Probes:
    """One method per fault. Rank 1 has it, or rank 0 where the name says so; returned is what attach gets."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder

    def right(self) -> Any:
        return self._config()

    def no_checkpoint(self) -> Any:
        folder = "base" if self.rank == 0 else "nothing"
        return self._config(base_checkpoint=str(self.folder / folder), inference_dtype=None)

    def broken_checkpoint_on_rank_0(self) -> Any:
        folder = "base" if self.rank == 1 else "broken"
        return self._config(base_checkpoint=str(self.folder / folder), inference_dtype=None)

    def no_config(self) -> Any:
        return self._config() if self.rank == 0 else str(self.folder / "no.yaml")

    def misspelt_config(self) -> Any:
        return self._config() if self.rank == 0 else self._config(inference_dtipe="bfloat16")

    def no_key(self) -> Any:
        key = "signing.key" if self.rank == 0 else "no.key"
        return self._config(signing={"key_file": str(self.folder / key)})

    def no_key_on_rank_0(self) -> Any:
        key = "signing.key" if self.rank == 1 else "no.key"
        return self._config(signing={"key_file": str(self.folder / key)})

    def other_key(self) -> Any:
        key = "signing.key" if self.rank == 0 else "other.key"
        return self._config(signing={"key_file": str(self.folder / key)})

    def unsigned(self) -> Any:
        return (
            self._config(signing={"key_file": str(self.folder / "signing.key")})
            if self.rank
            else self._config()
        )

    def spool(self) -> Any:
        return self._config(spool=str(self.folder / "spool")) if self.rank else self._config()

    def other_store(self) -> Any:
        return self._config(f"other_store-{self.rank}")

    def unwritable_store_on_rank_0(self) -> Any:
        return self._config("unwritable" if self.rank else "file/below")

    def unreachable_store(self) -> Any:
        nowhere = {"url": "s3://bucket/run", "endpoint_url": "http://127.0.0.1:9", "retry_deadline": 0.2}
        return self._config(store=nowhere) if self.rank else self._config()

    def unusable_store(self) -> Any:
        return self._config(store={"url": "nosuch://bucket"}) if self.rank else self._config()

    def taken_stream(self) -> Any:
        """It holds another model, which only the first rank looks at."""
        return self._config("taken")

    def other_dtype(self) -> Any:
        return self._config(inference_dtype="float16" if self.rank else "bfloat16")

    def _config(self, stream: str = "", **changes: Any) -> dict[str, Any]:
        config = {
            "store": {"url": str(self.folder / (stream or "stream"))},
            "inference_dtype": "bfloat16",
            "writers_timeout": PATIENCE,
            "commit_deadline": PATIENCE,
            **changes,
        }
        return {name: value for name, value in config.items() if value is not None}


class Trainers:
    """One method per fault of the trainer itself: what it makes of the model, and returns as the others do."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def not_adam(self) -> tuple[nn.Module, Optimizer, deltasync.Writer | None]:
        model, optimizer, writer = shared(Small())
        return model, SGD(model.parameters(), lr=0.1) if self.rank else optimizer, writer

    def drifted(self) -> tuple[nn.Module, Optimizer, deltasync.Writer | None]:
        model, optimizer, writer = shared(Small())
        with torch.no_grad():
            next(model.parameters())[0, 0] += self.rank
        return model, optimizer, writer

    def few_tensors(self) -> tuple[nn.Module, Optimizer, deltasync.Writer | None]:
        """The second rank has no share."""
        model = nn.Linear(4, 4, bias=False)
        return model, AdamW(model.parameters()), deltasync.Writer.of_process_group()


class Drifts:
    """One method per way to hold copies; returns what to train. The second rank's first parameter is then changed."""

    def __init__(self) -> None:
        self.model = Small()

    def shares(self) -> tuple[nn.Module, Optimizer, deltasync.Writer | None]:
        return shared(self.model)

    def hybrid(self) -> tuple[nn.Module, Optimizer, deltasync.Writer | None]:
        fully_shard(self.model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
        return self.model, AdamW(self.model.parameters()), None

    def beside_tensor_parallel(self) -> tuple[nn.Module, Optimizer, deltasync.Writer | None]:
        """`up`, which the plan leaves out."""
        parallelize_module(self.model, init_device_mesh("cpu", (2,)), {"down": ColwiseParallel()})
        return self.model, AdamW(self.model.parameters(), foreach=False), None


def followed(
    trainer: tuple[nn.Module, Optimizer, deltasync.Writer | None], rank: int, config: Any
) -> list[str]:
    """What `check_copies` says: after a step, after a change on rank 1, and after that was taken back."""
    model, optimizer, writer = trainer
    said: list[str] = []

    def check() -> None:
        try:
            publisher.check_copies()
        except DeltasyncError as error:
            said.append(f"{error.kind}: {error}")
        else:
            said.append("equal")

    with deltasync.Publisher.attach(optimizer, model, config, writer=writer) as publisher:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        check()
        first = next(model.parameters())
        local = first.to_local() if isinstance(first, DTensor) else first
        before = local.detach().clone()
        with torch.no_grad():
            local.view(-1)[0] += rank
        check()
        with torch.no_grad():
            local.copy_(before)
        check()
        assert publisher.publish(1).result() is not None
    return said


def prepare(folder: Path) -> None:
    """What the faults need."""
    from manifest.key_files import generate_key

    for name in ("base", "broken"):
        (folder / name).mkdir()
        save_file(
            {name: p.detach().bfloat16() for name, p in Small().named_parameters()},
            folder / name / "model.safetensors",
        )
    file = folder / "broken" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    for name in ("signing.key", "other.key"):
        generate_key(folder / name)
    (folder / "file").write_text("a file, and no folder")
    model = nn.Linear(3, 3)
    config = {"store": {"url": str(folder / "taken")}, "inference_dtype": "bfloat16"}
    deltasync.Publisher.attach(AdamW(model.parameters()), model, config).close()


def attached(trainer: tuple[nn.Module, Optimizer, deltasync.Writer | None], config: Any) -> str:
    """What became of it."""
    model, optimizer, writer = trainer
    try:
        deltasync.Publisher.attach(optimizer, model, config, writer=writer).close()
    except DeltasyncError as error:
        return f"{error.kind}: {error}"
    return "attached"


def main(rank: int, folder: str, meeting: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_REGION": "us-east-1",
    }
    distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2)
    told = {}
    for kind, make in TRAINERS.items():
        for name in [name for name in vars(Probes) if not name.startswith("_")]:
            probe: Callable[[], Any] = getattr(Probes(rank, Path(folder)), name)
            told[f"{kind}: {name}"] = attached(make(Small()), probe())
            distributed.barrier()
    for name in [name for name in vars(Trainers) if not name.startswith("_")]:
        config = Probes(rank, Path(folder))._config(name)
        told[name] = attached(getattr(Trainers(rank), name)(), config)
        distributed.barrier()
    said = {}
    for name in [name for name in vars(Drifts) if not name.startswith("_")]:
        said[name] = followed(getattr(Drifts(), name)(), rank, Probes(rank, Path(folder))._config(name))
        distributed.barrier()
    Path(folder, f"said-{rank}.json").write_text(json.dumps(said))
    Path(folder, f"told-{rank}.json").write_text(json.dumps(told))
    distributed.destroy_process_group()
