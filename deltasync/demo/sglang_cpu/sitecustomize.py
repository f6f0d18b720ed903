"""For machines without a GPU only: lets an unmodified SGLang start there.

SGLang imports triton and torchvision wherever it runs, and neither works beside a torch built for the CPU. This folder
is not a package. It goes on PYTHONPATH of an SGLang server, whose Python then imports `sitecustomize` when it starts,
and belongs on no other path. Every substitute is the last place that Python looks at: what is really installed wins.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


class ImportOnly(ModuleType):
    """A module of which every name exists, as a class, decorator or submodule. Kernels can be defined, not launched."""

    __path__: list[str] = []  # noqa: RUF012  # so that submodules are looked for

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any
        if name[0].isupper():
            value = type(name, (), {"__init__": _accept_anything, "__module__": self.__name__})
        else:
            full = f"{self.__name__}.{name}"
            value = sys.modules.get(full) or ImportOnly(full)
        setattr(self, name, value)
        return value

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """As a decorator, bare or with arguments: the function as it is."""
        if len(arguments) == 1 and callable(arguments[0]) and not options:
            return arguments[0]
        return _unchanged


class _Last(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds triton where nobody else did."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "triton" or (
            name.startswith("triton.") and isinstance(sys.modules.get("triton"), ImportOnly)
        ):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ImportOnly(spec.name)
        if spec.name == "triton":
            # What is used while modules are imported, outside kernels.
            vars(module).update(__version__="3.5.0", cdiv=_divide_up, next_power_of_2=_next_power_of_2)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


class _BeforeTorchvisionMeta(importlib.abc.MetaPathFinder):
    """Declares the operators that torchvision adds to while it is imported, in case its C library did not load."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision._meta_registrations":
            sys.meta_path.remove(self)
            import torch

            if not sys.modules["torchvision.extension"]._has_ops():
                for operator in ("nms", "qnms"):
                    torch.library.define(
                        f"torchvision::{operator}",
                        "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                    )
        return None  # the module itself is found as always


def _accept_anything(self: object, *arguments: Any, **options: Any) -> None: ...


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _divide_up(number: int, by: int) -> int:
    return -(number // -by)


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length() if number > 0 else 1


sys.meta_path.insert(0, _BeforeTorchvisionMeta())
sys.meta_path.append(_Last())
sys.path.append(str(Path(__file__).with_name("kernels")))
