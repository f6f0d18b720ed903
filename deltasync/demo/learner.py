"""Policy gradient on sampled completions: REINFORCE with a group baseline, one AdamW step per batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from deltasync.demo.sampler import Sample

LEARNING_RATE: Final = 1e-6
_ENTROPY_BONUS: Final = 1e-3
"""Small, but never zero: even a batch whose rewards are all equal has a gradient, so every step moves weights."""

_MICROBATCH: Final = 6
"""Sequences whose activations are held at a time; bounds the trainer's memory."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """`loss`: policy-gradient loss with the entropy bonus, per token; `reward`: mean over the batch, 0 … 1."""

    loss: float
    reward: float


class Learner:
    """Owns the optimizer over `model` (fp32 master weights)."""

    def __init__(self, model: nn.Module, pad_token: int) -> None:
        self._model: Any = model
        self._pad_token = pad_token
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step(self, samples: Sequence[Sample]) -> StepResult:
        """One optimizer step on a batch. `samples`: not empty."""
        advantages = group_advantages(samples)
        tokens = sum(len(s.completion) for s in samples)
        total = 0.0
        self.optimizer.zero_grad(set_to_none=True)
        for start in range(0, len(samples), _MICROBATCH):
            part = slice(start, start + _MICROBATCH)
            loss = self._loss(samples[part], advantages[part]) / tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        self.optimizer.step()
        return StepResult(loss=total, reward=sum(s.reward for s in samples) / len(samples))

    def _loss(self, samples: Sequence[Sample], advantages: Tensor) -> Tensor:
        """Summed over the completion tokens of `samples`; `advantages`: fp32, one per sample."""
        batch = _right_padded([s.prompt + s.completion for s in samples], self._pad_token)
        lengths = torch.tensor([len(s.prompt) + len(s.completion) for s in samples])
        first = torch.tensor([len(s.prompt) for s in samples])
        position = torch.arange(batch.shape[1])[None]
        attention = position < lengths[:, None]
        keep = batch.shape[1] - int(first.min()) + 1  # logits from the last prompt token on
        logits = self._model(
            input_ids=batch, attention_mask=attention.long(), use_cache=False, logits_to_keep=keep
        ).logits[:, :-1]
        wanted = batch[:, -keep + 1 :]
        mask = (attention & (position >= first[:, None]))[:, -keep + 1 :]
        logp = torch.log_softmax(logits, dim=-1)
        chosen = logp.gather(-1, wanted[..., None])[..., 0]
        entropy = -(logp.exp() * logp).sum(-1)
        per_token = -advantages[:, None] * chosen - _ENTROPY_BONUS * entropy
        return torch.where(mask, per_token, 0.0).sum()


def group_advantages(samples: Sequence[Sample]) -> Tensor:
    """Reward minus the mean of its group, over the group's standard deviation; fp32, one per sample."""
    rewards = torch.tensor([s.reward for s in samples])
    groups = torch.tensor([s.group for s in samples])
    advantages = torch.zeros_like(rewards)
    for group in {s.group for s in samples}:
        inside = groups == group
        centred = rewards[inside] - rewards[inside].mean()
        advantages[inside] = centred / (centred.square().mean().sqrt() + 1e-4)
    return advantages


def _right_padded(rows: list[list[int]], pad: int) -> Tensor:
    """int64 [rows, longest]."""
    longest = max(map(len, rows))
    return torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
