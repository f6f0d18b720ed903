"""Tracing loaders that do what SGLang's do, and some that do what cannot be followed."""

import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

import pytest
import torch
from torch import nn

from chunkstore import digest
from chunkstore.dtypes import bits_dtype
from chunkstore.regions import Region
from chunkstore.torch_dtypes import DTYPE_NAMES
from manifest.catalog import Catalog, TensorSpec
from subscriber.errors import EngineMismatch
from subscriber.sglang.coverage import coverage
from subscriber.sglang.trace import Fill, trace
from tests.support.live_boxes import digests, flat_memories, write

Weights = Iterable[tuple[str, torch.Tensor]]


class Live(nn.Module):
    """Parameters by name, a loader per checkpoint tensor, and what the loader does besides."""

    w: Any
    w_kc: Any

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], load: Callable[["Live", str, torch.Tensor], object]
    ) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape).bfloat16(), requires_grad=False))
        self._load_one = load

    def load_weights(self, weights: Weights) -> None:
        for name, loaded in weights:
            self._load_one(self, name, loaded)


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def catalog_of(tensors: dict[str, torch.Tensor], aliases: dict[str, str] | None = None) -> Catalog:
    return Catalog.of(
        [TensorSpec(n, DTYPE_NAMES[t.dtype], tuple(t.shape)) for n, t in tensors.items()], aliases
    )


def check_exact(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Tracing changes nothing, and writing through the map equals the model's own load of other values, everywhere."""
    first, second = random_tensors(shapes, 1), random_tensors(shapes, 2)
    model.load_weights(iter(first.items()))
    before = [memory.clone() for memory in flat_memories(model)]
    pointers = [p.data_ptr() for p in model.parameters()]
    catalog = catalog_of(first)
    traced = trace(model, catalog)
    assert all(torch.equal(a, b) for a, b in zip(flat_memories(model), before, strict=True))
    assert [p.data_ptr() for p in model.parameters()] == pointers
    report = coverage(model, traced.map, traced.fills)
    assert report.offenders == ()
    assert report.loaded + report.zeros == report.elements == sum(p.numel() for p in model.parameters())
    totals = [0] * len(catalog.tensors)
    for box, partial in zip(traced.map.boxes, digests(model, traced.map, catalog), strict=True):
        totals[box.tensor] = (totals[box.tensor] + partial) % (1 << 64)
    assert totals == [
        digest.digest(s.name, first[s.name].view(torch.int16).numpy().view(bits_dtype("BF16")))
        for s in catalog.tensors
    ]
    model.load_weights(iter(second.items()))
    expected = [memory.clone() for memory in flat_memories(model)]
    model.load_weights(iter(first.items()))
    write(model, traced.map, catalog, second)
    assert all(torch.equal(a, b) for a, b in zip(flat_memories(model), expected, strict=True))


def fused(model: Live, name: str, loaded: torch.Tensor) -> None:
    """Rank 1 of 2 of a fused gate and up projection."""
    place = model.w.data.narrow(0, {"gate": 0, "up": 4}[name], 4)
    place.copy_(loaded.narrow(0, 4, 4))


def columns_transposed(model: Live, name: str, loaded: torch.Tensor) -> None:
    model.w.data.copy_(loaded[:, 2:6].transpose(0, 1))


def contiguous_copies(model: Live, name: str, loaded: torch.Tensor) -> None:
    model.w.data.copy_(loaded.t().contiguous().view(-1)[8:40].clone().reshape(4, 8))


def experts(model: Live, name: str, loaded: torch.Tensor) -> None:
    """One checkpoint tensor for all experts, gate and up in halves; the engine keeps up before gate."""
    for number, expert in enumerate(loaded):
        gate, up = expert.to("cpu").chunk(2, dim=0)
        model.w.data[number, :3].copy_(up)
        model.w.data[number][3:] = gate


def interleaved(model: Live, name: str, loaded: torch.Tensor) -> None:
    model.w.data[:, :4].copy_(loaded[:, ::2])
    model.w.data[:, 4:].copy_(loaded[:, 1::2])


def scalar(model: Live, name: str, loaded: torch.Tensor) -> None:
    model.w.data.copy_(loaded.squeeze().unsqueeze(0))


LOADERS: dict[str, tuple[Any, dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]] = {
    "fused": (fused, {"w": (8, 5)}, {"gate": (8, 5), "up": (8, 5)}),
    "columns, transposed": (columns_transposed, {"w": (4, 6)}, {"a": (6, 8)}),
    "contiguous copies": (contiguous_copies, {"w": (4, 8)}, {"a": (8, 6)}),
    "experts": (experts, {"w": (4, 6, 5)}, {"a": (4, 6, 5)}),
    "interleaved": (interleaved, {"w": (3, 8)}, {"a": (3, 8)}),
    "scalar": (scalar, {"w": (1,)}, {"a": (1, 1)}),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("loader", LOADERS)
def test_one_tensor_at_a_time(loader: str, inference: bool) -> None:
    load, parameters, shapes = LOADERS[loader]
    with torch.inference_mode(inference):
        check_shard(Live(parameters, load), shapes)


def check_shard(model: Live, shapes: Mapping[str, tuple[int, ...]]) -> None:
    first, second = random_tensors(shapes, 1), random_tensors(shapes, 2)
    model.load_weights(first.items())
    before = [memory.clone() for memory in flat_memories(model)]
    catalog = catalog_of(first)
    traced = trace(model, catalog)
    assert all(torch.equal(a, b) for a, b in zip(flat_memories(model), before, strict=True))
    report = coverage(model, traced.map, traced.fills)
    assert (report.offenders, report.loaded) == ((), sum(p.numel() for p in model.parameters()))
    model.load_weights(second.items())
    expected = [memory.clone() for memory in flat_memories(model)]
    model.load_weights(first.items())
    write(model, traced.map, catalog, second)
    assert all(torch.equal(a, b) for a, b in zip(flat_memories(model), expected, strict=True))


class Pooled(nn.Module):
    """What DeepSeek's loader does: jobs in a thread pool, two tensors joined, padding zeroed, rows left of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_a = nn.Parameter(torch.randn(10, 6).bfloat16(), requires_grad=False)
        self.padded = nn.Parameter(torch.randn(8, 5).bfloat16(), requires_grad=False)
        self.joined = nn.Parameter(torch.randn(2, 9).bfloat16(), requires_grad=False)
        self.stacked = nn.Parameter(torch.randn(4, 2, 3).bfloat16(), requires_grad=False)

    def _pad(self, loaded: torch.Tensor) -> None:
        self.padded[6:].data.fill_(0)
        self.padded.data.narrow(0, 0, 6).narrow(1, 4, 1).zero_()
        self.padded.data[:6, :4].copy_(loaded)

    def load_weights(self, weights: Weights) -> None:
        with ThreadPoolExecutor() as pool:
            cached = dict(weights)
            join = torch.cat([cached["q_a"], cached["kv_a"]], dim=0)
            zeros = torch.zeros(2, 4, dtype=torch.bfloat16)
            jobs: list[Future[object]] = [
                pool.submit(self.qkv_a.data.copy_, join),
                pool.submit(self._pad, cached["p"]),
                pool.submit(self.joined.data.copy_, torch.cat([cached["j"], zeros], dim=-1)),
                pool.submit(self.stacked.data.copy_, torch.stack([cached["s0"], cached["s1"]], dim=1)),
            ]
            for job in as_completed(jobs):
                job.result()


def test_thread_pools_joins_and_padding() -> None:
    shapes = {"q_a": (6, 6), "kv_a": (4, 6), "p": (6, 4), "j": (2, 5), "s0": (4, 3), "s1": (4, 3)}
    check_exact(Pooled(), shapes)


def test_fills_are_reported() -> None:
    model = Pooled()
    shapes = {"q_a": (6, 6), "kv_a": (4, 6), "p": (6, 4), "j": (2, 5), "s0": (4, 3), "s1": (4, 3)}
    model.load_weights(random_tensors(shapes, 1).items())
    traced = trace(model, catalog_of(random_tensors(shapes, 1)))
    assert [m.name for m in traced.map.memories] == ["qkv_a", "padded", "joined", "stacked"]
    assert set(traced.fills) == {
        Fill(1, Region(30, (10,), (1,))),
        Fill(1, Region(4, (6,), (5,))),
        Fill(2, Region(5, (2, 4), (9, 1))),
    }


class Tied(nn.Module):
    """`head` is `embed`; an engine that shards them apart keeps `other` besides."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(4, 3).bfloat16(), requires_grad=False)
        self.head = nn.Parameter(torch.randn(4, 3).bfloat16(), requires_grad=False) if apart else self.embed

    def load_weights(self, weights: Weights) -> None:
        parameters = dict(self.named_parameters())  # knows tied ones under one name
        for name, loaded in weights:
            parameters[name].data.copy_(loaded)


@pytest.mark.parametrize("names", [("embed", "head"), ("head", "embed")])
@pytest.mark.parametrize("apart", [False, True])
def test_tied_tensors_are_found_under_any_name(apart: bool, names: tuple[str, str]) -> None:
    name, alias = names
    values = random_tensors({name: (4, 3)}, 1)
    model = Tied(apart)
    traced = trace(model, catalog_of(values, {alias: name}))
    assert len(traced.map.boxes) == len(traced.map.memories) == 1 + apart
    assert coverage(model, traced.map, traced.fills).offenders == ()


def refused(model: nn.Module, tensors: dict[str, torch.Tensor]) -> str:
    """The message; and nothing has changed."""
    memories = flat_memories(model)
    before = [memory.clone() for memory in memories]
    data = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    attributes = {key: value for key, value in vars(model).items() if isinstance(value, torch.Tensor)}
    with pytest.raises(EngineMismatch) as error:
        trace(model, catalog_of(tensors))
    assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == data
    assert all(torch.equal(a, b) for a, b in zip(memories, before, strict=True))
    now = {key: value for key, value in vars(model).items() if isinstance(value, torch.Tensor)}
    assert now.keys() == attributes.keys()
    assert all(now[key] is attributes[key] for key in now)
    return error.value.message


def _replace(m: Live, n: str, t: torch.Tensor) -> None:
    m.w = nn.Parameter(t.data, requires_grad=False)


def _rebind(m: Live, n: str, t: torch.Tensor) -> None:
    m.w.data = torch.zeros(4, 4, dtype=torch.bfloat16)


def _derive(m: Live, n: str, t: torch.Tensor) -> None:
    m.w.data.copy_(t)
    m.w_kc = m.w.data * 2


def _overwrite(m: Live, n: str, t: torch.Tensor) -> None:
    m.w.data.copy_(t)
    m.w.data.copy_(torch.ones(4, 4, dtype=torch.bfloat16))


def _zero_after(m: Live, n: str, t: torch.Tensor) -> None:
    m.w.data.copy_(t)
    m.w.data[2:].zero_()


def _twice(m: Live, n: str, t: torch.Tensor) -> None:
    m.w.data.copy_(t)
    m.w.data.copy_(t.t())


def _temporary(m: Live, n: str, t: torch.Tensor) -> None:
    buffer = torch.empty(4, 4, dtype=torch.bfloat16)
    buffer.copy_(t)


UNFOLLOWED: dict[str, tuple[Callable[[Live, str, torch.Tensor], object], str]] = {
    "arithmetic": (lambda m, n, t: m.w.data.copy_(t * 2), "'a' goes through aten.mul.Tensor"),
    "in place": (lambda m, n, t: m.w.data.add_(t), "'a' goes through aten.add_.Tensor"),
    "a value": (lambda m, n, t: t[0, 0].item(), "'a' goes through aten._local_scalar_dense"),
    "indexing": (
        lambda m, n, t: m.w.data.copy_(t[torch.tensor([1, 0, 2, 3])]),
        "'a' goes through aten.index.Tensor",
    ),
    "bits": (lambda m, n, t: m.w.data.copy_(t.view(torch.int16)), "'a' goes through aten.view.dtype"),
    "dtype": (lambda m, n, t: m.w.data.copy_(t.float()), "'a' is converted from BF16 to F32"),
    "broadcast": (
        lambda m, n, t: m.w.data.copy_(t[0]),
        r"'a' has shape \(4,\) where the engine has \(4, 4\)",
    ),
    "expanded": (lambda m, n, t: m.w.data.copy_(t[:1].expand(4, 4)), "'a' is spread"),
    "joined with values": (
        lambda m, n, t: m.w.data.copy_(torch.cat([t[:2], torch.ones(2, 4).bfloat16()])),
        "'a' is joined with values",
    ),
    "into a temporary": (_temporary, "'a' is copied to a temporary tensor, which is not a parameter"),
    "into a buffer": (
        lambda m, n, t: m.get_buffer("cache").copy_(t),
        "'a' is copied to 'cache', which is not a parameter",
    ),
    "loader error": (lambda m, n, t: getattr(m, "gone"), "'a' makes the loader fail with AttributeError"),  # noqa: B009
    "data pointer": (lambda m, n, t: t.data_ptr(), "'a' makes the loader fail"),
    "constants": (lambda m, n, t: m.w.data.fill_(1), "'w' is filled by its loader with values"),
    "own values": (_overwrite, "'w' is filled by its loader with values"),
    "negative zero": (lambda m, n, t: m.w.data.fill_(-0.0), "'w' is filled by its loader with values"),
    "arithmetic on itself": (lambda m, n, t: m.w.data.mul_(2), "'w' is changed by aten.mul_"),
    "zeroed after": (_zero_after, r"'w' is zeroed where \['a'\] were loaded before"),
    "zeroed in bytes": (lambda m, n, t: m.w.data.view(torch.uint8).zero_(), "'w' is zeroed as if"),
    "twice": (_twice, "'a' and 'a' both lie in the same elements of 'w'"),
    "replaced": (_replace, "w is replaced or computed when weights are loaded"),
    "rebound": (_rebind, "w gets other memory"),
    "derived": (_derive, "w_kc is replaced or computed when weights are loaded"),
}


@pytest.mark.parametrize("case", UNFOLLOWED)
def test_what_cannot_be_followed_is_refused_and_undone(case: str) -> None:
    load, message = UNFOLLOWED[case]
    model = Live({"w": (4, 4)}, lambda m, n, t: load(m, n, t))
    model.register_buffer("cache", torch.zeros(4, 4).bfloat16(), persistent=False)
    assert re.search(message, refused(model, random_tensors({"a": (4, 4)}, 1)))


def test_all_offenders_are_named() -> None:
    def load(model: Live, name: str, loaded: torch.Tensor) -> None:
        if name == "x":
            raise KeyError(name)
        if name == "y":
            loaded = loaded * 2
        model.get_parameter(name).data.copy_(loaded)

    shapes = {"ok": (2, 2), "x": (2, 2), "y": (2, 2), "z": (2, 3)}
    model = Live({**shapes, "z": (2, 2)}, load)
    message = refused(model, random_tensors(shapes, 1) | {"ok2": torch.zeros(2, 2)})
    assert "'x' makes the loader fail with KeyError" in message
    assert "'y' goes through aten.mul" in message
    assert "'z' has shape (2, 3) where the engine has (2, 2)" in message
    assert "'ok2' makes the loader fail with AttributeError" in message
    assert "'ok'" not in message


def test_dtypes_must_be_those_of_the_catalog() -> None:
    model = Live({"w": (4, 4)}, lambda m, n, t: m.w.data.copy_(t))
    message = refused(model, {"a": torch.zeros(4, 4)})
    assert "'a' is F32 in the catalog, BF16 in the engine ('w')" in message


def test_derived_tensors_that_are_updated_in_place() -> None:
    class Derived(Live):
        def load_weights(self, weights: Weights) -> None:
            super().load_weights(weights)
            self.w_kc.copy_(self.w.data.t())

    model = Derived({"w": (4, 4)}, lambda m, n, t: m.w.data.copy_(t))
    model.w_kc = torch.zeros(4, 4).bfloat16()
    assert "'w_kc' is computed when weights are loaded" in refused(model, random_tensors({"a": (4, 4)}, 1))
    assert not model.w_kc.any()


def test_an_error_after_the_last_tensor() -> None:
    class Late(Live):
        def load_weights(self, weights: Weights) -> None:
            super().load_weights(weights)
            raise RuntimeError("not all there")

    model = Late({"w": (4, 4)}, lambda m, n, t: m.w.data.copy_(t))
    assert "failed after the last tensor: RuntimeError" in refused(model, random_tensors({"a": (4, 4)}, 1))


def test_parameters_that_cannot_hold_weights() -> None:
    model = Live({"w": (4, 4)}, lambda m, n, t: m.w.data.copy_(t))
    model.meta = nn.Parameter(torch.empty(2, device="meta"), requires_grad=False)
    model.fp8 = nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn), requires_grad=False)
    model.wide = nn.Parameter(torch.zeros(1).expand(5), requires_grad=False)
    with pytest.raises(EngineMismatch) as error:
        trace(model, catalog_of(random_tensors({"a": (4, 4)}, 1)))
    assert "'meta' has no memory" in error.value.message
    assert "'fp8' has dtype torch.float8_e4m3fn, which is not synced" in error.value.message
    assert "'wide' is expanded" in error.value.message
