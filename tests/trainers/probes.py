"""Two ranks that try what has to be refused, or only explained; each writes down what it was told."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as right
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import deltasync
from chunkstore.digest_torch import digest
from chunkstore.errors import DeltasyncError
from tests.support.processes import PROCESSES
from tests.trainers.layouts import ddp, zero
from tests.trainers.policies import Small, adapted, policy

PLACED = "publisher.adapters.sharded.compute_local_shape_and_global_offset"
CONFIG = {"inference_dtype": "bfloat16", "writers_timeout": 60.0}


class Probes:
    """One method per probe; what it returns is shown, and so is what it raises."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder

    def attach(
        self, optimizer: Any, model: nn.Module, writer: deltasync.Writer | None = None, **config: Any
    ) -> str:
        settings = {"store": {"url": str(self.folder / "nobody-writes-here")}, **CONFIG, **config}
        deltasync.Publisher.attach(optimizer, model, settings, writer=writer).close()
        return "attached"

    def shifted(self) -> str:
        """Rank 1 takes its rows for others."""
        model = Small()
        fully_shard(model)

        def wrong(*args: Any) -> Any:
            shape, at = right(*args)
            return shape, (at[0] - 1, *at[1:]) if self.rank else at

        with mock.patch(PLACED, wrong):
            return self.attach(AdamW(model.parameters()), model)

    def beyond(self) -> str:
        """The same beyond the end."""
        model = Small()
        fully_shard(model)

        def wrong(*args: Any) -> Any:
            shape, at = right(*args)
            return shape, (at[0] + 100, *at[1:]) if self.rank else at

        with mock.patch(PLACED, wrong):
            return self.attach(AdamW(model.parameters()), model)

    def unasked(self) -> str:
        """PEFT layers, and no word about what of the model is meant."""
        model = adapted(1)
        fully_shard(model)
        return self.attach(AdamW(model.parameters()), model)

    def merged_shards(self) -> str:
        model = adapted(1)
        fully_shard(model)
        return self.attach(AdamW(model.parameters()), model, lora="merged")

    def twice(self) -> str:
        """Both ranks take the first shard for theirs: one claims it twice, nobody the other."""
        model = Small()
        fully_shard(model)
        with mock.patch(
            PLACED,
            lambda *args: (right(*args)[0], (0,) * len(args[0])),
        ):
            return str(deltasync.explain(AdamW(model.parameters()), model))

    def drifted(self) -> str:
        """Replicated, stepped by both, and not the same."""
        model, mesh = Small(), init_device_mesh("cpu", (2,))
        for name, parameter in list(model.up.named_parameters()):
            setattr(model.up, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()])))
        weight = model.up.weight
        assert isinstance(weight, DTensor)
        with torch.no_grad():
            weight.to_local()[0, 0] += self.rank
        return self.attach(AdamW(model.parameters()), model)

    def before(self) -> str:
        """The optimizer was made of what fully_shard replaced."""
        model = Small()
        optimizer = AdamW(model.parameters())
        fully_shard(model)
        return self.attach(optimizer, model)

    def first_fsdp(self) -> str:
        model = FullyShardedDataParallel(Small(), device_id=torch.device("cpu"))
        return self.attach(AdamW(model.parameters()), model)

    def spool(self) -> str:
        model = Small()
        fully_shard(model)
        return self.attach(AdamW(model.parameters()), model, spool=str(self.folder))

    def not_adam(self) -> str:
        model = Small()
        fully_shard(model)
        return str(deltasync.explain(torch.optim.SGD(model.parameters(), lr=0.1), model))

    def other_tensors(self) -> str:
        """As pipeline stages have: gathering would wait for a rank that does not have the tensor."""
        model = Small()
        if self.rank:
            model.extra = nn.Linear(4, 4)
        fully_shard(model)
        return self.attach(AdamW(model.parameters()), model)

    def one_cannot(self) -> str:
        """Only one rank's optimizer is refused."""
        model = Small()
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if self.rank else AdamW(model.parameters())
        return self.attach(optimizer, model)

    def one_steps_nothing(self) -> str:
        model = Small()
        fully_shard(model)
        return self.attach(AdamW([nn.Parameter(torch.ones(2))] if self.rank else model.parameters()), model)

    def partly_before(self) -> str:
        """The optimizer was made of something that fully_shard replaced, and of shards."""
        model = Small()
        fully_shard(model.up)
        optimizer = AdamW(model.parameters())
        fully_shard(model)
        return self.attach(optimizer, model)

    def sharded_later(self) -> str:
        model = Small()
        optimizer = AdamW(model.parameters())
        config = {"store": {"url": str(self.folder / f"alone-{self.rank}")}, **CONFIG}
        with deltasync.Publisher.attach(optimizer, model, config) as publisher:
            fully_shard(model)
            return str(publisher.publish(1).result())

    def other_place(self) -> str:
        """A writer that is not the rank's place in the process group."""
        model = Small()
        fully_shard(model)
        writer = deltasync.Writer(self.rank, 3, "run")
        return str(deltasync.explain(AdamW(model.parameters()), model, writer=writer))

    def unfrozen(self) -> str:
        """ZeroRedundancyOptimizer is given more to step after attach, and deals it out anew."""
        model = Small()
        optimizer = ZeroRedundancyOptimizer(list(model.up.parameters()), optimizer_class=AdamW, lr=0.1)
        config = {"store": {"url": str(self.folder / "unfrozen")}, **CONFIG}
        with deltasync.Publisher.attach(optimizer, model, config) as publisher:
            optimizer.add_param_group({"params": list(model.down.parameters())})
            model.down(model.up(torch.ones(2, 16))).square().mean().backward()
            optimizer.step()
            commit = publisher.publish(1).result()
            assert commit is not None
            found = dict(model.named_parameters())
            return str(
                [
                    int(commit.manifest.digest_array[number]) == digest(name, found[name].detach().bfloat16())
                    for name, number in publisher.catalog.ids.items()
                ]
            )

    def second_rank(self) -> str:
        """DDP without a word about writers: the first rank would publish."""
        model = DistributedDataParallel(Small())
        return deltasync.explain(AdamW(model.parameters()), model).kind

    def second_rank_compiled(self) -> str:
        """The same below what torch.compile returns, which is no DistributedDataParallel itself."""
        model: Any = torch.compile(DistributedDataParallel(Small()), backend="eager")
        return deltasync.explain(AdamW(model.parameters()), model).kind

    def second_rank_of_a_part(self) -> str:
        """The same below a module of the trainer's own."""
        model = nn.ModuleDict({"policy": DistributedDataParallel(Small())})
        return deltasync.explain(AdamW(model.parameters()), model).kind

    def second_rank_unwrapped(self) -> str:
        """What DDP wraps tells nothing of DDP: legitimate on the first rank, and elsewhere with another stream."""
        model = DistributedDataParallel(Small()).module
        return deltasync.explain(AdamW(model.parameters()), model).kind

    def copies_alone(self) -> str:
        """The first rank has attached alone: it has nobody to compare copies with."""
        model = DistributedDataParallel(Small())
        return self._copies_of_first(AdamW(model.parameters()), model)

    def copies_unwrapped(self) -> str:
        model = DistributedDataParallel(Small()).module
        return self._copies_of_first(AdamW(model.parameters()), model)

    def _copies_of_first(self, optimizer: AdamW, model: nn.Module) -> str:
        if self.rank:
            return "not attached"
        config = {"store": {"url": str(self.folder / "first")}, **CONFIG}
        with deltasync.Publisher.attach(optimizer, model, config) as publisher:
            publisher.check_copies()
        return "said to be equal"

    def with_another(self) -> str:
        model = DistributedDataParallel(Small())
        return self.attach([zero(model), AdamW([nn.Parameter(torch.ones(3))])], model)

    def zero(self) -> str:
        model = ddp(policy("even", 0), 2)
        explained = deltasync.explain(zero(model), model)
        return f"{explained.kind} {explained.ranks} {explained.problems} {sorted(explained.sources)}"

    def strangers(self) -> str:
        """An optimizer of another model: on no rank would anything ever change."""
        return self.attach(zero(Small()), DistributedDataParallel(Small()))

    def merged_drifted(self) -> str:
        """Adapters of the same shape over the same base, on each rank another."""
        model = adapted(1 + self.rank)
        writer = deltasync.Writer.of_process_group()
        return self.attach(AdamW(model.parameters()), model, writer=writer, lora="merged")

    def columns(self) -> str:
        model = Small()
        fully_shard(model, shard_placement_fn=lambda p: Shard(p.ndim - 1))
        return str(deltasync.explain(AdamW(model.parameters()), model))

    def single_column(self) -> str:
        """Of three columns the second rank has one."""
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
        explained = deltasync.explain(AdamW(model.parameters()), model)
        return f"{explained.problems}, {[f.elements for f in explained.found if f.name == '1.weight']}"

    def cut_twice(self) -> str:
        """A single row, among tensor-parallel ranks and then among FSDP's."""
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 5))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        return str(deltasync.explain(AdamW(model.parameters()), model).problems)

    def part_after_evaluation(self) -> str:
        """A part that is no FSDP module itself, while the whole parameters of its root are there."""
        model = nn.Sequential(nn.Sequential(nn.Linear(16, 6)))
        fully_shard(model)
        optimizer = AdamW(model.parameters())
        with torch.no_grad():
            model(torch.ones(2, 16))
        return self.attach(optimizer, model[0])

    def outside(self) -> str:
        """Only a part is sharded; each rank steps the rest by gradients of its own."""
        model = Small()
        fully_shard(model.up)
        with torch.no_grad():
            model.down.weight[0] += self.rank
        return self.attach(AdamW(model.parameters(), foreach=False), model)

    def after_evaluation(self) -> str:
        """A forward without a backward leaves whole parameters in the root."""
        model = Small()
        fully_shard(model)
        model.forward = lambda x: model.down(model.up(x))
        optimizer = AdamW(model.parameters())
        with torch.no_grad():
            model(torch.ones(2, 16))
        explained = deltasync.explain(optimizer, model)
        return f"{explained.problems} {explained.sources}"


def main(rank: int, folder: str, meeting: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2)
    ask(Probes(rank, Path(folder)))


def ask(probes: Any) -> None:
    """Write down what each of the `probes` of a rank tells, in their `folder`; the end of torch.distributed."""
    told = {}
    for name in (name for name in vars(type(probes)) if not name.startswith("_") and name != "attach"):
        probe: Callable[[], str] = getattr(probes, name)
        try:
            told[name] = probe()
        except DeltasyncError as error:
            told[name] = f"{error.kind}: {error}"
        distributed.barrier()
    Path(probes.folder, f"told-{probes.rank}.json").write_text(json.dumps(told))
    distributed.destroy_process_group()


def answers(main: Callable[[int, str, str], None], folder: Path) -> list[dict[str, str]]:
    """What each of two ranks that run `main` was told, by probe."""
    ranks = [
        PROCESSES.Process(target=main, args=(rank, str(folder), str(folder / "meeting"))) for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(200)
        rank.kill()
    assert [rank.exitcode for rank in ranks] == [0, 0]
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(2)]
