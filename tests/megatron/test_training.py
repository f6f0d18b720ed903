"""Real Megatron-Core trainers, and a real subscriber: at every version it has the trainer's weights, to the bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import deltasync
from chunkstore.posix import PosixStore
from manifest.log import VersionLog, open_stream
from manifest.verify import verify_stream
from tests.megatron.models import Layout, read
from tests.megatron.ranks import ranks
from tests.megatron.training import SKIPPED, TOKENS, await_file, publishes, train, train_on, write_checkpoint
from tests.publisher.zoo import published
from tests.support.megatron_slices import Tensors
from tests.support.tiny_models import save_llama, save_qwen2, save_qwen3, save_qwen3_moe

VOCABULARY = 503


class Canonical(nn.Module):
    """A checkpoint's tensors under their own names, experts apart, as engines that load it know them."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in dict(owner.named_children()):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(last, nn.Parameter(tensor.clone(), requires_grad=False))


class Rollout:
    """A subscriber that starts from the base checkpoint."""

    def __init__(self, root: Path, base: Path) -> None:
        self.root = root
        self.model = Canonical(read(base)[1])
        config = {
            "store": {"url": str(root / "stream")},
            "id": "rollout",
            "state_dir": str(root / "state"),
            "http": None,
            "poll_interval": 0.02,
        }
        self.subscriber = deltasync.Subscriber(
            deltasync.SubscriberConfig.model_validate(config), deltasync.TorchEngine(self.model)
        )

    def follow(self, version: int, check: Callable[[], None]) -> Tensors:
        """What the trainer had at `version`; the subscriber has it too."""
        path = self.root / f"state-{version}.pt"
        await_file(path, check, 120)
        self.subscriber.wait_for(version, timeout=60)
        trained: Tensors = torch.load(path, weights_only=True)
        wanted = {name: tensor.bfloat16() for name, tensor in trained.items()}
        assert_equal(self.model.state_dict(), wanted)
        (self.root / f"seen-{version}").touch()
        return wanted


def assert_equal(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.reshape(-1).view(torch.int16).equal(wanted[name].reshape(-1).view(torch.int16)), name


def qwen3(folder: Path, **shape: Any) -> Path:
    return save_qwen3(folder, seed=3, vocab_size=VOCABULARY, **shape)


CASES: dict[str, tuple[Callable[[Path], Path], Layout, str]] = {
    "one rank": (lambda folder: save_llama(folder, seed=1, vocab_size=VOCABULARY), Layout(1), ""),
    "DP 2, fp32": (qwen3, Layout(2, fp32=True), ""),
    "DP 2, overlapping": (qwen3, Layout(2, overlap=True), ""),
    "TP 2, biases": (lambda folder: save_qwen2(folder, seed=2, vocab_size=VOCABULARY), Layout(2, tp=2), ""),
    "DP 2 × TP 2": (qwen3, Layout(4, tp=2), ""),
    "PP 2, tied": (lambda folder: qwen3(folder, tied=True), Layout(2, pp=2), ""),
    "PP 2, interleaved": (lambda folder: qwen3(folder, num_hidden_layers=4), Layout(2, pp=2, chunks=2), ""),
    "TP 2 × EP 2": (
        lambda folder: save_qwen3_moe(folder, seed=6, vocab_size=VOCABULARY), Layout(4, tp=2, ep=2), ""
    ),
    "EP 2, frozen routers": (
        lambda folder: save_qwen3_moe(folder, seed=5, vocab_size=VOCABULARY), Layout(2, ep=2), "router"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_rollouts_hold_what_the_trainer_has(name: str, tmp_path: Path) -> None:
    save, layout, frozen = CASES[name]
    base, seed = save(tmp_path / "base"), list(CASES).index(name)
    steps = publishes(seed)
    versions = len(steps) - (SKIPPED in steps and SKIPPED - 1 in steps)
    assert versions >= 5
    before = read(base)[1]
    with ranks(tmp_path / "meeting", layout, train, tmp_path, base, frozen, seed) as check:
        await_file(tmp_path / "stream" / "versions", check, 120)
        rollout = Rollout(tmp_path, base)
        rollout.subscriber.start()
        try:
            last = [rollout.follow(version, check) for version in range(1, versions + 1)][-1]
        finally:
            rollout.subscriber.stop()
    store = PosixStore(tmp_path / "stream")
    log = VersionLog(store, open_stream(store))
    for version in range(1, versions + 1):
        manifest = log.read_required(version)
        assert manifest.kind == "delta"
        assert manifest.stats.unproved_blocks == 0
        assert sum(manifest.stats.sources.values()) == manifest.stats.elements
        source = "inversion" if layout.fp32 else "copy"
        assert set(manifest.stats.sources) == ({source, "digest"} if frozen else {source})
        assert {chunk.key.rpartition("/")[2].partition("-")[0] for chunk in manifest.chunks} == {
            str(rank) for rank in range(layout.world_size)
        }
    assert not verify_stream(store).problems
    moved = {name for name in last if not last[name].equal(before[name])}
    routers = {name for name in last if name.endswith("mlp.gate.weight")}
    assert moved >= {name for name in last if last[name].ndim == 2} - routers
    assert moved.isdisjoint(routers if frozen else ())
    if layout.pp == 1 and not layout.fp32:
        compare_logits(base, last, torch.load(tmp_path / "logits.pt", weights_only=True))


def compare_logits(base: Path, weights: Tensors, trained: torch.Tensor) -> None:
    """transformers with the exported weights computes what the trainer's model does."""
    tokens = torch.arange(2 * TOKENS).reshape(2, TOKENS) * 29 % VOCABULARY
    folder = base.parent / "export"
    write_checkpoint(folder, base, weights)
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
    assert (found - trained).abs().max() < 1e-5 * trained.abs().max()


def test_another_layout_continues_the_stream(tmp_path: Path) -> None:
    """Restarts with other parallelism: what the stream has is known by its digests, and not sent again."""
    base, weights = qwen3(tmp_path / "base"), tmp_path / "weights"
    write_checkpoint(weights, base, read(base)[1])
    step = 0
    for number, layout in enumerate([Layout(2), Layout(2, tp=2), Layout(2, pp=2)]):
        steps = [step + 1, step + 2]
        with ranks(tmp_path / f"meeting-{number}", layout, train_on, tmp_path, base, weights, steps):
            pass
        step += 2
    store = PosixStore(tmp_path / "stream")
    log = VersionLog(store, open_stream(store))
    found = [log.read_required(version) for version in range(9)]
    assert [manifest.kind for manifest in found] == ["anchor"] + ["delta"] * 8
    assert [manifest.version for manifest in found if not manifest.chunks] == [3, 6]  # takeovers
    for manifest in (found[4], found[7]):  # the first step of an optimizer is as large as any
        assert manifest.stats.unproved_blocks == 0
        assert manifest.stats.changed < manifest.stats.elements / 2
    assert not verify_stream(store).problems
    now = published(store, 8)
    for name, tensor in read(weights)[1].items():
        assert tensor.reshape(-1).view(torch.uint16).numpy().tobytes() == now[name].tobytes(), name
