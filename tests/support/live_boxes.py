"""Write, read and digest live memory through a box map, one box at a time, with torch's own strides."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from chunkstore.digest import digest_at
from chunkstore.torch_dtypes import BIT_DTYPES
from manifest.catalog import Catalog
from subscriber.sglang.boxes import BoxMap, locate
from subscriber.sglang.memories import Memories


def flat_memories(model: nn.Module) -> list[torch.Tensor]:
    """Every storage of weights as one flat tensor of integers that show its bits, in the map's order."""
    memories = Memories(model)
    out = []
    for memory, tensors in zip(memories.found, memories.tensors, strict=True):
        tensor = tensors[0][1].detach()
        out.append(tensor.as_strided((memory.numel,), (1,), 0).view(BIT_DTYPES[tensor.element_size()]))
    return out


def write(model: nn.Module, map_: BoxMap, catalog: Catalog, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put every canonical element of `tensors` where the map says it lies."""
    memories = flat_memories(model)
    for box in map_.boxes:
        source = tensors[catalog.tensors[box.tensor].name].contiguous()
        bits = source.reshape(-1).view(BIT_DTYPES[source.element_size()])
        memories[box.memory].as_strided(box.size, box.target_stride, box.target).copy_(
            bits.as_strided(box.size, box.source_stride, box.source)
        )


def digests(model: nn.Module, map_: BoxMap, catalog: Catalog) -> list[int]:
    """For each box, the partial digest of its tensor, of what the live memory holds there."""
    memories = flat_memories(model)
    out = []
    for box in map_.boxes:
        spec = catalog.tensors[box.tensor]
        positions, targets = locate(box, np.arange(spec.numel, dtype=np.int64))
        bits = memories[box.memory][torch.from_numpy(targets)].numpy()
        out.append(digest_at(spec.name, positions, bits.view(f"u{bits.itemsize}")))
    return out
