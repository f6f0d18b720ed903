"""Proof that `chunkstore`, `manifest`, `publisher` and `subscriber` are ours.

The names are common words. Should another installed package or a folder of the working directory come first on the
import path, every later error would be obscure; so `import deltasync` asks where each of them would be loaded from.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

SIBLINGS: Final = ("chunkstore", "manifest", "publisher", "subscriber")


class ShadowedPackageError(ImportError):
    """A package of another origin, or none, answers to the name of one of ours. Raised by `import deltasync`.

    Not a DeltasyncError: that class lives in `chunkstore`, which may be the very package that is shadowed.
    """


def check_siblings() -> None:
    """Raise ShadowedPackageError, naming every wrong package and its path, unless all four lie beside `deltasync`."""
    root = Path(__file__).resolve().parent.parent
    problems = []
    for name in SIBLINGS:
        found = _location(name)
        if found is None:
            problems.append(f"package {name!r} is missing: expected {root / name}")
        elif found != root / name:
            problems.append(f"package {name!r} is shadowed by {found}: expected {root / name}")
    if problems:
        raise ShadowedPackageError(
            "deltasync cannot be imported: "
            + "; ".join(problems)
            + ". Rename or uninstall the other package, or put deltasync's folder first in PYTHONPATH."
        )


def _location(name: str) -> Path | None:
    """Where `import <name>` finds its code: a package's folder, a single module's file; None if nowhere."""
    module = sys.modules.get(name)
    if module is not None:
        origin, places = getattr(module, "__file__", None), list(getattr(module, "__path__", ()))
    else:
        spec = find_spec(name)
        if spec is None:
            return None
        origin, places = spec.origin, list(spec.submodule_search_locations or ())
    if origin is not None and Path(origin).name == "__init__.py":
        return Path(origin).resolve().parent
    if places:  # a folder without __init__.py
        return Path(places[0]).resolve() / "(namespace package)"
    return Path(origin).resolve() if origin is not None else Path("(no file)")
