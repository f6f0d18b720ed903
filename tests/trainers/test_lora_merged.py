"""Adapters merged into their base: every version is, to the bit, the model that PEFT's own merge_and_unload makes."""

from collections.abc import Callable
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn
from torch.optim import AdamW

import deltasync
from chunkstore.errors import ConfigError, StoreUnavailable
from chunkstore.store import Store
from manifest.log import VersionLog, open_stream
from publisher.errors import MappingMismatch, OptimizerRefused
from publisher.publisher import Publisher
from tests.publisher.zoo import adamw, attach, fresh_store, published, wire_bits
from tests.support.faults import FaultStore
from tests.trainers.policies import adapted, policy
from tests.trainers.test_lora import steps

MERGED: dict[str, Any] = {"lora": "merged"}


class Mixed(nn.Module):
    """An embedding, a convolution and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(500, 8)
        self.conv = nn.Conv1d(8, 12, 3)
        self.head = nn.Linear(12, 500)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.conv(self.embed(tokens).transpose(1, 2)).transpose(1, 2))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten())


def mixed(**options: Any) -> Any:
    return get_peft_model(
        Mixed(), LoraConfig(target_modules=["embed", "conv", "head"], init_lora_weights=False, **options)
    )


def two_active() -> Any:
    model = adapted(1)
    model.add_adapter("other", LoraConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])
    return model


def of_bf16(**options: Any) -> Any:
    """As users have it: the base in bf16, the adapter in fp32."""
    base = policy("base", seed=0).bfloat16()
    config = {"r": 6, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}
    return get_peft_model(base, LoraConfig(**config | options))


MODELS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: adapted(1),
    "of a bf16 base": of_bf16,
    "itself in bf16, too": lambda: of_bf16().bfloat16(),
    "DoRA": lambda: adapted(1, use_dora=True),
    "DoRA of a bf16 base": lambda: of_bf16(use_dora=True),
    "rank-stabilized, of many layers": lambda: adapted(1, use_rslora=True, target_modules="all-linear"),
    "biases": lambda: adapted(1, bias="all"),
    "a bias of its own": lambda: adapted(1, lora_bias=True, target_modules=["q_proj"]),
    "modules_to_save": lambda: adapted(1, modules_to_save=["lm_head", "norm"]),
    "two adapters": two_active,
    "other layers": mixed,
    "other layers, DoRA": lambda: mixed(use_dora=True),
}


def merged(model: Any) -> dict[str, torch.Tensor]:
    """PEFT's own, of a copy."""
    state: dict[str, torch.Tensor] = deepcopy(model).merge_and_unload().state_dict()
    return state


def assert_merged(publisher: Publisher, model: Any, store: Store, version: int) -> None:
    truth = merged(model)
    assert {spec.name for spec in publisher.catalog.tensors} == truth.keys()
    wanted, found = wire_bits(publisher.catalog, truth), published(store, version)
    assert found.keys() == wanted.keys()
    for name, bits in wanted.items():
        assert (found[name] == bits).all(), (version, name)


@pytest.mark.parametrize("kind", list(MODELS))
def test_every_version_is_what_peft_merges(kind: str) -> None:
    model, store = MODELS[kind](), fresh_store()
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)  # the frozen base, too
    versions = 0
    with attach(model, optimizer, store, **MERGED) as publisher:
        for step in chain([0], steps(model, optimizer, 12)):
            before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            commit = publisher.publish(step).result()
            assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
            assert_merged(publisher, model, store, publisher.version if commit is None else commit.version)
            if commit is not None:
                versions += 1
                assert commit.manifest.stats.unproved_blocks == 0
                assert commit.manifest.stats.sources["snapshot"] > 0
    assert versions >= 5


def test_a_restart_continues_the_stream_and_an_anchor_is_the_same() -> None:
    model, store = of_bf16(), fresh_store()
    optimizer = adamw(model, lr=1e-3)
    attach(model, optimizer, store, **MERGED).close()
    for _ in steps(model, optimizer, 1):
        pass  # a step that no publisher sees
    with attach(model, optimizer, store, **MERGED) as publisher:
        for step in chain([0], steps(model, optimizer, 2, seed=3)):
            commit = publisher.publish(step, anchor=True).result()
            assert commit is not None
            assert commit.anchored
            assert commit.manifest.epoch == 2
            assert_merged(publisher, model, store, commit.version)


def test_a_version_that_was_not_committed_is_in_the_next() -> None:
    model, inner, dark = of_bf16(), fresh_store(), False
    store = FaultStore(
        inner,
        before=lambda _, key: StoreUnavailable("injected") if dark and key.startswith("chunks/") else None,
    )
    optimizer = adamw(model, lr=1e-3)
    with attach(model, optimizer, store, **MERGED) as publisher:
        for step in steps(model, optimizer, 3):
            dark = step == 1
            outcome = publisher.publish(step)
            if dark:
                with pytest.raises(StoreUnavailable):
                    outcome.result()
                continue
            commit = outcome.result()
            assert commit is not None
            assert_merged(publisher, model, inner, commit.version)


def test_under_autocast_it_is_the_same() -> None:
    """Whoever publishes inside an autocast region would else merge in 16 bits."""
    model, store = of_bf16(), fresh_store()
    optimizer = adamw(model, lr=1e-3)
    with attach(model, optimizer, store, **MERGED) as publisher:
        for step in steps(model, optimizer, 1):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert publisher.publish(step).result() is not None
        assert_merged(publisher, model, store, 1)


def test_the_base_is_compared_with_its_files(tmp_path: Path) -> None:
    files = {name: t.bfloat16() for name, t in policy("base", seed=0).state_dict().items()}
    save_file(files, tmp_path / "model.safetensors")
    model, store = of_bf16(), fresh_store()
    with attach(model, adamw(model), store, base_checkpoint=str(tmp_path), **MERGED) as publisher:
        assert_merged(publisher, model, store, 0)
    attach(model, adamw(model), store, base_checkpoint=str(tmp_path), **MERGED).close()
    with pytest.raises(MappingMismatch, match="differ from base checkpoint"):  # an adapter that has learned
        attach(
            model, adamw(model), fresh_store(), base_checkpoint=str(tmp_path), refer_to_base=True, **MERGED
        )
    fresh = of_bf16(init_lora_weights=True)
    referring = attach(
        fresh,
        adamw(fresh),
        store := fresh_store(),
        base_checkpoint=str(tmp_path),
        refer_to_base=True,
        **MERGED,
    )
    with referring as publisher:
        manifest = VersionLog(store, open_stream(store)).read_required(0)
        assert manifest.kind == "reference"
    wrong = of_bf16()
    q = wrong.get_base_model().model.model.layers[0].self_attn.q_proj.base_layer.weight
    with torch.no_grad():
        q.copy_(q[torch.randperm(len(q))])
    with pytest.raises(
        MappingMismatch, match=r"1 frozen tensors of the base differ .*layers\.0\.self_attn\.q_proj\.weight"
    ):
        attach(wrong, adamw(wrong), fresh_store(), base_checkpoint=str(tmp_path), **MERGED)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda model: model.add_adapter("other", LoraConfig(target_modules=["q_proj"])),
            "'default', 'other', and had",
        ),
        (lambda model: model.merge_adapter(), "'default' is merged into the base weights in place"),
        (
            lambda model: (
                model.add_adapter("other", LoraConfig(target_modules=["q_proj"]))
                or model.set_adapter("other")
            ),
            "had 'default'",
        ),
    ],
    ids=["added", "merged", "switched"],
)
def test_what_changes_midway_is_an_error(change: Callable[[Any], None], words: str) -> None:
    model = adapted(1)
    publisher = attach(model, adamw(model), fresh_store(), **MERGED)
    change(model)
    with pytest.raises(MappingMismatch, match=words):
        publisher.publish(1)
    assert publisher.version == 0


def another_trained() -> Any:
    model = adapted(1)
    model.add_adapter("other", LoraConfig(target_modules=["q_proj"]))
    return model.requires_grad_(True)


def tied() -> Any:
    return get_peft_model(policy("odd", seed=0).model, LoraConfig(target_modules=["embed_tokens"]))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            lambda: adapted(1, trainable_token_indices={"embed_tokens": [3]}),
            r"embed_tokens \(TrainableTokensWrapper\): only LoRA and DoRA",
        ),
        (
            lambda: adapted(1, target_modules=[], target_parameters=["q_proj.weight"]),
            r"q_proj \(ParamWrapper\).*`lora: adapter` publishes",
        ),
        (
            lambda: get_peft_model(
                policy("base", seed=0), IA3Config(target_modules=["q_proj"], feedforward_modules=[])
            ),
            r"\(IA3Model\)|q_proj \(Linear\)",
        ),
        (tied, r"embed_tokens\.weight, lm_head\.weight would be merged, and is one tensor"),
        (
            another_trained,
            r"trains what merging does not reach: .*q_proj\.lora_A\.other\.weight",
        ),
    ],
    ids=["tokens", "parameters", "IA3", "tied", "more"],
)
def test_what_is_not_merged_in_the_way_of_lora_is_refused_by_name(
    given: Callable[[], Any], words: str
) -> None:
    model = given()
    with pytest.raises(MappingMismatch, match=words):
        attach(model, adamw(model), fresh_store(), **MERGED)


def test_what_cannot_be_had_together_is_refused() -> None:
    model = adapted(1)
    with pytest.raises(MappingMismatch, match="only works in 16 bits"):
        attach(model, adamw(model), fresh_store(), inference_dtype="float32", **MERGED)
    weight = model.get_base_model().model.lm_head.weight
    owned = deltasync.Writer(0, 1, "run", [deltasync.Owned("model.lm_head.weight", weight)])
    config = {"store": {"url": "memory://unused"}, "inference_dtype": "bfloat16", **MERGED}
    with pytest.raises(ConfigError, match="shards are named by the caller: a merged weight"):
        Publisher.attach(adamw(model), model, config, writer=owned)
    frozen = adapted(1).requires_grad_(False)
    with pytest.raises(OptimizerRefused, match="nothing of the model with adapter 'default' is trained"):
        attach(frozen, AdamW(frozen.parameters()), fresh_store(), **MERGED)
    shown = str(deltasync.explain(adamw(model), model, config))
    assert shown.startswith("plain torch, PEFT adapter 'default' merged; writer 0 of 1: ")
