"""Every error of the code base has a name, an action, a place in `deltasync.errors` and in the guide."""

import importlib
import pkgutil
import re
from pathlib import Path

import chunkstore
import deltasync
import deltasync.errors
import manifest
import publisher
import subscriber
from chunkstore.errors import Action, DeltasyncError

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "troubleshooting.md").read_text()
PACKAGES = (chunkstore, manifest, publisher, subscriber, deltasync)


def every_error() -> list[type[DeltasyncError]]:
    """All subclasses of DeltasyncError that any of our modules defines, found by importing every module."""
    for package in PACKAGES:
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    ours = {package.__name__ for package in PACKAGES}
    found: list[type[DeltasyncError]] = []
    queue: list[type[DeltasyncError]] = [DeltasyncError]
    while queue:
        parent = queue.pop()
        children = [child for child in parent.__subclasses__() if child.__module__.partition(".")[0] in ours]
        found += children
        queue += children
    return sorted(set(found), key=lambda error: error.kind)


ERRORS = every_error()


def test_the_search_finds_errors_of_every_package() -> None:
    assert {error.__module__.partition(".")[0] for error in ERRORS} >= {"chunkstore", "manifest", "publisher"}


def test_every_error_has_a_kind_of_its_own() -> None:
    kinds = [error.__dict__.get("kind") for error in ERRORS]
    assert None not in kinds, [error.__name__ for error in ERRORS if "kind" not in error.__dict__]
    assert len(set(kinds)) == len(kinds)
    assert all(kind is not None and re.fullmatch(r"[a-z][a-z0-9_]*", kind) for kind in kinds)


def test_every_error_says_what_its_handler_does() -> None:
    assert all(isinstance(error.action, Action) for error in ERRORS)


def test_every_error_says_what_to_do_next() -> None:
    assert [error.__name__ for error in ERRORS if not error.__dict__.get("usual_hint")] == []
    for error in ERRORS:
        assert error("it broke").hint == error.usual_hint
        assert error("it broke", hint="mend it").hint == "mend it"


def test_every_error_is_public() -> None:
    missing = [
        error.__name__ for error in ERRORS if getattr(deltasync.errors, error.__name__, None) is not error
    ]
    assert missing == []
    assert sorted(deltasync.errors.__all__) == sorted(
        {error.__name__ for error in ERRORS} | {"Action", "DeltasyncError"}
    )


def test_every_kind_has_its_section_with_its_action() -> None:
    sections = dict(re.findall(r"^### `([a-z0-9_]+)` \((retry|reseed|fatal)\)$", GUIDE, flags=re.MULTILINE))
    assert sections == {error.kind: str(error.action) for error in ERRORS}
