"""What a manifest must satisfy against its catalog before anything is built on it."""

import numpy as np

from manifest.catalog import Catalog, TensorSpec, root_digest
from manifest.errors import ManifestInvalid
from manifest.keys import chunk_prefix
from manifest.schema import Manifest
from manifest.sections import Columns, SectionRef, Sections


def check_layout(manifest: Manifest, catalog: Catalog) -> None:
    """Raise ManifestInvalid, naming the version and every offending tensor, unless `manifest` fits `catalog`.

    There is one digest per tensor and the root follows from them. Sections lie inside their tensors and store no
    element twice, as far as ranges and counts tell; a sparse one belongs to a dtype that may be sent sparsely. The
    sections of an anchor store every element; a tensor without elements has none.
    """
    name = name_of(manifest)
    if manifest.catalog != catalog.hash:
        raise ManifestInvalid(f"{name} has catalog {manifest.catalog.hex()}, not {catalog.hash.hex()}")
    if len(manifest.digests) != 8 * len(catalog.tensors):
        raise ManifestInvalid(
            f"{name} has {len(manifest.digests) // 8} digests, its catalog {len(catalog.tensors)} tensors"
        )
    if root_digest(catalog, manifest.digest_array.astype(np.uint64)) != manifest.root:
        raise ManifestInvalid(f"{name} has a root digest that does not follow from its tensors' digests")
    sections = manifest.sections
    sections = sections[:, np.lexsort((sections[1], sections[0]))]
    if sections.size and sections[0, -1] >= len(catalog.tensors):
        raise ManifestInvalid(f"{name} has a section of tensor {sections[0, -1]}, the catalog has fewer")
    problems = _problems(sections, catalog)
    if manifest.kind == "anchor":
        problems += _untiled(sections, catalog)
    if problems:
        raise ManifestInvalid(f"{name} does not fit its catalog: " + "; ".join(problems[:20]))


def name_of(manifest: Manifest) -> str:
    """For errors: which manifest it is. Not by its key: it does not say whether it is an alternate."""
    chunks = f" ({chunk_prefix(manifest.version, manifest.attempt)})" if manifest.chunks else ""
    return f"the {manifest.kind} of version {manifest.version}{chunks}"


def section_problem(section: SectionRef, spec: TensorSpec) -> str | None:
    """Why `section` cannot be a part of the tensor `spec`, or None."""
    if section.stop > spec.numel:
        return f"{spec.name!r} has {spec.numel} elements, a section goes to {section.stop}"
    if not section.whole and not spec.sparse:
        return f"{spec.name!r} is {spec.dtype}, which is only sent whole"
    return None


def _problems(sections: Columns, catalog: Catalog) -> list[str]:
    """What is wrong with `sections`, columns of Sections in the order of their tensors and starts.

    Ranges of writers whose shards interleave overlap, but not where both are whole.
    """
    tensor, _, stop, whole, _ = sections
    numel = np.array([spec.numel for spec in catalog.tensors], np.int64)
    sparse = np.array([spec.sparse for spec in catalog.tensors], np.bool_)
    suspects = np.flatnonzero((stop > numel[tensor]) | ((whole == 0) & ~sparse[tensor]))
    refs = Sections(sections[:, suspects])
    problems = [section_problem(ref, catalog.tensors[ref.tensor]) for ref in refs]
    tensor, start, stop, _, _ = sections[:, whole != 0]
    overlaps = 1 + np.flatnonzero((tensor[1:] == tensor[:-1]) & (stop[:-1] > start[1:]))
    stored = _stored(sections, catalog)
    return [
        *(problem for problem in problems if problem),
        *(
            f"{catalog.tensors[tensor[i]].name!r} has two whole sections over element {start[i]}"
            for i in overlaps
        ),
        *(
            f"{catalog.tensors[i].name!r} has {numel[i]} elements, its sections store {stored[i]}"
            for i in np.flatnonzero(stored > numel)
        ),
    ]


def _untiled(sections: Columns, catalog: Catalog) -> list[str]:
    """Tensors that `sections`, which store no element twice, do not give whole."""
    covered = _stored(sections, catalog)
    return [
        f"{spec.name!r} has {spec.numel} elements, the anchor holds {n}"
        for spec, n in zip(catalog.tensors, covered.tolist(), strict=True)
        if n != spec.numel
    ]


def _stored(sections: Columns, catalog: Catalog) -> Columns:
    """How many elements of each tensor are stored."""
    tensor, _, _, _, changed = sections
    stored = np.zeros(len(catalog.tensors), np.int64)
    np.add.at(stored, tensor, changed)
    return stored
