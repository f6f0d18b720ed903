"""Does the machine bite? Break the protocol in one place after the other, and see which invariant says so.

`python -m tests.machine.mutations [word …]`: those whose name has one of the words, all without.
"""

import functools
import importlib
import inspect
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from chunkstore.errors import DeltasyncError
from tests.machine.machine import explore, play
from tests.machine.scenarios import SCENARIOS
from tests.machine.virtual import PACKAGES


@dataclass(frozen=True)
class Mutation:
    """In each of `places`, a function by its module and name, `old` becomes `new`."""

    name: str
    places: tuple[tuple[str, str, str, str], ...]


MUTATIONS: Final = (
    Mutation(
        "a commit whose key is taken counts as won, whatever lies there",
        (("manifest.log", "VersionLog.commit", "held == manifest.data", "held"),),
    ),
    Mutation(
        "a publisher that was fenced goes on from the newest version",
        (
            (
                "publisher.writer",
                "StreamWriter._settle_previous",
                "raise error",
                "self._stopped, self._base = None, self._log.newest()",
            ),
        ),
    ),
    Mutation(
        "an unknown commit counts as done",
        (
            (
                "publisher.writer",
                "StreamWriter._settle_previous",
                "error = self._settle_unknown(attempt)",
                "error = None",
            ),
        ),
    ),
    Mutation(
        "an unknown commit that is then denied counts as failed",
        (("publisher.commit", "Attempt.settle", "again=again", "again=False"),),
    ),
    Mutation(
        "changes of a failed attempt are forgotten, and nobody compares what is left with the base",
        (
            ("publisher.tracking", "Tracking.put_back", "restore(sealed)", "pass"),
            ("publisher.seal", "take", "shard.base_digest != committed", "committed is None"),
        ),
    ),
    Mutation(
        "a chunk whose upload fails is named all the same",
        (
            (
                "publisher.upload",
                "Upload._upload",
                "self._store.put(key, data)",
                "try:\n            self._store.put(key, data)\n        except Exception:\n            pass",
            ),
        ),
    ),
    Mutation(
        "a writer takes any manifest of its version for its own",
        (("publisher.member", "Member._look_for_outcome", "manifest.attempt == call.attempt", "True"),),
    ),
    Mutation(
        "a writer that cannot look is told that its version failed",
        (("publisher.member", "Member._learn", "problem = error", "raise"),),
    ),
    Mutation(
        "the coordinator does not compare the writers' bases with the version before",
        (
            ("publisher.combine", "combine", "base[tensor] & _MASK != committed[tensor]", "False"),
            ("publisher.tracking", "Tracking.send_whole", "shard.send_whole()", "pass"),
        ),
    ),
    Mutation(
        "garbage collection knows no leases",
        (("manifest.gc", "lowest_needed", "for lease in leases", "for lease in leases[:0]"),),
    ),
    Mutation(
        "garbage collection's floor is one too high",
        (("manifest.gc", "find_floor", "return version", "return version + 1"),),
    ),
    Mutation(
        "garbage collection takes chains that are not complete for complete",
        (("manifest.gc", "find_floor", "version <= bound.version and ", ""),),
    ),
    Mutation(
        "garbage collection spares nothing young",
        (("manifest.gc", "_of_attempts", "<= policy.grace", "< 0"),),
    ),
    Mutation(
        "compaction proves nothing, and memory flips a bit",
        (
            ("publisher.compact", "_sections", ".copy()", ".copy() ^ 1"),
            ("publisher.compact", "_prove", "if wrong", "if False"),
        ),
    ),
    Mutation(
        "the engine serves while it is written",
        (("subscriber.torch_engine", "TorchEngine._scatter", "self._gate.close(f", "str(f"),),
    ),
    Mutation(
        "what a repair has written is served without a look at it",
        (("subscriber.torch_engine", "TorchEngine._scatter", "self._verify_live(staged)", "pass"),),
    ),
    Mutation(
        "nobody audits what is served",
        (("subscriber.session", "Session._audit", "self._unaudited < self._config.audit_every", "True"),),
    ),
    Mutation(
        "a restarted subscriber believes its journal without asking the engine",
        (("subscriber.holder", "Holder._adopt_if_live", "if not holds", "if False and not holds"),),
    ),
)


@contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """The mutated functions in place of the real ones, wherever they were imported."""
    undo: list[Callable[[], object]] = []
    try:
        for module, name, old, new in mutation.places:
            undo += _replace(importlib.import_module(module), name, old, new)
        yield
    finally:
        for one in reversed(undo):
            one()


def _replace(module: Any, name: str, old: str, new: str) -> list[Callable[[], object]]:
    *path, last = name.split(".")
    owner = functools.reduce(getattr, path, module)
    real = vars(owner)[last]
    source = textwrap.dedent(inspect.getsource(real))
    assert source.count(old) == 1, f"{name} has {source.count(old)} times {old!r}"
    made: dict[str, Any] = {}
    exec(compile(source.replace(old, new), module.__file__, "exec"), module.__dict__, made)
    homes = [owner]
    if owner is module:
        homes = [m for n, m in sys.modules.items() if n.partition(".")[0] in PACKAGES]
    undo: list[Callable[[], object]] = []
    for home in homes:
        for key, value in list(vars(home).items()):
            if value is real:
                setattr(home, key, made[last])
                undo.append(functools.partial(setattr, home, key, real))
    return undo


def main() -> int:
    words = sys.argv[1:]
    unseen = 0
    for mutation in MUTATIONS:
        if words and not any(word in mutation.name for word in words):
            continue
        began = time.perf_counter()
        try:
            with applied(mutation):
                for scenario in SCENARIOS:
                    play(scenario)
                explore(300, shrink=False)
        except (AssertionError, DeltasyncError) as error:
            said = re.sub(r"\s+", " ", str(error).partition("\n")[0])
        else:
            said, unseen = "NOT SEEN", unseen + 1
        print(f"{mutation.name} | {said[:160]} | {time.perf_counter() - began:.0f} s", flush=True)
    return unseen


if __name__ == "__main__":
    sys.exit(main())
