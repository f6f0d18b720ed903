"""Adapters of PEFT models, single process: what is published is what PEFT itself saves, and nothing else."""

import random
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model, get_peft_model_state_dict
from peft import inject_adapter_in_model as inject
from safetensors.torch import load_file
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import deltasync
from chunkstore.errors import ConfigError
from chunkstore.posix import PosixStore
from manifest.errors import LocalDiskError
from manifest.export import export_checkpoint
from publisher.errors import MappingMismatch, OptimizerRefused
from publisher.publisher import Publisher
from subscriber.errors import EngineMismatch
from tests.publisher.zoo import adamw, attach, fresh_store, published, wire_bits
from tests.trainers.policies import adapted, policy

VARIANTS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "rank-stabilized, of many layers": {"use_rslora": True, "target_modules": "all-linear"},
    "DoRA": {"use_dora": True},
    "biases of adapted layers": {"bias": "lora_only"},
    "all biases": {"bias": "all"},
    "modules_to_save": {"modules_to_save": ["lm_head", "norm"]},
    "trainable tokens": {"trainable_token_indices": {"embed_tokens": [3, 5, 7]}},
    "an adapted embedding": {"target_modules": ["embed_tokens", "q_proj"]},
}
ADAPTER: dict[str, Any] = {"lora": "adapter"}


def steps(model: Any, optimizer: torch.optim.Optimizer, count: int, seed: int = 0) -> Iterator[int]:
    """`count` real steps, the fourth of which is skipped; yields after one to three of them."""
    torch.manual_seed(seed)
    chance, left = random.Random(seed), 1
    scheduler = LambdaLR(optimizer, lambda step: 1.0 / (1 + step % 4))
    for step in range(1, count + 1):
        optimizer.zero_grad()
        model(torch.randint(0, 500, (2, 16))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step != 4:  # as after gradients that are not finite
            optimizer.step()
        scheduler.step()
        left -= 1
        if not left:
            left = chance.randint(1, 3)
            yield step


def saved(model: Any) -> dict[str, torch.Tensor]:
    """What PEFT saves, without the frozen embedding beside an adapter of it."""
    state: dict[str, torch.Tensor] = get_peft_model_state_dict(model)
    return {name: t for name, t in state.items() if not name.endswith("embed_tokens.base_layer.weight")}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_version_is_what_peft_saves(variant: str, dtype: str) -> None:
    model, store = adapted(1, **VARIANTS[variant]), fresh_store()
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    versions = 0
    with attach(model, optimizer, store, inference_dtype=dtype, **ADAPTER) as publisher:
        assert {t.name for t in publisher.catalog.tensors} == saved(model).keys()
        for step in chain([0], steps(model, optimizer, 12)):
            commit = publisher.publish(step).result()
            version = publisher.version if commit is None else commit.version
            wanted, found = wire_bits(publisher.catalog, saved(model)), published(store, version)
            assert found.keys() == wanted.keys()
            for name, bits in wanted.items():
                assert (found[name] == bits).all(), (version, name)
            if commit is not None:
                versions += 1
                stats = commit.manifest.stats
                assert stats.unproved_blocks == 0
                assert ("inversion" in stats.sources) == (dtype == "bfloat16")
    assert versions >= 5


def test_a_restart_continues_the_stream() -> None:
    model, store = adapted(1), fresh_store()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    attach(model, optimizer, store, **ADAPTER).close()
    for _ in steps(model, optimizer, 1):
        pass  # a step that no publisher sees
    with attach(model, optimizer, store, **ADAPTER) as publisher:
        for step in chain([0], steps(model, optimizer, 2, seed=3)):
            commit = publisher.publish(step).result()
            assert commit is not None
            assert commit.manifest.epoch == 2
            wanted, found = wire_bits(publisher.catalog, saved(model)), published(store, commit.version)
            assert all((found[name] == bits).all() for name, bits in wanted.items())


def test_the_folder_of_an_adapter_is_a_base_checkpoint(tmp_path: Path) -> None:
    model, store = adapted(1), fresh_store()
    model.save_pretrained(tmp_path)
    with attach(model, adamw(model), store, base_checkpoint=str(tmp_path), **ADAPTER) as publisher:
        wanted, found = wire_bits(publisher.catalog, saved(model)), published(store, 0)
        assert {spec.dtype for spec in publisher.catalog.tensors} == {"F32"}
        assert all((found[name] == bits).all() for name, bits in wanted.items())
    other = adapted(2)
    with pytest.raises(MappingMismatch, match="differ from base checkpoint"):
        attach(other, adamw(other), fresh_store(), base_checkpoint=str(tmp_path), **ADAPTER)


@pytest.mark.parametrize("variant", ["LoRA", "DoRA", "modules_to_save", "trainable tokens"])
def test_an_export_is_an_adapter_that_peft_loads(variant: str, tmp_path: Path) -> None:
    model, store = adapted(1, **VARIANTS[variant]), PosixStore(tmp_path / "stream")
    optimizer = adamw(model, lr=1e-3)
    config, out = tmp_path / "config", tmp_path / "out"
    with attach(model, optimizer, store, **ADAPTER) as publisher:
        for step in steps(model, optimizer, 1):
            assert publisher.publish(step).result() is not None
    config.mkdir()
    with pytest.raises(LocalDiskError, match=r"has no adapter_config\.json"):
        export_checkpoint(store, 1, out, config)
    model.peft_config["default"].save_pretrained(config)
    exported = export_checkpoint(store, 1, out, config, max_shard_bytes=100)
    assert exported.files == ("adapter_config.json", "adapter_model.safetensors")
    wanted = {name: tensor.detach().bfloat16() for name, tensor in saved(model).items()}
    files = load_file(out / "adapter_model.safetensors")
    assert files.keys() == wanted.keys()
    loaded = PeftModel.from_pretrained(policy("base", seed=0), out)
    for name, tensor in saved(loaded).items():
        assert files[name].equal(wanted[name]), name
        assert tensor.bfloat16().equal(wanted[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_a_rollout_holds_the_adapter_and_keeps_its_base(dtype: torch.dtype, tmp_path: Path) -> None:
    """As docs/trainers.md says: in bf16 the adapter is made in the dtype of its base."""
    model = adapted(1)
    config = LoraConfig(r=6, lora_alpha=9, target_modules=["q_proj", "v_proj", "down_proj"])
    rollout = get_peft_model(policy("base", seed=0).to(dtype), config, autocast_adapter_dtype=False)
    before = {n: p.clone() for n, p in rollout.named_parameters() if "lora_" not in n}
    optimizer = adamw(model, lr=1e-3)
    settings = {"store": {"url": str(tmp_path / "stream")}, "inference_dtype": str(dtype)[6:], **ADAPTER}
    subscriber = deltasync.Subscriber(
        deltasync.SubscriberConfig.model_validate(
            {
                "store": {"url": str(tmp_path / "stream")},
                "id": "rollout",
                "state_dir": str(tmp_path / "state"),
                "http": None,
                "poll_interval": 0.02,
            }
        ),
        deltasync.TorchEngine(rollout),
    )
    with Publisher.attach(optimizer, model, settings) as publisher:
        subscriber.start()
        try:
            for step in steps(model, optimizer, 5):
                commit = publisher.publish(step).result()
                if commit is not None:
                    subscriber.wait_for(commit.version, timeout=60)
                held = saved(rollout)
                assert all(held[name].equal(tensor.to(dtype)) for name, tensor in saved(model).items())
        finally:
            subscriber.stop()
    assert all(p.equal(before[n]) for n, p in rollout.named_parameters() if "lora_" not in n)


def switch(model: Any) -> None:
    model.add_adapter("other", LoraConfig(target_modules=["q_proj"]))
    model.set_adapter("other")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda model: model.add_adapter("other", LoraConfig(target_modules=["q_proj"])),
            "'default', 'other', and had",
        ),
        (lambda model: model.merge_adapter(), "'default' is merged into the base weights in place"),
        (lambda model: model.merge_and_unload(), r"no layer of adapter default \(LORA\)"),
        (
            lambda model: model.get_base_model().model.lm_head.requires_grad_(True),
            r"trains .*lm_head\.weight",
        ),
    ],
    ids=["added", "merged", "unloaded", "unfrozen"],
)
def test_what_changes_midway_is_an_error(change: Callable[[Any], None], words: str) -> None:
    model, store = adapted(1), fresh_store()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    publisher = attach(model, optimizer, store, **ADAPTER)
    change(model)
    with pytest.raises(MappingMismatch, match=words):
        publisher.publish(1)
    assert publisher.version == 0


def test_an_adapter_that_is_switched_is_an_error_until_it_is_back() -> None:
    model, store = adapted(1), fresh_store()
    model.add_adapter("other", LoraConfig(target_modules=["q_proj"]))
    model.set_adapter("default")
    optimizer = adamw(model, lr=1e-3)
    with attach(model, optimizer, store, **ADAPTER) as publisher:
        for step in steps(model, optimizer, 1):
            model.set_adapter("other")
            with pytest.raises(MappingMismatch, match="adapter 'other' is active, and it was 'default'"):
                publisher.publish(step)
            model.set_adapter("default")
            commit = publisher.publish(step).result()
        assert commit is not None
        wanted, found = wire_bits(publisher.catalog, saved(model)), published(store, 1)
        assert all((found[name] == bits).all() for name, bits in wanted.items())


def merge_and_back(model: Any, optimizer: AdamW) -> None:
    model.merge_adapter()
    model.unmerge_adapter()


def train_the_head(model: Any, optimizer: AdamW) -> None:
    head = model.get_base_model().model.lm_head.requires_grad_(True)
    for _ in steps(model, optimizer, 1, seed=5):
        pass
    head.requires_grad_(False)


@pytest.mark.parametrize("change", [merge_and_back, train_the_head])
def test_a_base_that_changed_is_an_error_until_it_is_back(change: Callable[[Any, AdamW], None]) -> None:
    """Also if all looks as before: W + d - d is not W in bf16, and what was trained for a while stays trained."""
    model, store = adapted(1), fresh_store()
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    model.add_adapter("other", LoraConfig(target_modules=["q_proj"]))
    model.set_adapter("default")
    optimizer = AdamW(model.parameters(), lr=1e-3)
    base = {n: p.detach().clone() for n, p in model.named_parameters() if ".default." not in n}
    with attach(model, optimizer, store, **ADAPTER) as publisher:
        for _ in steps(model, optimizer, 2):
            pass
        change(model, optimizer)
        with pytest.raises(MappingMismatch, match=r"the base under adapter 'default' changed.*(_proj|head)"):
            publisher.publish(1)
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                if name in base:
                    # What belongs to another adapter may change.
                    tensor.copy_(base[name] + (".other." in name))
        assert publisher.publish(2).result() is not None
        wanted, found = wire_bits(publisher.catalog, saved(model)), published(store, 1)
        assert all((found[name] == bits).all() for name, bits in wanted.items())


def test_without_a_choice_nothing_is_published() -> None:
    model = adapted(1)
    injected = inject(LoraConfig(target_modules=["q_proj"]), policy("base", seed=0).model)
    for one in (model, model.get_base_model(), injected):
        with pytest.raises(
            ConfigError, match=r"PEFT layers \((PeftModel\w*|Linear)\).*`lora: adapter` publishes"
        ):
            attach(one, adamw(one), fresh_store())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: policy("base", seed=0), "lora: adapter is set, but the model has no PEFT layers"),
        (lambda: adapted(1).get_base_model(), "lora: adapter is set, but the model is no PeftModel"),
        (lambda: nn.ModuleList([adapted(1), adapted(2)]), "the model has 2 PeftModels"),
    ],
    ids=["none", "injected", "two"],
)
def test_a_choice_that_does_not_fit_the_model_is_refused(given: Callable[[], Any], words: str) -> None:
    model = given()
    with pytest.raises(ConfigError, match=words):
        attach(model, adamw(model), fresh_store(), **ADAPTER)


def test_an_adapter_that_cannot_change_is_refused() -> None:
    frozen = adapted(1)
    frozen.requires_grad_(False)
    with pytest.raises(OptimizerRefused, match="no tensor of adapter 'default' is trained"):
        attach(frozen, AdamW(frozen.parameters()), fresh_store(), **ADAPTER)
    with pytest.raises(OptimizerRefused, match="no tensor of adapter 'default' is trained"):
        attach(adapted(1), adamw(adapted(1)), fresh_store(), **ADAPTER)


def test_what_peft_would_not_save_is_refused_by_name() -> None:
    """It would never reach rollouts, and nobody would see that."""
    headed = nn.Sequential(adapted(1), nn.Linear(3, 3))
    with pytest.raises(MappingMismatch, match=r"trains what PEFT does not save .*: 1\.weight, 1\.bias"):
        attach(headed, adamw(headed), fresh_store(), **ADAPTER)
    several = adapted(1)
    several.add_adapter("other", LoraConfig(target_modules=["v_proj"]))
    several.base_model.set_adapter(["default", "other"])
    with pytest.raises(MappingMismatch, match=r"2 adapters are active \('default', 'other'\)"):
        attach(several, adamw(several), fresh_store(), **ADAPTER)
    prompts = get_peft_model(
        policy("base", seed=0).model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    )
    with pytest.raises(
        MappingMismatch, match=r"PROMPT_TUNING\) is not in the model as it is: prompt_embeddings"
    ):
        attach(prompts, adamw(prompts), fresh_store(), **ADAPTER)


def test_an_engine_never_writes_another_adapter() -> None:
    model = adapted(1)
    engine = deltasync.TorchEngine(model)
    model.add_adapter("other", LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(EngineMismatch, match="'default', 'other', and had 'default'"):
        engine._read()
    several = adapted(1)
    engine = deltasync.TorchEngine(several)
    several.merge_adapter()
    with pytest.raises(EngineMismatch, match="merged into the base weights"):
        engine._read()


def test_explain_shows_the_choice() -> None:
    model = adapted(1)
    config = {"store": {"url": "memory://unused"}, "inference_dtype": "bfloat16"}
    shown = str(deltasync.explain(adamw(model), model, config | ADAPTER))
    assert shown.startswith("plain torch, PEFT adapter 'default' alone; writer 0 of 1: ")
    with pytest.raises(ConfigError, match=r"a writer was given.*PEFT adapter 'default' alone"):
        Publisher.attach(adamw(model), model, config | ADAPTER | {"spool": "/dev/shm/unused"})
