"""A trainer of several ranks, ZeRO style: each owns a flat range of all parameters, with an AdamW of its own."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim import AdamW

from chunkstore.store import Store
from manifest.schema import Manifest
from publisher.commit import Commit
from publisher.group import Owned, Writer
from publisher.publisher import Publisher
from tests.publisher.zoo import published

SHAPES = {"embed": (50, 64), "layers.0.w": (150, 120), "layers.1.w": (300, 130), "norm": (64,), "scale": ()}
Bits = dict[str, npt.NDArray[np.unsignedinteger]]


class Model(nn.Module):
    """Parameters of several sizes, a frozen one, and a buffer; σ 0.02 as trained weights have."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList([nn.Module(), nn.Module()])
        for name, shape in SHAPES.items():
            owner, _, last = name.rpartition(".")
            values = torch.randn(shape, generator=generator) * 0.02
            self.get_submodule(owner).register_parameter(last, nn.Parameter(values))
        self.frozen = nn.Parameter(torch.randn(7, generator=generator), requires_grad=False)
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))


def gradient(name: str, step: int) -> torch.Tensor:
    """The whole gradient of one parameter at one step: all ranks see the same, whatever their number."""
    seed = sum(map(ord, name)) + 1000 * step
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed)).reshape(-1) * 1e-3


class Rank:
    """One rank: flat fp32 ranges of its own, stepped by its own AdamW. Rank 0 also owns what nothing steps."""

    def __init__(self, model: Model, rank: int, world_size: int, *, lr: float = 1e-5) -> None:
        self.rank, self.world_size, self.model = rank, world_size, model
        self.owned: list[Owned] = []
        total = sum(p.numel() for n, p in model.named_parameters() if n in SHAPES)
        low, high = total * rank // world_size, total * (rank + 1) // world_size
        names = list(SHAPES)
        edges = [0, *accumulate(model.get_parameter(n).numel() for n in names)]
        for name, (first, last) in zip(names, pairwise(edges), strict=True):
            start, stop = max(low, first) - first, min(high, last) - first
            if start < stop:
                values = model.get_parameter(name).detach().reshape(-1)[start:stop].clone()
                self.owned.append(Owned(name, nn.Parameter(values), start))
        self.optimizer = AdamW([one.tensor for one in self.owned], lr=lr, foreach=False)
        if rank == 0:
            self.owned += [Owned("frozen", model.frozen), Owned("count", model.get_buffer("count"))]

    def attach(self, store: Store, run: str, **config: Any) -> Publisher:
        settings = {
            "store": {"url": "memory://unused"},
            "writers_timeout": 20.0,
            "commit_deadline": 0.3,
            **config,
        }
        if "base_checkpoint" not in config:
            settings["inference_dtype"] = "bfloat16"
        writer = Writer(self.rank, self.world_size, run, self.owned)
        return Publisher.attach(self.optimizer, self.model, settings, store=store, writer=writer)

    def step(self, step: int) -> None:
        for one in self.owned:
            if one.name in SHAPES:
                one.tensor.grad = gradient(one.name, step)[one.start : one.start + one.tensor.numel()]
        self.optimizer.step()
        if self.rank == 0:
            self.model.get_buffer("count")[1] += 1


class Crew:
    """All ranks of one trainer in this process: attach needs a thread for each, nothing else does."""

    def __init__(
        self, world_size: int, model: Model | None = None, *, run: str = "run", **options: Any
    ) -> None:
        self.model = Model() if model is None else model
        self.ranks = [Rank(self.model, rank, world_size, **options) for rank in range(world_size)]
        self.run = run
        self.publishers: list[Publisher] = []
        self.stores: Sequence[Store] = ()

    def attach(self, stores: Store | Sequence[Store], **config: Any) -> "Crew":
        self.stores = [stores] * len(self.ranks) if isinstance(stores, Store) else stores
        self.publishers = in_parallel([self.attaching(rank, **config) for rank in range(len(self.ranks))])
        return self

    def attaching(self, rank: int, **config: Any) -> Callable[[], Publisher]:
        return lambda: self.ranks[rank].attach(self.stores[rank], self.run, **config)

    def step(self, *steps: int) -> None:
        for step in steps:
            for rank in self.ranks:
                rank.step(step)

    def publish(self, train_step: int) -> list[Any]:
        """What each rank is told."""
        return outcomes([self.publishing(p, train_step) for p in self.publishers])

    @staticmethod
    def publishing(publisher: Publisher, train_step: int) -> Callable[[], Commit | None]:
        return lambda: publisher.publish(train_step).result()

    def commit(self, train_step: int) -> Manifest:
        """Publish, which has to succeed on all ranks, with the same version."""
        commits = [commit for commit in self.publish(train_step) if isinstance(commit, Commit)]
        assert len(commits) == len(self.ranks)
        assert len({commit.manifest.hash for commit in commits}) == 1
        return commits[0].manifest

    def close(self) -> None:
        outcomes([publisher.close for publisher in self.publishers])

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def weights(self) -> dict[str, torch.Tensor]:
        """The whole model, put together from all ranks."""
        return self.joined(self.model, [rank.owned for rank in self.ranks])

    @staticmethod
    def joined(model: Model, ranks: Sequence[Sequence[Owned]]) -> dict[str, torch.Tensor]:
        whole = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        for owned in ranks:
            for one in owned:
                whole[one.name].view(-1)[one.start : one.start + one.tensor.numel()] = (
                    one.tensor.detach().reshape(-1)
                )
        return whole

    def restart(self, world_size: int, *, run: str) -> "Crew":
        """A trainer that loads the weights of this one; its optimizers begin anew."""
        model = Model()
        model.load_state_dict(self.weights())
        return Crew(world_size, model, run=run)

    def assert_published(self, store: Store, version: int) -> None:
        found = published(store, version)
        for name, tensor in self.weights().items():
            wire = tensor.bfloat16().view(torch.uint16) if tensor.is_floating_point() else tensor
            assert np.array_equal(found[name], wire.reshape(-1).numpy().view(found[name].dtype)), name


def in_parallel(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results in order; raises the first error in order."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


def outcomes(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results in order, or the errors instead."""
    with ThreadPoolExecutor(len(calls)) as threads:
        futures = [threads.submit(call) for call in calls]
        return [future.exception() or future.result() for future in futures]
