"""Read a whole stream again and check all of it: every manifest, catalog, chunk, link and digest."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from chunkstore.errors import DeltasyncError, ObjectMissing
from chunkstore.store import Store
from manifest.catalog import Catalog
from manifest.errors import ChainError
from manifest.fetch import fetch_chunk
from manifest.image import Image, scratch_image
from manifest.keys import ALTERNATES, STREAM, VERSIONS, alternate_key, catalog_key, manifest_key
from manifest.layout import check_layout
from manifest.log import VersionLog, open_stream, read_catalog
from manifest.plan import alternate_refusal, link_refusal
from manifest.rebuild import rebuild
from manifest.schema import ChunkRef, Manifest
from manifest.signing import Trust

if TYPE_CHECKING:  # it needs torch
    from manifest.checkpoint import Checkpoint

_MISSING = ObjectMissing.kind


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with the object `key`; `kind` is the error's."""

    key: str
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was read, and every problem found. `stream`: its id as hex, None if it cannot be opened.

    `versions`, `alternates`, `chunks`, `nbytes` (of chunks) count what was read and sound in itself. `unverified`:
    versions whose weights could not be recomputed, since they, or a version they build on, have a problem.
    `collected`: those that cannot be for want of any object, below a whole version that is sound: what garbage
    collection leaves, and no problem.
    """

    url: str
    stream: str | None
    newest: int | None
    versions: int
    alternates: int
    chunks: int
    nbytes: int
    unverified: tuple[int, ...]
    collected: tuple[int, ...]
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_stream(
    store: Store,
    scratch: Path | None = None,
    trust: Trust | None = None,
    base: "Checkpoint | None" = None,
) -> VerifyReport:
    """Verify the stream at `store`; never stops at a problem that an object has, but lists it.

    Reads every chunk once, and again where a delta does not build on the version before it. Needs disk of the
    model's size below `scratch` meanwhile. `trust`: what every manifest must satisfy. `base`: the
    checkpoint that version 0 may refer to; without it what only that leads to stays unverified.
    Raises LocalDiskError if there is no such disk.
    """
    with ExitStack() as stack:
        return _Verification(store, scratch, trust, base, stack).run()


class _Verification:
    def __init__(
        self,
        store: Store,
        scratch: Path | None,
        trust: Trust | None,
        base: "Checkpoint | None",
        stack: ExitStack,
    ) -> None:
        self._store = store
        self._scratch = scratch
        self._trust = trust
        self._base = base
        self._stack = stack
        self._catalogs: dict[bytes, Catalog | None] = {}
        self._image: Image | None = None
        self._held: int | None = None  # version the image holds, None if none for certain
        self._sound: set[int] = set()  # versions whose weights were recomputed
        self._whole: set[int] = set()  # of these, those stored whole
        self._with_alternate: set[int] = set()
        self._gone: list[tuple[int, list[Problem]]] = []  # encodings without any object, by version
        self._doubtful: set[int] = set()  # not sound for another reason
        self._listed: list[int] = []
        self._problems: list[Problem] = []
        self._versions = self._alternates = self._chunks = self._nbytes = 0

    def run(self) -> VerifyReport:
        stream = None
        try:
            info = open_stream(self._store, self._trust)
        except DeltasyncError as error:
            self._note(STREAM, error)
        else:
            stream = info.id.hex()
            log = VersionLog(self._store, info, trust=self._trust)
            self._list_alternates(log)
            self._walk_versions(log)
        collected = self._collected()
        return VerifyReport(
            self._store.url,
            stream,
            self._listed[-1] if self._listed else None,
            self._versions,
            self._alternates,
            self._chunks,
            self._nbytes,
            tuple(v for v in self._listed if v not in self._sound and v not in collected),
            tuple(v for v in self._listed if v in collected),
            tuple(self._problems),
        )

    def _collected(self) -> set[int]:
        """Versions that garbage collection has removed; what else has no object left becomes a problem."""
        floor = max(self._whole, default=0)
        for version, problems in self._gone:
            if version >= floor:
                self._problems += problems
                self._doubtful.add(version)
        return {v for v in self._listed if v < floor and v not in self._sound and v not in self._doubtful}

    def _walk_versions(self, log: VersionLog) -> None:
        try:
            self._listed = list(log.versions())
        except DeltasyncError as error:
            self._note(VERSIONS, error)
            return
        parent: Manifest | None = None
        expected = 0
        for version in self._listed:
            if version != expected:
                self._refuse(manifest_key(expected), f"missing, though version {version} exists")
                parent = None
            parent = self._version(log, version, parent)
            expected = version + 1
        for version in sorted(self._with_alternate.difference(self._listed)):
            self._refuse(alternate_key(version), f"there is no version {version}")

    def _version(self, log: VersionLog, version: int, parent: Manifest | None) -> Manifest | None:
        key = manifest_key(version)
        try:
            manifest = log.read_required(version)
        except DeltasyncError as error:
            self._note(key, error)
            self._doubtful.add(version)
            if version in self._with_alternate:
                self._note(alternate_key(version), error)  # what it re-encodes cannot be read
            return None
        self._versions += 1
        base = parent
        if manifest.base_version is not None and (parent is None or manifest.base_version != parent.version):
            base = self._read_quietly(log, manifest.base_version)
        refusal = link_refusal(version, manifest, parent, base)
        if refusal:
            self._refuse(key, refusal)
        if self._rebuild(log, key, manifest):
            self._note_sound(version, whole=manifest.kind == "anchor")
        if version in self._with_alternate:
            self._alternate(log, manifest)
        return manifest

    def _note_sound(self, version: int, *, whole: bool) -> None:
        self._sound.add(version)
        if whole:
            self._whole.add(version)

    def _list_alternates(self, log: VersionLog) -> None:
        try:
            self._with_alternate = set(log.alternates())
        except DeltasyncError as error:
            self._note(ALTERNATES, error)

    def _alternate(self, log: VersionLog, original: Manifest) -> None:
        key = alternate_key(original.version)
        try:
            alternate = log.read_alternate(original.version)
        except DeltasyncError as error:
            self._note(key, error)
            return
        if alternate is None:
            return  # deleted since it was listed
        self._alternates += 1
        refusal = alternate_refusal(alternate, original)
        if refusal:
            self._refuse(key, refusal)
        if self._rebuild(log, key, alternate) and not refusal:
            self._note_sound(original.version, whole=True)

    def _rebuild(self, log: VersionLog, key: str, manifest: Manifest) -> bool:
        """Bring the image to the version of `manifest`, reading all its chunks; False if that cannot be done."""
        catalog = self._catalog(manifest.catalog)
        if catalog is None:
            self._doubtful.add(manifest.version)
            return False
        image = self._image_of(catalog)
        if manifest.kind == "reference":
            return self._load(key, manifest, image)
        fits = self._fits(log, key, manifest, image)
        self._held = None
        problems: list[Problem] = []
        for ref in manifest.chunks:
            problem = self._chunk(ref, image, write=fits and not problems)
            problems += [] if problem is None else [problem]
        if problems and len(problems) == len(manifest.chunks) and {p.kind for p in problems} == {_MISSING}:
            self._gone.append((manifest.version, problems))
            return False
        if not problems and fits:
            try:
                image.check(manifest, f"{self._store.url}/{key}")
            except DeltasyncError as error:
                problems.append(Problem(key, error.kind, str(error)))
        if problems:
            self._problems += problems
            self._doubtful.add(manifest.version)
        elif fits:
            self._held = manifest.version
        return fits and not problems

    def _load(self, key: str, manifest: Manifest, image: Image) -> bool:
        self._held = None
        if self._base is None:
            self._doubtful.add(manifest.version)
            return False
        try:
            image.load(self._base, manifest)
        except DeltasyncError as error:
            self._note(key, error)
            self._doubtful.add(manifest.version)
            return False
        self._held = manifest.version
        return True

    def _fits(self, log: VersionLog, key: str, manifest: Manifest, image: Image) -> bool:
        """Whether `manifest` can be applied: its layout is right, and the image is brought to its base."""
        base = manifest.base_version
        try:
            check_layout(manifest, image.catalog)
            if base is not None and base != self._held and base in self._sound:
                rebuild(log, base, image, base=self._base)
        except DeltasyncError as error:
            self._note(key, error)
            self._doubtful.add(manifest.version)
            return False
        if base in self._doubtful and base not in self._sound:
            self._doubtful.add(manifest.version)
        return base is None or base in self._sound  # why a base is not sound has been noted

    def _chunk(self, ref: ChunkRef, image: Image, *, write: bool) -> Problem | None:
        """Read and decode one chunk; returns its problem, if it has one."""
        try:
            reader = fetch_chunk(self._store, ref, image.catalog)
            for i in range(len(reader.sections)):
                section = reader.decode(i)
                if write:
                    image.write(section)
        except DeltasyncError as error:
            return Problem(ref.key, error.kind, str(error))
        self._chunks += 1
        self._nbytes += ref.nbytes
        return None

    def _image_of(self, catalog: Catalog) -> Image:
        if self._image is None or self._image.catalog.hash != catalog.hash:
            self._image = None
            self._stack.close()
            self._image = self._stack.enter_context(scratch_image(catalog, self._scratch))
            self._held = None
        return self._image

    def _catalog(self, catalog_hash: bytes) -> Catalog | None:
        if catalog_hash not in self._catalogs:
            try:
                self._catalogs[catalog_hash] = read_catalog(self._store, catalog_hash)
            except DeltasyncError as error:
                self._note(catalog_key(catalog_hash), error)
                self._catalogs[catalog_hash] = None
        return self._catalogs[catalog_hash]

    def _read_quietly(self, log: VersionLog, version: int) -> Manifest | None:
        try:
            return log.read(version)
        except DeltasyncError:
            return None  # it was noted when the walk came to it

    def _note(self, key: str, error: DeltasyncError) -> None:
        self._problems.append(Problem(key, error.kind, str(error)))

    def _refuse(self, key: str, why: str) -> None:
        self._note(key, ChainError(f"{self._store.url}/{key}: {why}"))
