"""A small model with one of everything that a publisher meets, and its base checkpoint in mixed dtypes."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim import AdamW, Optimizer

from chunkstore.memory import MemoryStore
from chunkstore.store import Store
from chunkstore.torch_dtypes import TORCH_DTYPES
from manifest.catalog import Catalog
from manifest.log import VersionLog, open_stream
from manifest.restore import restore
from publisher.publisher import Publisher

WIRE = {"narrow.weight": torch.float16, "router.weight": torch.float32, "mean": torch.float32}
_fresh = itertools.count()


class Zoo(nn.Module):
    """Tied embedding and head; bf16, fp16 and fp32 on the wire; frozen, 0-dim, empty and large tensors; buffers."""

    mean: torch.Tensor
    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 64)
        self.inner = nn.Linear(64, 700)
        self.narrow = nn.Linear(700, 64, bias=False)
        self.router = nn.Linear(64, 8, bias=False)
        self.frozen = nn.Linear(64, 64)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.unused = nn.Parameter(torch.ones(33))
        self.head = nn.Linear(64, 300, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(5), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale + self.frozen(self.embed(tokens))
        x = x + self.narrow(torch.relu(self.inner(x))) * torch.sigmoid(self.router(x)).mean()
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
            self.steps += 1
        loss: torch.Tensor = self.head(x).logsumexp(-1).mean() + x.square().mean()
        return loss


def make(directory: Path, seed: int = 0) -> tuple[Zoo, Path]:
    """A Zoo with fp32 masters, loaded from the checkpoint in `directory`, which is written first."""
    torch.manual_seed(seed)
    model = Zoo()
    tensors = {}
    for name, tensor in model.state_dict().items():
        wire = WIRE.get(name, torch.bfloat16) if tensor.is_floating_point() else tensor.dtype
        tensors[name] = tensor.to(wire).clone()
    del tensors["head.weight"]
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    model.load_state_dict(
        {k: v.float() if v.is_floating_point() else v for k, v in tensors.items()}, strict=False
    )
    return model, directory


def adamw(model: nn.Module, lr: float = 1e-5, weight_decay: float = 0.1, **kernel: Any) -> AdamW:
    return AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=weight_decay, **kernel
    )


def train(model: nn.Module, optimizer: Optimizer, seed: int = 0) -> None:
    """One real step."""
    generator = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randint(0, 300, (4, 16), generator=generator)).backward()
    optimizer.step()


def fresh_store() -> MemoryStore:
    return MemoryStore(f"zoo-{next(_fresh)}")


def attach(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], store: Store, **config: object
) -> Publisher:
    """Attach with bf16 for all floats unless `config` names a base checkpoint."""
    if "base_checkpoint" not in config:
        config = {"inference_dtype": "bfloat16", **config}
    return Publisher.attach(
        optimizer, model, {"store": {"url": "memory://unused"}, "commit_deadline": 0.2, **config}, store=store
    )


def published(store: Store, version: int) -> dict[str, npt.NDArray[np.unsignedinteger]]:
    """A version's tensors as bit patterns, rebuilt from the store alone and verified on the way."""
    log = VersionLog(store, open_stream(store))
    parts: dict[str, list[npt.NDArray[np.unsignedinteger]]] = {}
    for spec, _, _, bits in restore(store, log, version):
        parts.setdefault(spec.name, []).append(bits)
    return {name: np.concatenate(bits) for name, bits in parts.items()}


def live(publisher: Publisher, model: nn.Module) -> dict[str, npt.NDArray[np.unsignedinteger]]:
    """What the model's tensors are on the wire, by a plain cast: the truth that versions are compared with."""
    state = {k.replace("module.", "").replace("_orig_mod.", ""): v for k, v in model.state_dict().items()}
    return wire_bits(publisher.catalog, state)


def wire_bits(
    catalog: Catalog, state: Mapping[str, torch.Tensor]
) -> dict[str, npt.NDArray[np.unsignedinteger]]:
    """The tensors of `catalog`, cast to its dtypes, as bit patterns."""
    out = {}
    for spec in catalog.tensors:
        cast = state[spec.name].detach().to(TORCH_DTYPES[spec.dtype]).reshape(-1).clone()
        width = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[spec.width]
        if spec.numel:
            out[spec.name] = cast.view(width).numpy()
    return out


def assert_identical(publisher: Publisher, model: nn.Module, store: Store, version: int) -> None:
    """Every tensor of the committed version equals the live one, bit for bit."""
    wanted, found = live(publisher, model), published(store, version)
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert np.array_equal(found[name], wanted[name]), name
