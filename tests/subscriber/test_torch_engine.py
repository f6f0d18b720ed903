"""The torch engine: which tensors it takes, what it refuses, and when it serves."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

from chunkstore.memory import MemoryStore
from manifest.catalog import Catalog
from manifest.naming import canonical_tensors
from subscriber.daemon import Subscriber
from subscriber.errors import EngineMismatch, EngineNotReady
from subscriber.torch_engine import TorchEngine
from subscriber.torch_names import live_tensors
from tests.subscriber.parts import (
    TIMEOUT,
    Worker,
    differing,
    make_config,
    module_for,
    put_tensor,
    running,
    small_weights,
)
from tests.support.streams import StreamBuilder, catalog_of, random_weights

PAIR = {"embed.weight": (4, 6), "norm.weight": (6,)}


def mismatch(module: nn.Module, catalog: Catalog) -> str:
    with pytest.raises(EngineMismatch) as caught:
        live_tensors(canonical_tensors(module), catalog)
    return str(caught.value)


def test_refused_with_every_offender_named() -> None:
    """FIELD_REPORTS: miles#2692: unknown name, wrong dtype or shape noticed at apply."""
    weights = random_weights({"a": (2, 3), "b": (3,), "c": (4,), "d": (2,), "e": (8,)})
    module = module_for({name: tensor for name, tensor in weights.items() if name not in "ae"})
    module.register_parameter("b", nn.Parameter(torch.zeros(3)))
    module.register_parameter("c", nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16)))
    module.register_parameter("surplus", nn.Parameter(torch.zeros(1)))
    module.register_parameter("d", nn.Parameter(torch.zeros(2, dtype=torch.bfloat16, device="meta")))
    module.register_buffer("e", torch.zeros(1, dtype=torch.bfloat16).expand(8))
    message = mismatch(module, catalog_of(weights))
    for offender in (
        "'a' is missing",
        "'b' has dtype F32, the catalog says BF16",
        "'c' has shape (2, 2), the catalog says (4,)",
        "'surplus' is in the module but not in the catalog",
        "'d' has no memory",
        "'e' is expanded",
    ):
        assert offender in message


def test_mismatch_is_refused_before_anything_is_written_and_reported(tmp_path: Path) -> None:
    """FIELD_REPORTS: miles#2692."""
    builder = StreamBuilder(MemoryStore.named(str(tmp_path)), random_weights(PAIR))
    module = module_for(random_weights(PAIR | {"norm.weight": (7,)}))
    subscriber = Subscriber(make_config(tmp_path, builder), TorchEngine(module))
    with pytest.raises(EngineMismatch, match="norm"):
        asyncio.run(subscriber.run(once=True))
    assert not any(tensor.any() for tensor in module.state_dict().values())


def test_tied_names_are_written_once_and_untied_ones_both(tmp_path: Path) -> None:
    """FIELD_REPORTS: prime-rl#2823, sglang#15890: tied head cloned or updated twice."""
    aliases = {"lm_head.weight": "embed.weight"}
    builder = StreamBuilder(MemoryStore.named(str(tmp_path)), random_weights(PAIR), aliases)
    tied = module_for(builder.weights[0], aliases)
    assert len(live_tensors(canonical_tensors(tied), builder.catalog)[0].copies) == 1
    untied = module_for(builder.weights[0])
    put_tensor(untied, "lm_head.weight", torch.ones(4, 6, dtype=torch.bfloat16))
    assert len(live_tensors(canonical_tensors(untied), builder.catalog)[0].copies) == 2
    for name, module in (("tied", tied), ("untied", untied)):
        subscriber = Subscriber(make_config(tmp_path, builder, id=name), TorchEngine(module))
        with running(subscriber):
            subscriber.wait_for(builder.version, TIMEOUT)
            builder.train(0.3)
            subscriber.wait_for(builder.version, TIMEOUT)
        weights = dict(builder.weights[-1])
        assert not differing(module, weights | {"lm_head.weight": weights["embed.weight"]})


def test_copies_that_drifted_apart_are_no_version() -> None:
    weights = random_weights(PAIR)
    catalog = catalog_of(weights, {"head": "embed.weight"})
    module = module_for(weights)
    module.register_parameter("head", nn.Parameter(torch.ones(4, 6, dtype=torch.bfloat16)))
    engine = TorchEngine(module)
    apart = asyncio.run(engine.state(catalog)).digests
    module.get_parameter("embed.weight").data.fill_(1)
    together = asyncio.run(engine.state(catalog)).digests
    assert apart[0] != together[0]
    module.get_parameter("head").data.zero_()
    assert asyncio.run(engine.state(catalog)).digests[0] not in (apart[0], together[0])


def test_separate_tensors_that_share_memory_are_refused() -> None:
    weights = random_weights(PAIR | {"other": (4, 6)})
    message = mismatch(module_for(weights, {}), catalog_of(random_weights(PAIR)))
    assert "'other' is in the module" in message
    shared = module_for(random_weights(PAIR), {"other": "embed.weight"})
    assert "shares its memory with 'embed.weight'" in mismatch(shared, catalog_of(weights))


class Net(nn.Module):
    """A layer that happens to be called `module`, and a buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.module(x)
        return result


def test_wrapper_prefixes_are_dropped_and_only_those() -> None:
    net = Net()
    catalog = catalog_of(random_weights({"module.weight": (4, 4), "module.bias": (4,)}))
    compiled = cast(nn.Module, torch.compile(net))
    for module in (net, nn.DataParallel(net), compiled, nn.DataParallel(compiled)):
        names = {
            live.name: live.copies[0].data_ptr() for live in live_tensors(canonical_tensors(module), catalog)
        }
        assert names["module.weight"] == net.module.weight.data_ptr()


def test_nothing_is_served_before_the_first_verified_version(tmp_path: Path) -> None:
    """FIELD_REPORTS: miles#1724, AReaL#1726: a recovered engine gets traffic before it is synced."""
    builder = StreamBuilder(MemoryStore.named(str(tmp_path)), random_weights(PAIR))
    worker = Worker(tmp_path, builder)
    with pytest.raises(EngineNotReady, match="no verified version"), worker.engine.serving(timeout=0.01):
        pass
    with running(worker.subscriber), worker.engine.serving(TIMEOUT) as version:
        assert version == 0
        assert worker.holds(0)


def test_a_generation_never_sees_weights_change(tmp_path: Path) -> None:
    """FIELD_REPORTS: rllm#622, AReaL#1569, sglang-omni#784: mid-request, or after a partial update."""
    builder = StreamBuilder(MemoryStore.named(str(tmp_path)), small_weights())
    worker = Worker(tmp_path, builder)
    seen: set[int] = set()
    wrong: list[int] = []
    done = threading.Event()

    def generate() -> None:
        while not done.is_set():
            with worker.engine.serving(TIMEOUT) as version:
                seen.add(version)
                with worker.engine.serving():  # nested, as a generation that calls another one
                    if not worker.holds(version):
                        wrong.append(version)

    with running(worker.subscriber) as subscriber:
        subscriber.wait_for(0, TIMEOUT)
        threads = [threading.Thread(target=generate) for _ in range(3)]
        for thread in threads:
            thread.start()
        for version in range(1, 9):
            builder.train()
            subscriber.wait_for(version, TIMEOUT)
        done.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert len(seen) > 2


def test_the_rollouts_own_lock_is_held_while_writing(tmp_path: Path) -> None:
    builder = StreamBuilder(MemoryStore.named(str(tmp_path)), random_weights(PAIR))
    module = module_for(builder.weights[0])
    moments: list[list[str]] = []

    @contextmanager
    def lock() -> Iterator[None]:
        moments.append(differing(module, builder.weights[0]))
        yield
        moments.append(differing(module, builder.weights[0]))

    subscriber = Subscriber(make_config(tmp_path, builder), TorchEngine(module, lock=lock()))
    asyncio.run(subscriber.run(once=True))
    assert moments == [sorted(PAIR), []]
