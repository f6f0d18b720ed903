"""Build small, valid streams from numpy arrays: catalog, anchors, deltas, takeovers, alternates."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import blake3
import numpy as np
import numpy.typing as npt

from chunkstore.codec import WINDOW, EncodedSection, Section, encode_section, pack_chunk
from chunkstore.digest import digest
from chunkstore.dtypes import Bits, bits_dtype
from chunkstore.store import Store
from manifest.catalog import Catalog, TensorSpec, root_digest
from manifest.keys import chunk_key, status_key
from manifest.log import VersionLog, create_or_open_stream, open_stream, put_catalog
from manifest.schema import ChunkRef, Manifest
from manifest.sections import SectionRef, Sections
from manifest.signing import Signer
from tests.support.manifests import fixed_bytes


@dataclass(frozen=True)
class Tensor:
    """Bit patterns of one tensor, as `bits_dtype(dtype)`, in its shape."""

    dtype: str
    bits: Bits


Weights = Mapping[str, Tensor]


def random_weights(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str] | None = None, *, seed: int = 0
) -> dict[str, Tensor]:
    """Random bit patterns, NaNs and all; BF16 unless `dtypes` says otherwise."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, shape in shapes.items():
        dtype = (dtypes or {}).get(name, "BF16")
        kind = bits_dtype(dtype)
        out[name] = Tensor(
            dtype, rng.integers(0, 2 if dtype == "BOOL" else 1 << 8 * kind.itemsize, shape, kind)
        )
    return out


def perturbed(weights: Weights, fraction: float, *, seed: int = 0) -> dict[str, Tensor]:
    """A copy with about `fraction` of each tensor's elements set to other bits."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, tensor in weights.items():
        bits = tensor.bits.copy()
        bits[rng.random(bits.shape) < fraction] ^= bits.dtype.type(1)
        out[name] = Tensor(tensor.dtype, bits)
    return out


def catalog_of(weights: Weights, aliases: dict[str, str] | None = None) -> Catalog:
    return Catalog.of([TensorSpec(name, t.dtype, t.bits.shape) for name, t in weights.items()], aliases)


def digests_of(weights: Weights, catalog: Catalog) -> npt.NDArray[np.uint64]:
    return np.array([digest(spec.name, weights[spec.name].bits) for spec in catalog.tensors], np.uint64)


def sections_of(tensor: int, new: Tensor, old: Tensor | None) -> Iterator[Section]:
    """The tensor window by window: whole without `old`, else what differs from it, sparse where that is allowed."""
    flat = new.bits.ravel()
    for start in range(0, flat.size, WINDOW):
        values = flat[start : start + WINDOW]
        stop = start + values.size
        before = None if old is None else old.bits.ravel()[start:stop]
        changed = None if before is None else np.flatnonzero(values != before)
        if changed is not None and not changed.size:
            continue
        if (
            before is None
            or changed is None
            or new.dtype not in ("BF16", "F16")
            or 3 * changed.size > values.size
        ):
            yield Section(tensor, new.dtype, start, stop, None, values.copy())
        else:
            offsets = changed.astype(np.uint32)
            yield Section(tensor, new.dtype, start, stop, offsets, values[changed], old=before[changed])


class StreamBuilder:
    """One publisher's stream in `store`. `weights[v]` are the weights of version v.

    Chunks hold at most `per_chunk` sections, so that small streams have several. Ids depend on `publisher` and the
    order of calls only. `signer`: signs all manifests; may be replaced or taken away at any time.
    """

    def __init__(
        self,
        store: Store,
        weights: Weights,
        aliases: dict[str, str] | None = None,
        *,
        per_chunk: int = 3,
        publisher: bytes = b"publisher-number",
        signer: Signer | None = None,
    ) -> None:
        self.store = store
        self.signer = signer
        self.log = VersionLog(store, create_or_open_stream(store))
        self.aliases = aliases
        self.catalog = catalog_of(weights, aliases)
        self.per_chunk = per_chunk
        self.publisher = publisher
        self.epoch = 1
        self.weights: list[Weights] = []
        self.manifests: list[Manifest] = []
        self._ids = count()
        put_catalog(store, self.catalog)
        self.anchor(weights)

    @property
    def version(self) -> int:
        """The newest version."""
        return len(self.manifests) - 1

    def anchor(self, weights: Weights | None = None) -> Manifest:
        """Commit the next version whole; the catalog may change with it."""
        weights = self.weights[-1] if weights is None else weights
        self.catalog = catalog_of(weights, self.aliases)
        put_catalog(self.store, self.catalog)
        return self._commit(weights, base=None)

    def delta(self, weights: Weights, *, base: int | None = None) -> Manifest:
        """Commit the next version as what differs from version `base`, the newest unless given."""
        return self._commit(weights, base=self.version if base is None else base)

    def train(self, fraction: float = 0.1, steps: int = 1) -> Manifest:
        """Commit `steps` deltas that each change about `fraction` of all elements; returns the last."""
        for _ in range(steps):
            self.delta(perturbed(self.weights[-1], fraction, seed=self.version))
        return self.manifests[-1]

    def takeover(self, publisher: bytes) -> Manifest:
        """Commit an empty version of the next epoch as another publisher, which commits from then on."""
        self.epoch, self.publisher = self.epoch + 1, publisher
        return self.delta(self.weights[-1])

    def alternate(self, version: int) -> Manifest:
        """Store another encoding of `version`, an anchor."""
        manifest = self.make(
            self.weights[version], None, version=version, parent_hash=self.manifests[version].hash
        )
        assert self.log.put_alternate(manifest).won
        return manifest

    def make(self, weights: Weights, base: int | None, **changes: Any) -> Manifest:
        """Upload the chunks of a version and return its manifest, not committed. `changes` replaces fields."""
        version = changes.get("version", len(self.manifests))
        attempt = fixed_bytes("attempt", self.publisher, next(self._ids), length=16)
        old = None if base is None else self.weights[base]
        encoded = [
            encode_section(section)
            for i, spec in enumerate(self.catalog.tensors)
            for section in sections_of(i, weights[spec.name], None if old is None else old[spec.name])
        ]
        groups = [encoded[i : i + self.per_chunk] for i in range(0, len(encoded), self.per_chunk)]
        digests = digests_of(weights, self.catalog)
        fields: dict[str, Any] = {
            "stream": self.log.stream.id,
            "version": version,
            "kind": "anchor" if base is None else "delta",
            "base_version": base,
            "base_root": None if base is None else self.manifests[base].root,
            "root": root_digest(self.catalog, digests),
            "parent_hash": self.manifests[-1].hash if self.manifests else None,
            "epoch": self.epoch,
            "publisher": self.publisher,
            "commit_id": fixed_bytes("commit", self.publisher, next(self._ids), length=16),
            "attempt": attempt,
            "catalog": self.catalog.hash,
            "train_step": version,
            "optimizer_steps": 1,
            "created_at": 1_700_000_000.0 + version,
            "digests": digests.astype("<u8").tobytes(),
            "chunks": [self._upload(chunk_key(version, attempt, 0, n), g) for n, g in enumerate(groups)],
            "stats": {},
        }
        manifest = Manifest(**(fields | changes))
        return manifest if self.signer is None else self.signer.sign(manifest)

    def commit(self, manifest: Manifest, weights: Weights) -> Manifest:
        """Commit what `make` returned, as the version with these `weights`."""
        assert self.log.commit(manifest).won
        self.manifests.append(manifest)
        self.weights.append(weights)
        return manifest

    def _commit(self, weights: Weights, base: int | None) -> Manifest:
        return self.commit(self.make(weights, base), weights)

    def _upload(self, key: str, group: list[EncodedSection]) -> ChunkRef:
        data = pack_chunk(group)
        self.store.put(key, data)
        sections = [
            SectionRef(
                tensor=s.info.tensor,
                start=s.info.start,
                stop=s.info.stop,
                whole=s.info.whole,
                changed=s.info.count,
            )
            for s in group
        ]
        return ChunkRef(
            key=key, nbytes=len(data), hash=blake3.blake3(data).digest(), sections=Sections.of(sections)
        )


def refuse(store: Store, version: int, name: str = "worker") -> None:
    """Let a subscriber's status object say that it refuses `version`."""
    status = {
        "stream": open_stream(store).id.hex(), "applied_version": version - 1, "needs_version": version - 1,
        "renew_seconds": 30.0, "refused": [{"version": version, "kind": "corrupt_object", "action": "reseed"}],
    }  # fmt: skip
    store.put(status_key(name), json.dumps(status).encode())
