"""Two ranks that try with ZeRO-3 what has to be refused, or may look different from its usual; each writes down what
it was told.
"""

import gc
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import distributed, nn
from torch.optim import SGD, AdamW, Optimizer

import deltasync
from chunkstore.digest_torch import digest
from chunkstore.errors import DeltasyncError
from publisher.adapters.deepspeed_zero3 import _cut as right
from publisher.commit import Commit
from publisher.publisher import Publisher
from tests.deepspeed.layouts import BF16, CPU, zero3
from tests.trainers.probes import ask

CUT = "publisher.adapters.deepspeed_zero3._cut"
SETTINGS = BF16 | zero3()
CONFIG = {"inference_dtype": "bfloat16", "writers_timeout": 60.0}


class Small(nn.Module):
    """15 rows, which two ranks do not share evenly; the first layer is used twice, the last one may be frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.again, self.down, self.last = (
            nn.Linear(8, 15),
            nn.Linear(8, 15),
            nn.Linear(15, 8),
            nn.Linear(8, 3),
        )
        self.again.weight = self.up.weight
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.down(self.up(x) + self.again(x)))
        return y.square().mean()


class Probes:
    """One method per probe; what it returns is shown, and so is what it raises."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder

    def table(self) -> str:
        engine = self._engine()
        return str(deltasync.explain(engine.optimizer, engine))

    def shifted(self) -> str:
        """Rank 1 takes its elements for others."""
        return self._with_cut(lambda start: start - self.rank)

    def beyond(self) -> str:
        """The same beyond the end."""
        return self._with_cut(lambda start: start + 1000 * self.rank)

    def swapped(self) -> str:
        """Two parameters are taken for each other in what is stepped."""
        engine = self._engine()
        zero, down = engine.optimizer, engine.module.down
        one, other = (zero.get_param_id(p) for p in (down.weight, down.bias))
        places = zero.grad_position
        places[one], places[other] = places[other], places[one]
        return self._attach(engine)

    def moved(self) -> str:
        """One parameter is taken for its neighbour's elements."""
        engine = self._engine()
        zero = engine.optimizer
        zero.grad_position[zero.get_param_id(engine.module.down.bias)][1] -= 1
        return self._attach(engine)

    def stale(self) -> str:
        """The weights were loaded after deepspeed.initialize, which made the masters."""
        engine = self._engine()
        with GatheredParameters(engine.module.down.weight, modifier_rank=0), torch.no_grad():
            engine.module.down.weight.add_(1.0)
        return self._attach(engine)

    def all_at_once(self) -> str:
        """What a rank cannot do here for want of hardware, as DeepSpeed would say it."""
        engine = self._engine()
        zero = engine.optimizer
        zero.zenflow = zero.swap_optimizer = zero.params_in_nvme_and_cpu = True
        zero.zero_quantized_nontrainable_weights = zero.parameter_offload.zero_quantized_weights = True
        zero.zero_hpz_partition_size = 2
        return self._attach(engine)

    def another_kind(self) -> str:
        engine = self._engine()
        engine.optimizer.__class__ = type("SuperOffload", (DeepSpeedZeroOptimizer_Stage3,), {})
        return self._attach(engine)

    def another_model(self) -> str:
        config = {"store": {"url": str(self.folder / "nobody-writes-here")}, **CONFIG}
        Publisher.attach(self._engine().optimizer, Small(), config).close()
        return "attached"

    def other_ranks(self) -> str:
        """As experts are cut among some of the ranks."""
        engine = self._engine()
        groups = [distributed.new_group([rank]) for rank in range(2)]
        engine.module.down.weight.ds_process_group = groups[self.rank]
        return self._attach(engine)

    def in_place(self) -> str:
        """fp32 parameters that are stepped themselves: their steps are undone."""
        with self._without_masters(AdamW) as engine, self._publisher(engine, "in-place") as publisher:
            return self._published(engine, publisher)

    def in_place_by_another(self) -> str:
        with self._without_masters(SGD) as engine:
            return self._attach(engine)

    def two_optimizers(self) -> str:
        """With `ratio` a part of the sub groups is stepped by a second optimizer, on the accelerator."""
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        engine = self._engine(DeepSpeedCPUAdam, BF16 | zero3(**_partly(CPU)))
        assert len(engine.optimizer.fp32_partitioned_groups_flat) > 1
        engine.optimizer.subgroup_to_device[0] = "an accelerator"
        with self._publisher(engine, "two") as publisher:
            return self._published(engine, publisher)

    def edited(self) -> str:
        """Somebody writes the weights between the step and the publish, as DeepSpeed wants it."""
        engine = self._engine()
        with self._publisher(engine, "edited") as publisher:
            self._step(engine)
            with GatheredParameters(engine.module.down.weight, modifier_rank=0), torch.no_grad():
                engine.module.down.weight.clamp_(max=0.0)
            return self._published(engine, publisher)

    def masters_offloaded(self) -> str:
        """As engine.offload_states of hp_params does, for what shares the device with the trainer."""
        engine = self._engine()
        masters = engine.optimizer.fp32_partitioned_groups_flat
        memory = [_move(master) for master in masters]
        with self._publisher(engine, "masters") as publisher:
            told = self._published(engine, publisher)
            for master in masters:
                _move(master)
            gc.collect()
            kept = sum(there() is not None for there in memory)
            return f"{kept} kept, {told}; {self._published(engine, publisher)}"

    def offloaded_between(self) -> str:
        """The 16-bit shards leave; they come back to other memory, and training goes on."""
        engine = self._engine(frozen=False)  # DeepSpeed itself fails to offload them otherwise
        with self._publisher(engine, "offloaded") as publisher:
            self._step(engine)
            engine.offload_states(include=[OffloadStateTypeEnum.lp_params])
            try:
                publisher.publish(engine.global_steps)
                told = "published"
            except DeltasyncError as error:
                told = f"{error.kind}: {error}"
            engine.reload_states()
            return f"{told}; {self._published(engine, publisher)}"

    def attached_while_offloaded(self) -> str:
        engine = self._engine(frozen=False)
        engine.offload_states(include=[OffloadStateTypeEnum.lp_params])
        return self._attach(engine)

    def _engine(self, kind: Any = AdamW, config: dict[str, Any] = SETTINGS, *, frozen: bool = True) -> Any:
        model = Small()
        model.last.requires_grad_(not frozen)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer: Optimizer = kind(
            [{"params": trained[:2], "weight_decay": 0.1}, {"params": trained[2:]}], lr=1e-3
        )
        settings = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **config,
        }
        return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]

    @contextmanager
    def _without_masters(self, kind: Any) -> Iterator[Any]:
        """As DeepSpeed makes fp32 engines where it takes its device and its buffers' for one."""
        engine = self._engine(kind, zero3())
        zero = engine.optimizer
        zero.fp32_partitioned_groups_flat[:] = [
            flat.requires_grad_() for flat in zero.fp16_partitioned_groups_flat
        ]
        yield engine

    def _with_cut(self, shift: Any) -> str:
        def wrong(*args: Any) -> Any:
            start, count = right(*args)
            return shift(start), count

        with mock.patch(CUT, wrong):
            return self._attach(self._engine())

    def _attach(self, engine: Any) -> str:
        self._publisher(engine, "nobody-writes-here").close()
        return "attached"

    def _publisher(self, engine: Any, name: str) -> Publisher:
        config = {"store": {"url": str(self.folder / name)}, **CONFIG}
        return Publisher.attach(engine.optimizer, engine, config)

    def _step(self, engine: Any) -> None:
        engine.backward(engine(torch.ones(2, 8, dtype=engine.module.up.weight.dtype)))
        engine.step()

    def _published(self, engine: Any, publisher: Publisher) -> str:
        """Two more steps are published: sources, blocks that were not proved, and tensors that are not the engine's."""
        self._step(engine)
        self._step(engine)
        commit = publisher.publish(engine.global_steps).result()
        assert commit is not None
        stats = commit.manifest.stats
        return f"{sorted(stats.sources)} {stats.unproved_blocks} unproved, {self._wrong(engine, publisher, commit)}"

    def _wrong(self, engine: Any, publisher: Publisher, commit: Commit) -> str:
        """How many tensors of a version are not what DeepSpeed itself gathers."""
        weights = engine._zero3_consolidated_16bit_state_dict() or {}
        wrong = [
            name
            for name, number in publisher.catalog.ids.items()
            if self.rank == 0
            and int(commit.manifest.digest_array[number]) != digest(name, weights[name].bfloat16())
        ]
        return f"{wrong} wrong"


def _move(tensor: torch.Tensor) -> "weakref.ref[object]":
    """Give it other memory, which lives as long as what is returned refers to something."""
    memory = tensor.detach().numpy().copy()
    tensor.data = torch.from_numpy(memory)
    return weakref.ref(memory)


def _partly(offload: dict[str, Any]) -> dict[str, Any]:
    return {name: {**options, "ratio": 0.5} for name, options in offload.items()}


def main(rank: int, folder: str, meeting: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE="2")
    distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2)
    ask(Probes(rank, Path(folder)))
