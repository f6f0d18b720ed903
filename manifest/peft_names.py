"""The adapter of a PEFT model, by the names under which PEFT saves it: the same on both sides of a stream."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from chunkstore.errors import DeltasyncError
from manifest.catalog import ADAPTER_PREFIX
from manifest.naming import canonical_tensors


def peft_models(models: Sequence[nn.Module]) -> list[Any]:
    """Every PeftModel among `models` and below them. PEFT is not imported: what it made exists only where it is."""
    peft = sys.modules.get("peft.peft_model")
    if peft is None:
        return []
    return [module for model in models for module in model.modules() if isinstance(module, peft.PeftModel)]


def peft_layers(models: Sequence[nn.Module]) -> list[Any]:
    """Every layer that PEFT has put in place of another, also without a PeftModel around them."""
    return [module for model in models for module in model.modules() if is_peft_layer(module)]


def is_peft_layer(module: nn.Module) -> bool:
    """Whether PEFT has put it in place of another."""
    tuners, others = sys.modules.get("peft.tuners.tuners_utils"), sys.modules.get("peft.utils.other")
    if tuners is None or others is None:
        return False
    return isinstance(module, tuners.BaseTunerLayer | others.AuxiliaryTrainingWrapper)


class Adapters:
    """Which adapters `model`, a PeftModel, has, and which of them are active: to stay as they are now.

    `error`: raised where they do not.
    """

    def __init__(self, model: Any, error: type[DeltasyncError]) -> None:
        self.model, self.error = model, error
        self._all, self._active = self._now()

    @property
    def active(self) -> list[str]:
        return self._active

    def check(self) -> None:
        """Raises `error` if adapters came, went, were switched, or are merged into the base in place."""
        there, active = self._now()
        if there != self._all:
            raise self.error(
                f"the PEFT model has adapters {_listed(there)}, and had {_listed(self._all)}",
                hint="a stream follows the adapters that there were at its start: start anew with these",
            )
        if active != self._active:
            raise self.error(
                f"adapter {_listed(active)} is active, and it was {_listed(self._active)}",
                hint="set_adapter back before this, or start anew with a stream for the other adapter",
            )
        if any(getattr(layer, "merged", False) for layer in peft_layers([self.model])):
            raise self.error(
                f"adapter {_listed(active)} is merged into the base weights in place: they hold it now, and it is not "
                "what the layers compute with",
                hint="unmerge_adapter() before this",
            )

    def _now(self) -> tuple[list[str], list[str]]:
        return sorted(self.model.peft_config), list(self.model.active_adapters)


class ActiveAdapter(Adapters):
    """The one adapter that is active. Raises `error` if there are more."""

    def __init__(self, model: Any, error: type[DeltasyncError]) -> None:
        super().__init__(model, error)
        if len(self.active) != 1:
            raise error(
                f"{len(self.active)} adapters are active ({_listed(self.active)}), and a stream holds one",
                hint="set_adapter to one of them",
            )

    @property
    def name(self) -> str:
        return self.active[0]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The live tensors by the names in `adapter_model.safetensors`, where the adapter's own name does not stand.

        Without the base's embedding, which PEFT saves beside an adapter of it: nothing steps it.
        Raises `error` also for what PEFT does not save as it is in the model.
        """
        self.check()
        live = canonical_tensors(self.model)
        saved = self._saved(live, self.name)
        known = {id(tensor) for tensor in live.values()}
        others = [n for n, t in saved.items() if id(t) not in known or not n.startswith(ADAPTER_PREFIX)]
        if others or not saved:
            method = getattr(self.model.peft_config[self.name].peft_type, "value", "unknown")
            if not saved:
                raise self.error(
                    f"the model has no layer of adapter {self.name} ({method})",
                    hint="merge_and_unload and unload take them out of it: use a copy of the model for that",
                )
            raise self.error(
                f"what PEFT saves of adapter {self.name} ({method}) is not in the model as it is: "
                + ", ".join(others[:10]),
                hint="LoRA, and whatever else lies whole in layers of the model, is supported; prompts, and what "
                "several layers share, as with VeRA, are not",
            )
        return saved

    def of_all(self) -> list[torch.Tensor]:
        """The live tensors of all adapters, active or not."""
        live = canonical_tensors(self.model)
        return [tensor for name in self.model.peft_config for tensor in self._saved(live, name).values()]

    def _saved(self, live: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
        from peft import get_peft_model_state_dict

        saved: dict[str, torch.Tensor] = get_peft_model_state_dict(
            self.model, state_dict=dict(live), adapter_name=name, save_embedding_layers=False
        )
        return saved


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
