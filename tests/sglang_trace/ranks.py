"""One rank of a real SGLang model in this process, as a server's rank would build and load it.

Process groups are torch's fake ones, which have any size and rank and move no data: building a model needs none.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from chunkstore.torch_dtypes import DTYPE_NAMES
from manifest.catalog import Catalog, TensorSpec

_new_group = torch.distributed.new_group


def _fake_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
    kwargs["backend"] = "fake"  # SGLang asks for gloo by name
    return _new_group(ranks, **kwargs)


def load_rank(checkpoint: Path, *, tp: int = 1, rank: int = 0, ep: int = 1) -> tuple[nn.Module, ServerArgs]:
    """The model of one rank, loaded by SGLang from its own files as at start-up, and the arguments of its server."""
    args = ServerArgs(
        model_path=str(checkpoint),
        device="cpu",
        tp_size=tp,
        ep_size=ep,
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_overlap_schedule=True,
        disable_custom_all_reduce=True,
        context_length=512,
        mem_fraction_static=0.1,
    )
    leave()  # it takes the published placement with it
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=0))
    _join(tp, rank)
    initialize_dp_attention(server_args=args)
    initialize_moe_config()
    loader = DefaultModelLoader(LoadConfig(load_format="auto"))
    model = loader.load_model(
        model_config=ModelConfig.from_server_args(args), device_config=DeviceConfig("cpu")
    )
    return model, args


def leave() -> None:
    """End this process's being a rank, if it is one. A rank other than 0 would not save a checkpoint."""
    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def _join(tp: int, rank: int) -> None:
    torch.distributed.init_process_group("fake", rank=rank, world_size=tp, store=FakeStore())
    torch.distributed.new_group = _fake_group
    try:
        parallel_state.init_distributed_environment(
            backend="fake", world_size=tp, rank=rank, local_rank=0, distributed_init_method="env://"
        )
        parallel_state.initialize_model_parallel(backend="fake")
    finally:
        torch.distributed.new_group = _new_group


def checkpoint_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the files, by name."""
    out: dict[str, torch.Tensor] = {}
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            out |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # not a mapping
    return out


def catalog_of(tensors: Mapping[str, torch.Tensor], aliases: dict[str, str] | None = None) -> Catalog:
    return Catalog.of(
        [TensorSpec(n, DTYPE_NAMES[t.dtype], tuple(t.shape)) for n, t in tensors.items()], aliases
    )


def live_bytes(model: nn.Module) -> dict[str, bytes]:
    """Every byte of every parameter and buffer, persistent or not, by name."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        name: t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in named
    }
