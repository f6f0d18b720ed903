"""Read as much of the log as a plan needs, newest first, and plan."""

from collections.abc import Collection, Mapping

from chunkstore.errors import FormatUnsupported
from manifest.errors import ChainError, ForeignStream, ManifestInvalid
from manifest.log import VersionLog
from manifest.plan import Applied, Plan, plan
from manifest.schema import Manifest


def find_plan(
    log: VersionLog,
    applied: Applied | None,
    target: int,
    unusable: Collection[bytes] = (),
    *,
    references: bool = False,
) -> Plan:
    """Plan the path from `applied` to `target` from what the log holds, reading no more of it than that takes.

    Reads backwards from `target` until there is a path from the applied version, or one from an anchor that the
    deltas read since then outweigh, and one version more, to check the link; or to a gap or a manifest that cannot
    be read. An alternate that cannot be read is left out. `unusable`, `references`: as in `plan`. Raises ObjectMissing
    if `target` does not exist; ChainError, caused by the manifest that cannot be read if there is one; ForeignStream.
    """
    manifests: dict[int, Manifest] = {}
    alternates: dict[int, Manifest] = {}
    problem: Exception | None = None
    newest = log.read_required(target)
    with_alternate = set(log.alternates())
    since = 0  # bytes of the versions read so far
    found: Plan | None = None
    enough = False
    for version in range(target, -1, -1):
        try:
            manifest = newest if version == target else log.read(version)
        except (ManifestInvalid, FormatUnsupported) as error:
            problem = error
            break
        if manifest is None:
            break
        manifests[version] = manifest
        if enough:
            break
        alternate = _read_alternate(log, version) if version in with_alternate else None
        if alternate is not None:
            alternates[version] = alternate
        since += manifest.nbytes
        if alternate is not None or manifest.kind != "delta" or (applied and version == applied.version):
            found = _plan_or_none(manifests, alternates, applied, target, log.stream.id, unusable, references)
        if found is not None:
            enough = applied is None or version <= applied.version or since > found.nbytes
    try:
        return plan(manifests, alternates, applied, target, log.stream.id, unusable, references=references)
    except ChainError as error:
        if problem is None or isinstance(error, ForeignStream):
            raise
        raise ChainError(f"{error.message}; {problem}", hint=error.hint) from problem


def _plan_or_none(
    manifests: Mapping[int, Manifest],
    alternates: Mapping[int, Manifest],
    applied: Applied | None,
    target: int,
    stream: bytes,
    unusable: Collection[bytes],
    references: bool,
) -> Plan | None:
    try:
        return plan(manifests, alternates, applied, target, stream, unusable, references=references)
    except ForeignStream:
        raise
    except ChainError:
        return None


def _read_alternate(log: VersionLog, version: int) -> Manifest | None:
    try:
        return log.read_alternate(version)
    except (ManifestInvalid, FormatUnsupported):
        return None  # the version itself may well be whole, and only a path through the alternate is lost
