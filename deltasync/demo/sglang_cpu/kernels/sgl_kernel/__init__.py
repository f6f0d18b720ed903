"""For machines without a GPU only: SGLang's compiled kernels, to import and not to call.

SGLang imports the kernels of every feature, used or not. What it does call, it computes with torch when it finds that
these kernels have registered no operators.
"""

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*arguments: object, **options: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} needs SGLang's compiled kernels")

    return absent
