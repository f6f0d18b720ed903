"""What attach refuses: maps that are broken, ranks that disagree, optimizers and options that cannot be followed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed, nn

import deltasync
from chunkstore.errors import ConfigError, DeltasyncError
from publisher.adapters import megatron_geometry
from publisher.errors import MappingMismatch, OptimizerRefused
from publisher.publisher import Publisher
from tests.megatron.models import Layout
from tests.megatron.ranks import ranks
from tests.megatron.training import Trainer
from tests.support.tiny_models import save_qwen3, save_qwen3_moe

_gate_up, _expert = megatron_geometry._gate_up, megatron_geometry._expert


def swapped(prefix: str, ffn: int, ranks: int) -> Any:
    """Ups before gates."""
    segments = _gate_up(prefix, ffn, ranks)
    return [segments[i ^ 1] for i in range(len(segments))]


def shifted(name: str, number: int, which: str, layer: str, model: Any, at: Any) -> Any:
    """Each rank's experts one further on, the last one first."""
    here = model.experts // at.ep[1]
    return _expert(name, (number + 1) % here, which, layer, model, at)


BROKEN: dict[str, Callable[..., Any]] = {"_gate_up": swapped, "_expert": shifted}


def attach_broken(layout: Layout, root: Path, base: Path) -> None:
    trainer = Trainer(layout, base)
    for name, broken in BROKEN.items():
        with patch.object(megatron_geometry, name, broken), pytest.raises(DeltasyncError) as told:
            trainer.attach(root / name)
        if distributed.get_rank() == 0:
            assert isinstance(told.value, MappingMismatch)
            assert "tensors differ from base checkpoint" in str(told.value)
            assert "mlp.experts." in str(told.value)
        assert not (root / name / "versions").exists()
        distributed.barrier()
    trainer.attach(root / "right").close()


def test_a_broken_map_is_found_by_the_checkpoint(tmp_path: Path) -> None:
    base = save_qwen3_moe(tmp_path / "base", seed=1)
    with ranks(tmp_path / "meeting", Layout(2, ep=2), attach_broken, tmp_path, base):
        pass


def refused(attach: Callable[[], Publisher], kind: type[DeltasyncError], problem: str) -> None:
    with pytest.raises(kind, match=problem):
        attach()
    distributed.barrier()


def attach_refused(layout: Layout, root: Path, base: Path) -> None:
    trainer = Trainer(layout, base)
    stream = root / "stream"
    norm = dict(trainer.chunks[0].gpt.named_parameters())["decoder.final_layernorm.weight"]
    with torch.no_grad():
        norm[3] += distributed.get_rank()
    refused(
        lambda: trainer.attach(stream), MappingMismatch, "rank 1: model.norm.weight differs from what rank 0"
    )
    with torch.no_grad():
        norm[3] -= distributed.get_rank()
    refused(
        lambda: trainer.attach(stream, base_checkpoint=None, inference_dtype="bfloat16"),
        ConfigError,
        "pads its vocabulary",
    )
    with patch.object(trainer.config, "attention_output_gate", True):
        refused(lambda: trainer.attach(stream), MappingMismatch, "attention_output_gate=True")
    alone(trainer, stream)
    config, masters = trainer.publishing(stream), [(norm, norm)]
    refused(
        lambda: Publisher.attach(trainer.optimizer, trainer.model, config, masters=masters),
        OptimizerRefused,
        "given together with masters",
    )
    told = deltasync.explain(trainer.optimizer, trainer.model, trainer.publishing(stream))
    assert not told.problems
    assert told.kind == "Megatron-Core (TP 2, PP 1, EP 1, expert TP 1)"
    assert set(told.sources) == {"copy"}
    plain = Trainer(layout, base, changes={"use_distributed_optimizer": False})
    refused(lambda: plain.attach(stream), OptimizerRefused, "Float16.*is not the DistributedOptimizer")
    no_masters(trainer)
    refused(lambda: trainer.attach(stream), OptimizerRefused, "use_precision_aware_optimizer")
    assert not (stream / "versions").exists()
    with trainer.attach(root / "snapshot", detect="snapshot") as publisher:
        publisher.check_copies()
        with torch.no_grad():
            norm[3] += distributed.get_rank()
        with pytest.raises(
            MappingMismatch, match=r"no longer hold the same: rank 1: model\.norm\.weight differs"
        ):
            publisher.check_copies()


def alone(trainer: Trainer, stream: Path) -> None:
    """What one rank refuses, the others do too, instead of waiting for it."""
    gpt, rank = trainer.chunks[0].gpt, distributed.get_rank()
    if rank == 1:
        gpt.register_parameter("adapter", nn.Parameter(torch.zeros(3)))
    problem = "adapter is not known" if rank == 1 else "rank 1 refuses: .* adapter is not known"
    refused(lambda: trainer.attach(stream), MappingMismatch, problem)
    if rank == 1:
        del gpt.adapter


def no_masters(trainer: Trainer) -> None:
    """As with Transformer Engine's precision-aware optimizer, which needs a GPU: it steps the parameters themselves."""
    for one in trainer.optimizer.chained_optimizers:
        one.shard_fp32_from_float16_groups = [[None] * len(g) for g in one.shard_float16_groups]
        for group, own in zip(one.optimizer.param_groups, one.shard_float16_groups, strict=True):
            group["params"] = own


def test_what_cannot_be_followed_is_named(tmp_path: Path) -> None:
    base = save_qwen3(tmp_path / "base", seed=1)
    with ranks(tmp_path / "meeting", Layout(2, tp=2), attach_refused, tmp_path, base):
        pass
