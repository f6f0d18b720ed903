"""PEFT models: whether the adapter is published or the model with it is said by `lora`, and never guessed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from chunkstore.digest_torch import digest
from chunkstore.errors import ConfigError
from manifest.checkpoint import Checkpoint
from manifest.naming import canonical_tensors
from manifest.peft_names import ActiveAdapter, peft_layers, peft_models
from publisher.adapters.base import Made, Selection
from publisher.adapters.lora_merged import Merged
from publisher.adapters.plain import Masters, Trained
from publisher.errors import MappingMismatch, OptimizerRefused

Lora = Literal["adapter", "merged"]


class WholeModel:
    """Every tensor of the model, under its own name."""

    kind, whole = "", True

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def named(self) -> Mapping[str, torch.Tensor]:
        """See `Selection`."""
        return canonical_tensors(self._model)

    def made(self, tensor: torch.Tensor) -> Made | None:
        """See `Selection`: all of it is there."""

    def check_rest(self, local: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """See `Selection`: there is none."""


class AdapterAlone:
    """The active adapter of a PEFT model, as PEFT saves it.

    Whatever else of `model` the optimizers train is refused, and so is a base that changes: the stream would not tell.
    """

    whole = False

    def __init__(self, model: nn.Module, peft: Any, trained: Trained) -> None:
        self._model, self._trained = model, trained
        self._adapter = ActiveAdapter(peft, MappingMismatch)
        self._base: dict[str, int] = {}
        self.kind = f", PEFT adapter {self._adapter.name!r} alone"
        named = self.named()
        if not trained.of(named):
            raise OptimizerRefused(
                f"no tensor of adapter {self._adapter.name!r} is trained by the optimizer: there would never be a "
                "change to publish",
                hint="load it with is_trainable=True, and make the optimizer of the parameters that require a "
                "gradient, after get_peft_model and fully_shard",
            )
        others: dict[int, list[str]] = {}
        for name, tensor in named.items():
            others.setdefault(id(tensor), []).append(name)
        tied = [" and ".join(names) for names in others.values() if len(names) > 1]
        if tied:
            raise MappingMismatch(
                f"{'; '.join(tied[:10])} are one tensor, which PEFT would load as two",
                hint="leave one of them out of modules_to_save, and ensure_weight_tying out of the configuration",
            )

    def named(self) -> Mapping[str, torch.Tensor]:
        """See `Selection`."""
        named = self._adapter.tensors()
        self._trained.check_all_of(
            self._model,
            named.values(),
            f"what PEFT does not save with adapter {self._adapter.name!r}",
            "give Publisher.attach the PEFT model alone, without what stands around it; name layers that are trained "
            "whole in modules_to_save; freeze other adapters",
        )
        return named

    def made(self, tensor: torch.Tensor) -> Made | None:
        """See `Selection`: all of it is there."""

    def check_rest(self, local: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """See `Selection`: the base, by digests. What belongs to other adapters may change."""
        adapters = {id(tensor) for tensor in self._adapter.of_all()}
        base = {
            name: digest(name, local(tensor))
            for name, tensor in canonical_tensors(self._model).items()
            if id(tensor) not in adapters
        }
        self._base = self._base or base
        changed = sorted(name for name in self._base if base.get(name) != self._base[name])
        if changed:
            raise MappingMismatch(
                f"the base under adapter {self._adapter.name!r} changed, which no rollout learns of: "
                + ", ".join(changed[:10]),
                hint="load the base's weights again; merge_adapter and unmerge_adapter leave them rounded otherwise, "
                "and a layer that is trained by itself belongs in modules_to_save",
            )


def select(
    model: Any,
    optimizers: Sequence[Optimizer],
    masters: Masters,
    lora: Lora | None,
    checkpoint: Checkpoint | None,
) -> Selection:
    """What of `model` is to be published. `lora`: as in publisher.yaml. `checkpoint`: what the run started from.

    Raises ConfigError if `lora` does not fit the model; MappingMismatch, OptimizerRefused.
    """
    if lora is None:
        _refuse_unasked(model)
        return WholeModel(model)
    models = peft_models([model])
    if len(models) != 1:
        found = f"the model has {len(models)} PeftModels"
        if not models:
            found = "the model is no PeftModel" if peft_layers([model]) else "the model has no PEFT layers"
        raise ConfigError(f"lora: {lora} is set, but {found}", hint="give what get_peft_model returned")
    trained = Trained(optimizers, masters)
    if lora == "merged":
        return Merged(model, models[0], trained, checkpoint)
    return AdapterAlone(model, models[0], trained)


def check_no_lora(model: Any, lora: Lora | None, given: str) -> None:
    """Raises ConfigError where neither a choice nor adapters to choose about can be: with what is `given`."""
    if lora is not None:
        raise ConfigError(
            f"lora: {lora} is set, but {given} is given, for which there are no PEFT adapters",
            hint="leave `lora` out of publisher.yaml",
        )
    _refuse_unasked(model)


def _refuse_unasked(model: Any) -> None:
    parts = [model] if isinstance(model, nn.Module) else list(model)
    found = peft_models(parts) or peft_layers(parts)
    if found:
        raise ConfigError(
            f"the model has PEFT layers ({type(found[0]).__name__}), and publisher.yaml does not say what to publish",
            hint="`lora: adapter` publishes the active adapter alone, as PEFT saves it; `lora: merged` the base model "
            "with it merged in",
        )
