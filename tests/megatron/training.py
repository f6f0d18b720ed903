"""What a rank does: it trains with Megatron-Core's own schedule and optimizer, and publishes now and then."""

import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import distributed, nn

from tests.megatron.models import Layout, load, make, read, sizes_of  # isort: skip  # before Megatron
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from publisher.publisher import Publisher
from tests.support.megatron_slices import Tensors, exported

STEPS, SKIPPED, MICROBATCHES, TOKENS, LR = 12, 5, 2, 24, 1e-4


class Trainer:
    """One rank's model, optimizer and schedule. `changes`: of the fields of Megatron's two configurations."""

    def __init__(
        self,
        layout: Layout,
        base: Path,
        *,
        weights: Path | None = None,
        frozen: str = "",
        changes: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.layout, self.base = layout, base
        self.hf, full = read(weights or base)
        self.config, self.chunks = make(self.hf, layout, torch.float32 if layout.fp32 else torch.bfloat16)
        self.sizes = sizes_of(self.hf, layout)
        for chunk in self.chunks:
            load(chunk, full, self.sizes)
            for name, parameter in chunk.gpt.named_parameters():
                if frozen and frozen in name:
                    parameter.requires_grad = False
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True, bucket_size=30_000,
            overlap_grad_reduce=layout.overlap, overlap_param_gather=layout.overlap,
        )  # fmt: skip
        steps = OptimizerConfig(
            optimizer="adam", lr=LR, min_lr=LR / 10, weight_decay=0.1, clip_grad=1.0, bf16=not layout.fp32,
            loss_scale=1.0, use_distributed_optimizer=True, overlap_param_gather=layout.overlap,
        )  # fmt: skip
        ddp, steps = _changed(ddp, changes), _changed(steps, changes)
        self.model = [
            DistributedDataParallel(
                self.config, ddp, chunk.gpt if layout.fp32 else Float16Module(self.config, chunk.gpt)
            )
            for chunk in self.chunks
        ]
        self.optimizer = get_megatron_optimizer(steps, self.model)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, init_lr=LR / 4, max_lr=LR, min_lr=LR / 10, lr_warmup_steps=2, lr_decay_steps=STEPS,
            lr_decay_style="cosine", start_wd=0.1, end_wd=0.1, wd_incr_steps=0, wd_incr_style="constant",
        )  # fmt: skip
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        self._batches = torch.Generator().manual_seed(100 + parallel_state.get_data_parallel_rank())

    def attach(self, stream: Path, **changes: Any) -> Publisher:
        return Publisher.attach(self.optimizer, self.model, self.publishing(stream, **changes))

    def publishing(self, stream: Path, **changes: Any) -> dict[str, Any]:
        """The publisher's config; None leaves a key out."""
        config: dict[str, Any] = {
            "store": {"url": str(stream)},
            "base_checkpoint": str(self.base),
            "writers_timeout": 60.0,
            "commit_deadline": 5.0,
            **changes,
        }
        return {name: value for name, value in config.items() if value is not None}

    def step(self, *, overflow: bool = False) -> bool:
        """One step of the optimizer; False if it was skipped."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        shape = (MICROBATCHES, 2, TOKENS + 1)
        batches = torch.randint(0, self.hf.vocab_size, shape, generator=self._batches)
        data = [iter(batches) for _ in self.model]
        get_forward_backward_func()(
            forward_step_func=partial(_forward, overflow=overflow),
            data_iterator=data if len(data) > 1 else data[0],
            model=self.model,
            num_microbatches=MICROBATCHES,
            seq_length=TOKENS,
            micro_batch_size=2,
        )
        done, _, _ = self.optimizer.step()
        self.scheduler.step(increment=1)
        return bool(done)

    def export(self) -> Tensors | None:
        """The whole model's weights on rank 0, put together by plain slicing. Collective."""
        if self.layout.overlap:
            for chunk in self.model:
                chunk.start_param_sync(force_sync=True)
        mine = [(c.stage, {n: p.detach().clone() for n, p in c.gpt.named_parameters()}) for c in self.chunks]
        told: list[Any] | None = [None] * self.layout.world_size if distributed.get_rank() == 0 else None
        distributed.gather_object(mine, told)
        if told is None:
            return None
        return exported([chunk for rank in told for chunk in rank], self.sizes, self.hf.vocab_size)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of the model as it has been trained, computed in fp32. Collective; without pipeline stages."""
        _, (whole,) = make(self.hf, self.layout, torch.float32)
        values = dict(self.chunks[0].gpt.named_parameters())
        with torch.no_grad():
            for name, parameter in whole.gpt.named_parameters():
                parameter.copy_(values[name])
            found = whole.gpt(tokens, _positions(tokens), _mask(tokens.shape[1]))
        parts = [torch.empty_like(found) for _ in range(self.layout.tp)]
        distributed.all_gather(parts, found.contiguous(), parallel_state.get_tensor_model_parallel_group())
        return torch.cat(parts, -1)[..., : self.hf.vocab_size]


def _changed(config: Any, changes: Mapping[str, Any]) -> Any:
    """With those of `changes` that are its fields."""
    known = {field.name for field in fields(config)}
    return replace(config, **{name: value for name, value in changes.items() if name in known})


def _forward(
    batches: Iterator[torch.Tensor], model: nn.Module, *, overflow: bool
) -> tuple[torch.Tensor, Any]:
    tokens = next(batches)
    out = model(tokens[:, :-1], _positions(tokens[:, 1:]), _mask(TOKENS), labels=tokens[:, 1:])

    def loss(out: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        return out.float().mean() * (float("inf") if overflow else 1.0), {}

    return out, loss


def _positions(tokens: torch.Tensor) -> torch.Tensor:
    return torch.arange(tokens.shape[1])[None].expand_as(tokens)


def _mask(length: int) -> torch.Tensor:
    return torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)


def publishes(seed: int) -> list[int]:
    """After which steps to publish: after 1 to 3 more, by chance."""
    chance, steps = random.Random(seed), [0]
    while steps[-1] < STEPS:
        steps.append(min(steps[-1] + chance.randint(1, 3), STEPS))
    return steps[1:]


def train(layout: Layout, root: Path, base: Path, frozen: str, seed: int) -> None:
    """Train `STEPS` steps, publish now and then, and wait each time for the test to have looked."""
    trainer = Trainer(layout, base, frozen=frozen)
    wanted, first = publishes(seed), distributed.get_rank() == 0
    with trainer.attach(root / "stream") as publisher:
        for step in range(1, STEPS + 1):
            assert trainer.step(overflow=step == SKIPPED) == (step != SKIPPED)
            if step not in wanted:
                continue
            commit = publisher.publish(step).result()
            assert (commit is None) == (step == SKIPPED and SKIPPED - 1 in wanted)
            full = trainer.export()
            if full is not None and commit is not None:
                save(root / f"state-{commit.version}.pt", full)
                await_file(root / f"seen-{commit.version}")
            distributed.barrier()
    if layout.pp == 1:
        logits = trainer.logits(torch.arange(2 * TOKENS).reshape(2, TOKENS) * 29 % trainer.hf.vocab_size)
        if first:
            save(root / "logits.pt", logits)


def save(path: Path, value: object) -> None:
    torch.save(value, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def await_file(path: Path, check: Callable[[], None] = lambda: None, seconds: float = 60) -> None:
    """Until another process has written it. `check`: fails once nobody will."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        check()
        assert time.monotonic() < deadline, f"nobody writes {path}"
        time.sleep(0.005)


def train_on(layout: Layout, root: Path, base: Path, weights: Path, steps: list[int]) -> None:
    """From `weights` on, publish after each of `steps`, and write the weights to `weights`."""
    trainer = Trainer(layout, base, weights=weights)
    with trainer.attach(root / "stream") as publisher:
        for step in steps:
            assert trainer.step()
            assert publisher.publish(step).result() is not None
        full = trainer.export()
    distributed.barrier()
    if full is not None:
        write_checkpoint(weights, base, full)


def write_checkpoint(folder: Path, base: Path, weights: Tensors) -> None:
    """A Hugging Face folder of the same model as `base` with other weights."""
    folder.mkdir(exist_ok=True)
    shutil.copy(base / "config.json", folder)
    contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
