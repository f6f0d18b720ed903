"""Read as much of the log as a plan needs, newest first, and plan."""

import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Final

from chunkstore.errors import FormatUnsupported
from manifest.errors import ChainError, ForeignStream, ManifestInvalid
from manifest.log import VersionLog
from manifest.plan import Applied, Plan, plan
from manifest.schema import Manifest

_AHEAD: Final = 8  # manifests that are being read at a time


def find_plan(
    log: VersionLog,
    applied: Applied | None,
    target: int,
    unusable: Collection[bytes] = (),
    *,
    references: bool = False,
) -> Plan:
    """As `History.plan`, for whoever plans once."""
    return History(log).plan(applied, target, unusable, references=references)


class History:
    """Plans on one log, for which it reads each manifest once: what was read is kept until `forget`.

    A committed manifest never changes, but one that was read damaged may be whole the next time; so nothing is kept
    over a plan that fails. Safe to use from several threads.
    """

    def __init__(self, log: VersionLog) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._known: dict[int, Manifest] = {}

    def read(self, version: int) -> Manifest | None:
        """As `VersionLog.read`."""
        known = self._known.get(version)
        if known is not None:
            return known
        manifest = self._log.read(version)
        if manifest is not None:
            with self._lock:
                self._known[version] = manifest
        return manifest

    def forget(self, below: int | None = None) -> None:
        """Read anew what is asked for again: versions below `below`, or all."""
        with self._lock:
            self._known = {v: m for v, m in self._known.items() if below is not None and v >= below}

    def plan(
        self,
        applied: Applied | None,
        target: int,
        unusable: Collection[bytes] = (),
        *,
        references: bool = False,
    ) -> Plan:
        """Plan the path from `applied` to `target` from what the log holds, reading no more of it than that takes.

        Where one delta leads there, that is the path: its sections take their smallest encoding, an anchor's among
        them, so it is no larger than an anchor, and none is looked for. Else reads backwards from `target` until there
        is a path from the applied version, or one from an anchor that the deltas read since then outweigh; or to a gap
        or a manifest that cannot be read. An alternate that cannot be read is left out. `unusable`, `references`: as in
        `manifest.plan.plan`. Raises ObjectMissing if `target` does not exist; ChainError, caused by the manifest that
        cannot be read if there is one; ForeignStream.
        """
        try:
            return self._plan(applied, target, unusable, references)
        except ChainError:
            self.forget()
            raise

    def _plan(
        self, applied: Applied | None, target: int, unusable: Collection[bytes], references: bool
    ) -> Plan:
        newest = self.read(target) or self._log.read_required(target)
        search = partial(self._search, applied, target, unusable, references)
        if applied is not None and newest.base_version == applied.version:
            try:
                return search((), last=applied.version, likely=applied.version)
            except ForeignStream:
                raise
            except ChainError:
                pass  # an anchor may lead there
        alternates = self._log.alternates()
        likely = (
            max((v for v in alternates if v <= target), default=0) if applied is None else applied.version
        )
        return search(alternates, last=0, likely=likely)

    def _search(
        self,
        applied: Applied | None,
        target: int,
        unusable: Collection[bytes],
        references: bool,
        with_alternate: Collection[int],
        *,
        last: int,
        likely: int,
    ) -> Plan:
        """The path, from versions down to `last`; `likely`: where reading will end, as a rule."""
        manifests: dict[int, Manifest] = {}
        alternates: dict[int, Manifest] = {}
        stream = self._log.stream.id
        path = partial(plan, manifests, alternates, applied, target, stream, unusable, references=references)
        problem: Exception | None = None
        since = 0  # bytes of the versions read so far
        found: Plan | None = None
        for version, read in self._back(target, last, likely):
            try:
                manifest = read()
            except (ManifestInvalid, FormatUnsupported) as error:
                problem = error
                break
            if manifest is None:
                break
            manifests[version] = manifest
            alternate = None  # also if it cannot be read: the version itself may well be whole
            if version in with_alternate:
                alternate = _or_none(self._log.read_alternate, version)
            if alternate is not None:
                alternates[version] = alternate
            since += manifest.nbytes
            if alternate is not None or manifest.kind != "delta" or (applied and version == applied.version):
                found = _path_or_none(path)
            if found and (applied is None or version <= applied.version or since > found.nbytes):
                break
        try:
            return self._checked(manifests, applied, path)
        except ChainError as error:
            if problem is None or isinstance(error, ForeignStream):
                raise
            raise ChainError(f"{error.message}; {problem}", hint=error.hint) from problem

    def _checked(
        self, manifests: dict[int, Manifest], applied: Applied | None, path: Callable[[], Plan]
    ) -> Plan:
        """The path, once all that can refuse a version on its way is known, too: the bases of all of them, however old
        and whether or not the path uses them, and the parent of an anchor that it begins with.
        """
        asked = set(manifests)
        while True:
            found = path()
            if found.from_anchor or applied is None:
                first = found.steps[0].version
                wanted = {first - 1} if first else set()
            else:
                first, wanted = applied.version + 1, set()
            bases = {manifest.base_version for version, manifest in manifests.items() if version >= first}
            wanted = (wanted | {base for base in bases if base is not None}) - asked
            if not wanted:
                return found
            asked |= wanted
            for version in wanted:
                manifest = _or_none(self.read, version)
                if manifest is not None:
                    manifests[version] = manifest

    def _back(
        self, target: int, last: int, likely: int
    ) -> Iterator[tuple[int, Callable[[], Manifest | None]]]:
        """Versions from `target` down to `last`, each with what returns its manifest, or raises, as `read`.

        Down to `likely` several are being read at a time.
        """
        ahead: list[Future[Manifest | None]] = []
        for version in range(target, last - 1, -1):
            while len(ahead) < _AHEAD and version - len(ahead) >= max(last, likely):
                ahead.append(_started(partial(self.read, version - len(ahead))))
            yield version, ahead.pop(0).result if ahead else partial(self.read, version)


def _started(call: Callable[[], Manifest | None]) -> Future[Manifest | None]:
    """`call`, running on a thread of its own; that of a pool would make a clean stop wait for the network."""
    future: Future[Manifest | None] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where the result is wanted
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="deltasync-history").start()
    return future


def _path_or_none(path: Callable[[], Plan]) -> Plan | None:
    try:
        return path()
    except ForeignStream:
        raise
    except ChainError:
        return None


def _or_none(read: Callable[[int], Manifest | None], version: int) -> Manifest | None:
    try:
        return read(version)
    except (ManifestInvalid, FormatUnsupported):
        return None
