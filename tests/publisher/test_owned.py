"""Shards named by the caller, of a model that is a list of names only: a wrong map is refused before version 0."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import AdamW

from manifest.checkpoint import Checkpoint
from publisher.errors import MappingMismatch, WritersDisagree
from publisher.group import Owned, Writer
from publisher.publisher import Publisher
from tests.publisher.ranks import Crew, in_parallel, outcomes
from tests.publisher.zoo import fresh_store, published
from tests.support.tiny_models import save_qwen3, save_qwen3_moe

RUNS = itertools.count()
Weights = dict[str, torch.Tensor]
Wrong = Callable[[Weights], Weights]


def skeleton(checkpoint: Checkpoint) -> nn.Module:
    """A module with the checkpoint's names and shapes, and no memory."""
    root = nn.Module()
    for name, spec in checkpoint.tensors.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, nn.Parameter(torch.empty(spec.shape, device="meta")))
    return root


def weights(checkpoint: Checkpoint) -> Weights:
    """fp32 masters, as a trainer loads them."""
    return {
        name: torch.from_numpy(checkpoint.bits(name).astype(np.int32) << 16)
        .view(torch.float32)
        .reshape(spec.shape)
        for name, spec in checkpoint.tensors.items()
    }


def halves(values: Weights, rank: int) -> Iterator[Owned]:
    """Of two ranks: half of the columns of every matrix; vectors belong to the first."""
    for name, tensor in values.items():
        if tensor.ndim == 2:
            width = tensor.shape[1] // 2
            columns = tensor[:, rank * width : (rank + 1) * width].clone()
            yield Owned(name, nn.Parameter(columns), rank * width, (2 * width, 1))
        elif rank == 0:
            yield Owned(name, nn.Parameter(tensor.clone()))


def attach(folder: Path, owned: list[list[Owned]], store: object) -> list[Publisher]:
    """All writers; raises the first one's error."""
    model, run = skeleton(Checkpoint.open(folder)), f"run-{next(RUNS)}"
    config = {"store": {"url": "memory://unused"}, "base_checkpoint": str(folder), "writers_timeout": 5.0}

    def attaching(rank: int) -> Callable[[], Publisher]:
        optimizer = AdamW([one.tensor for one in owned[rank]], lr=1e-4, foreach=False)
        writer = Writer(rank, len(owned), run, owned[rank])
        return lambda: Publisher.attach(optimizer, model, config, store=store, writer=writer)  # type: ignore[arg-type]

    return in_parallel([attaching(rank) for rank in range(len(owned))])


def swapped(values: Weights) -> Weights:
    """Gate and up of one layer in each other's place."""
    gate, up = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))
    return {**values, gate: values[up], up: values[gate]}


def shifted(values: Weights) -> Weights:
    """Experts 2, 3 in the place of 3, 2, as by a wrong offset between expert-parallel ranks."""
    a, b = (f"model.layers.0.mlp.experts.{expert}.down_proj.weight" for expert in (2, 3))
    return {**values, a: values[b], b: values[a]}


def turned(values: Weights) -> Weights:
    """Query heads in another order."""
    name = "model.layers.0.self_attn.q_proj.weight"
    return {**values, name: values[name].roll(32, 0)}


@pytest.mark.parametrize(
    ("save", "wrong", "named"),
    [
        (save_qwen3, swapped, ["2 of", "layers.1.mlp.gate_proj.weight", "layers.1.mlp.up_proj.weight"]),
        (save_qwen3_moe, shifted, ["2 of", "experts.2.down_proj.weight", "experts.3.down_proj.weight"]),
        (save_qwen3, turned, ["1 of", "layers.0.self_attn.q_proj.weight"]),
    ],
)
def test_a_map_that_the_files_contradict_is_refused(
    save: Callable[..., Path], wrong: Wrong, named: list[str], tmp_path: Path
) -> None:
    folder = save(tmp_path / "model", seed=3)
    values, store = weights(Checkpoint.open(folder)), fresh_store()
    with pytest.raises(MappingMismatch) as refused:
        attach(folder, [[Owned(n, nn.Parameter(t.clone())) for n, t in wrong(values).items()]], store)
    for words in named:
        assert words in refused.value.message
    (right,) = attach(folder, [[Owned(n, nn.Parameter(t.clone())) for n, t in values.items()]], store)
    assert right.version == 0
    right.close()


def test_halves_in_each_other_s_place_are_refused_and_right_ones_follow(tmp_path: Path) -> None:
    folder = save_qwen3(tmp_path / "model", seed=3)
    values, store = weights(Checkpoint.open(folder)), fresh_store()
    owned = [list(halves(values, rank)) for rank in range(2)]
    name = "model.layers.1.mlp.down_proj.weight"
    left, right = (next(one for one in own if one.name == name) for own in owned)
    crossed = [
        [Owned(name, other.tensor, one.start, one.stride) if one is mine else one for one in own]
        for own, mine, other in ((owned[0], left, right), (owned[1], right, left))
    ]
    with pytest.raises(MappingMismatch, match=f"1 of .* {name}"):
        attach(folder, crossed, store)

    publishers = attach(folder, owned, store)
    for version in (1, 2):
        for own in owned:
            optimizer = torch.optim.SGD([one.tensor for one in own], lr=1.0)
            for one in own:
                one.tensor.grad = torch.full_like(one.tensor, 2.0**-9)
            optimizer.step()  # not the one that is attached: found by digests
        commits = outcomes([Crew.publishing(publisher, version) for publisher in publishers])
        assert {commit.version for commit in commits} == {version}
        found = published(store, version)
        for tensor, value in values.items():
            wanted = (value - version * 2.0**-9).bfloat16().view(torch.uint16).reshape(-1).numpy()
            assert np.array_equal(found[tensor], wanted), tensor
    outcomes([publisher.close for publisher in publishers])


@pytest.mark.parametrize(
    ("owned", "problem"),
    [
        (Owned("w", torch.zeros(4, 2), 0, (2,)), "w has 2 dimensions, but 1 strides"),
        (Owned("w", torch.zeros(4, 2), 0, (1, 4)), r"strides \(1, 4\), which are not those of a row-major"),
        (Owned("w", torch.zeros(4, 2), 0, (1, 1)), r"strides \(1, 1\), which are not those of a row-major"),
        (Owned("w", torch.zeros(4, 2), 2, (4, 2)), "w has 16 elements, not 2…17"),
    ],
)
def test_boxes_that_a_tensor_does_not_have_are_refused(owned: Owned, problem: str) -> None:
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.empty(4, 4, device="meta")))
    optimizer = AdamW([nn.Parameter(torch.ones(1))])
    config = {"store": {"url": "memory://unused"}, "inference_dtype": "bfloat16"}
    with pytest.raises(MappingMismatch, match=problem):
        Publisher.attach(optimizer, model, config, store=fresh_store(), writer=Writer(0, 1, "run", [owned]))


def test_shards_of_one_process_that_interleave_are_refused_and_a_missing_half_is_found() -> None:
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.empty(4, 4, device="meta")))
    config = {"store": {"url": "memory://unused"}, "inference_dtype": "bfloat16"}
    columns = [Owned("w", nn.Parameter(torch.zeros(4, 2)), start, (4, 1)) for start in (0, 2)]
    optimizer = AdamW([one.tensor for one in columns])
    with pytest.raises(MappingMismatch, match="w: elements 0…14 and 2…16"):
        Publisher.attach(optimizer, model, config, store=fresh_store(), writer=Writer(0, 1, "run", columns))
    with pytest.raises(WritersDisagree, match="w: nobody has elements 2…4"):
        Publisher.attach(
            optimizer, model, config, store=fresh_store(), writer=Writer(0, 1, "run", columns[:1])
        )


def test_tensors_without_memory_are_tied_only_if_they_are_one() -> None:
    """On the meta device all tensors have one address."""
    model = nn.Module()
    for name in ("a", "b"):
        model.register_parameter(name, nn.Parameter(torch.empty(3, device="meta")))
    model.register_parameter("c", model.get_parameter("a"))
    owned = [Owned(name, nn.Parameter(torch.ones(3))) for name in ("a", "b")]
    optimizer = AdamW([one.tensor for one in owned])
    config = {"store": {"url": "memory://unused"}, "inference_dtype": "bfloat16"}
    writer = Writer(0, 1, "run", owned)
    with Publisher.attach(optimizer, model, config, store=fresh_store(), writer=writer) as publisher:
        assert [spec.name for spec in publisher.catalog.tensors] == ["a", "b"]
        assert publisher.catalog.aliases == {"c": "a"}
