"""The cheapest verified path to a version: a pure function of the manifests at hand.

What a reader refuses (DESIGN §7): see `link_refusal` and `alternate_refusal`. A refused or missing version
cannot be on a path, nor can anything before it; an anchor after it is a fresh start.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from manifest.errors import ChainError, ForeignStream
from manifest.keys import manifest_key
from manifest.schema import Manifest


@dataclass(frozen=True, slots=True)
class Applied:
    """What a reader holds: version, root digest (32 bytes), and its manifest's hash where known."""

    version: int
    root: bytes
    manifest_hash: bytes | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Manifests to apply, in order; the last one's `digests` are the goal. No steps: the target is held
    already.

    `nbytes`: size of all chunks to fetch. `from_anchor`: the first step is an anchor, what is held is not
    used.
    """

    steps: tuple[Manifest, ...]
    nbytes: int
    from_anchor: bool


@dataclass(frozen=True, slots=True)
class _Path:
    nbytes: int = 0
    steps: int = 0
    whole: bool = False  # the first step is an anchor
    last: Manifest | None = None  # None: nothing, or the version that is held
    before: "_Path | None" = None

    def then(self, step: Manifest) -> "_Path":
        return _Path(
            self.nbytes + step.nbytes, self.steps + 1, self.whole or step.kind != "delta", step, self
        )

    def manifests(self) -> tuple[Manifest, ...]:
        out: list[Manifest] = []
        path: _Path | None = self
        while path is not None and path.last is not None:
            out.append(path.last)
            path = path.before
        return tuple(reversed(out))


def plan(
    manifests: Mapping[int, Manifest],
    alternates: Mapping[int, Manifest],
    applied: Applied | None,
    target: int,
    stream: bytes,
    unusable: Collection[bytes] = (),
    *,
    references: bool = False,
) -> Plan:
    """The path to version `target` with the fewest bytes, then without an anchor, then with the fewest steps.

    It runs from what is `applied`, through deltas, or from an anchor or alternate anchor and deltas after it.
    Every version between its source and the target must be at hand and fit its parent, even where a delta
    skips it. `manifests`, `alternates`: by version, as far as they were read. `unusable`: hashes of manifests
    that no path may use, since what they name cannot be had. `references`: the reader has the checkpoint that a
    version may refer to, which is then as good as an anchor. Raises ChainError naming the version that is in
    the way, ForeignStream if any manifest up to `target` is not of `stream` (16 bytes).
    """
    _check_streams(manifests, stream, target)
    _check_streams(alternates, stream, target)
    if applied is not None and applied.version > target:
        raise ChainError(
            f"version {applied.version} is applied, version {target} is older: versions never go down",
            hint="was the log restored from a backup? start over without an applied version to accept it",
        )
    first, obstacle = _verified_from(manifests, target)
    held, doubt = _held(manifests, applied, first)
    best: dict[int, _Path] = {}
    roots = {version: manifest.root for version, manifest in manifests.items()}
    if held is not None:
        best[held.version] = _Path()
        roots[held.version] = held.root
    for version in range(first, target + 1):
        if held is not None and version == held.version:
            continue
        manifest, base = manifests[version], manifests[version].base_version
        paths = [
            _Path().then(anchor)
            for anchor in _anchors(manifest, alternates, references)
            if anchor.hash not in unusable
        ]
        if base in best and manifest.base_root == roots[base] and manifest.hash not in unusable:
            paths.append(best[base].then(manifest))
        if paths:
            best[version] = min(paths, key=lambda path: (path.nbytes, path.whole, path.steps))
    if target not in best:
        raise ChainError(
            f"there is no verified path to version {target}"
            + (f" from version {applied.version}" if applied is not None else "")
            + ": "
            + (
                "; ".join(filter(None, (doubt, obstacle)))
                or f"no usable anchor in versions {first} to {target}"
            )
            + (
                "; version 0 refers to a checkpoint that is not here"
                if _refers(manifests, references)
                else ""
            ),
            hint="nothing was changed; name the folder that the trainer started from as base_checkpoint, or ask the "
            "publisher for an anchor"
            if _refers(manifests, references)
            else "nothing was changed; ask the publisher for an anchor",
        )
    return Plan(best[target].manifests(), best[target].nbytes, best[target].whole)


def link_refusal(
    version: int, manifest: Manifest, parent: Manifest | None, base: Manifest | None
) -> str | None:
    """Why `manifest` cannot be `version`, or None. `parent`, `base`: those manifests where they are known.

    The epoch never goes down, and within an epoch there is one publisher. A delta is against an older
    version, its base root is that version's root, and its catalog that version's catalog: the catalog changes
    only at an anchor.
    """
    if manifest.version != version:
        return f"it says it is version {manifest.version}"
    if version == 0 and manifest.parent_hash is not None:
        return "version 0 has no parent"
    if manifest.base_version is not None and manifest.base_version >= version:
        return f"its base, version {manifest.base_version}, is not older"
    if parent is not None:
        if manifest.parent_hash != parent.hash:
            return f"its parent is not the version {parent.version} that is there"
        if manifest.epoch < parent.epoch:
            return f"its epoch {manifest.epoch} is below its parent's {parent.epoch}"
        if manifest.epoch == parent.epoch and manifest.publisher != parent.publisher:
            return f"two publishers claim epoch {manifest.epoch}"
    if base is not None and manifest.base_version == base.version:
        if manifest.base_root != base.root:
            return f"its base root is not the root of version {base.version}"
        if manifest.catalog != base.catalog:
            return f"its catalog is not that of its base, version {base.version}; only an anchor changes it"
    return None


def alternate_refusal(alternate: Manifest, original: Manifest) -> str | None:
    """Why `alternate` cannot stand for the committed `original`, or None if it is the same weights stored
    whole.
    """
    if alternate.kind != "anchor":
        return "it is not an anchor"
    if alternate.version != original.version or alternate.stream != original.stream:
        return f"it is not of version {original.version} of this stream"
    if alternate.parent_hash != original.hash:
        return "it re-encodes another manifest"
    same = (original.root, original.catalog, original.digests)
    if (alternate.root, alternate.catalog, alternate.digests) != same:
        return "its digests or catalog differ from the committed version's"
    return None


def _check_streams(manifests: Mapping[int, Manifest], stream: bytes, target: int) -> None:
    for version in sorted(manifests):
        if version <= target and manifests[version].stream != stream:
            raise ForeignStream(
                f"version {version} belongs to stream {manifests[version].stream.hex()}, not {stream.hex()}",
                hint="two streams share one prefix, or objects were copied: give each stream its own prefix",
            )


def _verified_from(manifests: Mapping[int, Manifest], target: int) -> tuple[int, str]:
    """The first version from which everything up to `target` is at hand and fits, and what lies just before
    it.
    """
    for version in range(target, -1, -1):
        manifest = manifests.get(version)
        if manifest is None:
            return version + 1, f"version {version} ({manifest_key(version)}) is missing"
        base = manifests.get(manifest.base_version) if manifest.base_version is not None else None
        refusal = link_refusal(version, manifest, manifests.get(version - 1), base)
        if refusal:
            return version + 1, f"version {version} ({manifest_key(version)}) is refused: {refusal}"
    return 0, ""


def _held(
    manifests: Mapping[int, Manifest], applied: Applied | None, first: int
) -> tuple[Applied | None, str]:
    """`applied` if a path may start there, else None and why not."""
    if applied is None or applied.version < first - 1:
        return None, ""
    own, child = manifests.get(applied.version), manifests.get(applied.version + 1)
    if own is not None and own.root != applied.root:
        return None, f"what is held is not version {applied.version}: its root digest differs"
    known = own.hash if own is not None else child.parent_hash if child is not None else None
    if applied.manifest_hash is not None and known is not None and known != applied.manifest_hash:
        return None, f"the log's version {applied.version} is not the one that was applied"
    return applied, ""


def _anchors(original: Manifest, alternates: Mapping[int, Manifest], references: bool) -> list[Manifest]:
    alternate = alternates.get(original.version)
    whole = original.kind == "anchor" or (references and original.kind == "reference")
    anchors = [original] if whole else []
    if alternate is not None and alternate_refusal(alternate, original) is None:
        anchors.append(alternate)
    return anchors


def _refers(manifests: Mapping[int, Manifest], references: bool) -> bool:
    """Whether a base checkpoint would help a reader that has none."""
    return not references and 0 in manifests and manifests[0].kind == "reference"
