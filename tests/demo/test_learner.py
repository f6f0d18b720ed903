"""The RL part on the tiny model: real generation, real gradients."""

from pathlib import Path

import pytest
import torch

from deltasync.demo.learner import Learner, group_advantages
from deltasync.demo.main import copy_without_weights
from deltasync.demo.model import build_empty, load_policy, load_tokenizer, prepare_model
from deltasync.demo.sampler import Sample, Sampler
from deltasync.demo.task import MAX_NEW_TOKENS


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_model("tiny", tmp_path_factory.mktemp("cache"))


@pytest.fixture
def sampler(checkpoint: Path) -> Sampler:
    return Sampler(load_policy(checkpoint), load_tokenizer(checkpoint))


def equal_rewards(samples: list[Sample]) -> list[Sample]:
    return [Sample(s.group, s.prompt, s.completion, s.text, 0.5) for s in samples]


def test_model_is_made_once_and_whole(checkpoint: Path) -> None:
    before = {p.name: p.stat().st_mtime_ns for p in checkpoint.iterdir()}
    assert prepare_model("tiny", checkpoint.parent) == checkpoint
    assert {p.name: p.stat().st_mtime_ns for p in checkpoint.iterdir()} == before
    assert [p.name for p in checkpoint.parent.iterdir()] == ["tiny"], "no scratch folder is left"


def test_two_makers_agree(checkpoint: Path, tmp_path: Path) -> None:
    again = prepare_model("tiny", tmp_path)
    assert (again / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()


def test_rollout_gets_no_weights(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "rollout"
    copy_without_weights(checkpoint, folder)
    assert not list(folder.glob("*.safetensors"))
    empty, trained = build_empty(folder).state_dict(), load_policy(checkpoint).state_dict()
    assert empty.keys() == trained.keys()
    assert {t.dtype for t in empty.values()} == {torch.bfloat16}
    assert not torch.equal(empty["model.embed_tokens.weight"].float(), trained["model.embed_tokens.weight"])


def test_samples_repeat_for_a_seed(sampler: Sampler) -> None:
    samples = sampler.sample(prompts=2, group=3, seed=5)
    assert samples == sampler.sample(prompts=2, group=3, seed=5)
    assert samples != sampler.sample(prompts=2, group=3, seed=6)
    assert [s.group for s in samples] == [0, 0, 0, 1, 1, 1]
    assert all(1 <= len(s.completion) <= MAX_NEW_TOKENS for s in samples)


def test_every_step_moves_weights_even_without_advantages(checkpoint: Path, sampler: Sampler) -> None:
    model = load_policy(checkpoint)
    learner = Learner(model, load_tokenizer(checkpoint).pad_token_id)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    result = learner.step(equal_rewards(sampler.sample(prompts=1, group=3, seed=1)))
    assert result.reward == 0.5
    moved = [
        not torch.equal(t.to(torch.bfloat16), before[n].to(torch.bfloat16))
        for n, t in model.state_dict().items()
    ]
    assert any(moved)


def test_step_prefers_what_was_rewarded(checkpoint: Path, sampler: Sampler) -> None:
    """A few steps on one batch make rewarded completions likelier and the others less likely."""
    model = load_policy(checkpoint)
    learner = Learner(model, load_tokenizer(checkpoint).pad_token_id)
    for group in learner.optimizer.param_groups:
        group["lr"] = 1e-3
    samples = [
        Sample(s.group, s.prompt, s.completion, s.text, float(i % 2))
        for i, s in enumerate(sampler.sample(prompts=1, group=6, seed=3))
    ]
    losses = [learner.step(samples).loss for _ in range(5)]
    assert losses[-1] < losses[0]


def test_loss_does_not_depend_on_padding(checkpoint: Path, sampler: Sampler) -> None:
    """One sample's loss is the same alone and beside a longer one whose advantage is zero."""
    model = load_policy(checkpoint)
    learner = Learner(model, load_tokenizer(checkpoint).pad_token_id)
    short, long = (Sample(0, list(range(1, n)), [3, 5, 7][: n - 4], "", 0.0) for n in (5, 7))
    alone = learner._loss([short], torch.tensor([1.0]))
    both = learner._loss([short, long], torch.tensor([1.0, -1.0]))
    other = learner._loss([long], torch.tensor([-1.0]))
    torch.testing.assert_close(both, alone + other)


def test_advantages_are_relative_to_the_group() -> None:
    samples = [Sample(g, [1], [2], "", r) for g, r in [(0, 1.0), (0, 0.0), (7, 0.5), (7, 0.5)]]
    torch.testing.assert_close(
        group_advantages(samples), torch.tensor([1.0, -1.0, 0.0, 0.0]), atol=1e-3, rtol=0
    )
