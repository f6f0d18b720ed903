"""The model with a LoRA adapter merged in: the base model's names, and the values that PEFT's own merge makes."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from chunkstore.digest_torch import digest
from chunkstore.torch_dtypes import TORCH_DTYPES
from manifest.checkpoint import Checkpoint
from manifest.naming import canonical_tensors, unwrapped
from manifest.peft_names import Adapters, is_peft_layer, peft_layers
from publisher.adapters.base import Made
from publisher.adapters.plain import Trained
from publisher.errors import MappingMismatch, OptimizerRefused

_HINT: Final = "`lora: adapter` publishes the adapter by itself, however it is merged"


class Merged:
    """What `merge_and_unload` would make of the model; a weight with an adapter is made anew each time it is asked for.

    `checkpoint`: what the base was loaded from. All of it that is frozen must be what the files hold.
    Raises MappingMismatch for layers that are not merged in the way of LoRA, and what they share; OptimizerRefused.
    """

    whole = False

    def __init__(self, model: nn.Module, peft: Any, trained: Trained, checkpoint: Checkpoint | None) -> None:
        self._model, self._peft, self._trained = model, peft, trained
        self._adapters = Adapters(peft, MappingMismatch)
        self.kind = f", PEFT adapter {', '.join(map(repr, self._adapters.active))} merged"
        named = self.named()
        if not trained.of(named | self._carriers):
            raise OptimizerRefused(
                f"nothing of the model with adapter {', '.join(map(repr, self._adapters.active))} is trained by the "
                "optimizer: there would never be a change to publish",
                hint="load the adapter with is_trainable=True, and make the optimizer of the parameters that require a "
                "gradient, after get_peft_model",
            )
        self._check_apart(named)
        if checkpoint is not None:
            _check_base(named, checkpoint)

    def named(self) -> dict[str, torch.Tensor]:
        """See `Selection`."""
        self._adapters.check()
        self._met: list[Any] = []
        self._where = {id(module): name for name, module in self._model.named_modules()}
        named = canonical_tensors(self._model, self._inside)
        met = {id(layer) for layer in self._met}
        self._refuse([layer for layer in peft_layers([self._model]) if id(layer) not in met])
        self._made = {id(base): made for layer in self._met for base, made in _made(layer)}
        self._carriers = {
            f"{self._where[id(layer)]} {number}": carrier
            for layer in self._met
            for number, carrier in enumerate(_carriers(layer))
        }
        self._trained.check_all_of(
            self._model,
            [*named.values(), *self._carriers.values()],
            "what merging does not reach",
            "give Publisher.attach the PEFT model alone, and freeze other adapters",
        )
        return named

    def made(self, tensor: torch.Tensor) -> Made | None:
        """See `Selection`."""
        return self._made.get(id(tensor))

    def check_rest(self, local: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """See `Selection`: there is none."""

    def _inside(self, module: Any) -> nn.Module | None:
        """What stands in a module's place once all is merged."""
        inner: nn.Module | None
        if module is self._peft:
            inner = module.base_model.model if type(module.base_model).__name__ == "LoraModel" else None
        elif not is_peft_layer(module):
            inner = unwrapped(module)
        else:
            self._met.append(module)
            if hasattr(module, "modules_to_save"):
                inner = module.unload_and_optionally_merge_module(
                    merge=False, safe_merge=False, adapter_names=None
                )
            else:
                self._refuse([] if _mergeable(module) else [module])
                inner = module.get_base_layer()
        return inner

    def _refuse(self, layers: list[Any]) -> None:
        if layers:
            listed = [f"{self._where[id(layer)]} ({type(layer).__name__})" for layer in layers[:10]]
            raise MappingMismatch(
                f"{', '.join(listed)}: only LoRA and DoRA of whole linear, embedding and convolution layers, and "
                "modules_to_save, can be merged",
                hint=_HINT,
            )

    def _check_apart(self, named: Mapping[str, torch.Tensor]) -> None:
        """A merged weight that another name shows too is something else to each framework that loads the model."""
        homes = Counter(tensor.data_ptr() for tensor in named.values() if tensor.numel())
        tied = [name for name, t in named.items() if id(t) in self._made and homes[t.data_ptr()] > 1]
        if tied:
            raise MappingMismatch(
                f"{', '.join(tied[:10])} would be merged, and is one tensor under several names",
                hint="leave tied layers out of target_modules, or untie them",
            )


def _mergeable(layer: Any) -> bool:
    """Whether `layer` adds to the weight of one plain layer, by code of PEFT that draws no random numbers."""
    from peft.tuners.lora import layer as lora

    return (
        type(layer) in (lora.Linear, lora.Embedding, lora.Conv1d, lora.Conv2d, lora.Conv3d)
        and all(type(variant).__name__.startswith("Dora") for variant in layer.lora_variant.values())
        and "weight" in layer.base_layer._parameters
        and (getattr(layer.base_layer, "bias", None) is not None or not any(layer.lora_bias.values()))
    )


def _carriers(layer: Any) -> list[nn.Parameter]:
    """The parameters of what is active in `layer`: what its merged weight is made of beside the base's."""
    if hasattr(layer, "modules_to_save"):
        return []
    found: dict[int, nn.Parameter] = {}
    for kind in layer.adapter_layer_names:
        adapters = getattr(layer, kind)
        for name in layer.active_adapters:
            if name in adapters:
                one = adapters[name]
                for parameter in [one] if isinstance(one, nn.Parameter) else one.parameters():
                    found[id(parameter)] = parameter
    return list(found.values())


def _made(layer: Any) -> Iterator[tuple[torch.Tensor, Made]]:
    """The base's parameters that merging changes."""
    carriers = tuple(_carriers(layer))
    if carriers:
        names = ["weight", "bias"] if any(map(layer.lora_bias.get, layer.active_adapters)) else ["weight"]
        for name in names:
            yield getattr(layer.base_layer, name), Made(carriers, partial(_merge, layer, name))


def _merge(layer: Any, name: str) -> torch.Tensor:
    """Parameter `name` of the base layer after `layer.merge()`, in new memory; `layer` itself stays as it is."""
    base = copy.copy(layer.base_layer)
    base._parameters = {
        key: None if p is None else nn.Parameter(p.detach().clone(), requires_grad=False)
        for key, p in base._parameters.items()
    }
    other = copy.copy(layer)
    other._modules = {**layer._modules, "base_layer": base}
    other._caches, other.merged_adapters = {}, []
    weight = base._parameters["weight"]
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        other.merge()
    merged: torch.Tensor = base._parameters[name]
    return merged.detach()


def _check_base(named: Mapping[str, torch.Tensor], checkpoint: Checkpoint) -> None:
    """The independent check of the mapping, in place of one of the merged weights, which no file holds."""
    wrong = []
    for name, tensor in named.items():
        spec = checkpoint.tensors.get(name)
        if spec is not None and not tensor.requires_grad and tuple(tensor.shape) == spec.shape:
            cast = tensor.detach().to(TORCH_DTYPES[spec.dtype])
            if digest(name, cast) != checkpoint.digest(name):
                wrong.append(name)
    if wrong:
        raise MappingMismatch(
            f"{len(wrong)} frozen tensors of the base differ from base checkpoint {checkpoint.directory}: "
            f"{', '.join(wrong[:10])}",
            hint="name the folder that the base was loaded from; where the adapter's initialization changes the base "
            "(PiSSA, OLoRA), give inference_dtype instead",
        )
