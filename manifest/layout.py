"""What a manifest must satisfy against its catalog before anything is built on it."""

import numpy as np

from manifest.catalog import Catalog, TensorSpec, root_digest
from manifest.errors import ManifestInvalid
from manifest.keys import manifest_key
from manifest.schema import Manifest, SectionRef


def check_layout(manifest: Manifest, catalog: Catalog) -> None:
    """Raise ManifestInvalid, naming the version and every offending tensor, unless `manifest` fits `catalog`.

    There is one digest per tensor and the root follows from them. Sections lie inside their tensors and do
    not overlap; a sparse one belongs to a dtype that may be sent sparsely. The sections of an anchor are
    whole and tile every tensor; a tensor without elements has none.
    """
    name = f"manifest of version {manifest.version} ({manifest_key(manifest.version)})"
    if manifest.catalog != catalog.hash:
        raise ManifestInvalid(f"{name} has catalog {manifest.catalog.hex()}, not {catalog.hash.hex()}")
    if len(manifest.digests) != 8 * len(catalog.tensors):
        raise ManifestInvalid(
            f"{name} has {len(manifest.digests) // 8} digests, its catalog {len(catalog.tensors)} tensors"
        )
    if root_digest(catalog, manifest.digest_array.astype(np.uint64)) != manifest.root:
        raise ManifestInvalid(f"{name} has a root digest that does not follow from its tensors' digests")
    sections = sorted((s for c in manifest.chunks for s in c.sections), key=lambda s: (s.tensor, s.start))
    if sections and sections[-1].tensor >= len(catalog.tensors):
        raise ManifestInvalid(f"{name} has a section of tensor {sections[-1].tensor}, the catalog has fewer")
    problems = _problems(sections, catalog)
    if manifest.kind == "anchor":
        problems += _untiled(sections, catalog)
    if problems:
        raise ManifestInvalid(f"{name} does not fit its catalog: " + "; ".join(problems[:20]))


def section_problem(section: SectionRef, spec: TensorSpec) -> str | None:
    """Why `section` cannot be a part of the tensor `spec`, or None."""
    if section.stop > spec.numel:
        return f"{spec.name!r} has {spec.numel} elements, a section goes to {section.stop}"
    if not section.whole and not spec.sparse:
        return f"{spec.name!r} is {spec.dtype}, which is only sent whole"
    return None


def _problems(sections: list[SectionRef], catalog: Catalog) -> list[str]:
    out = []
    for i, section in enumerate(sections):
        spec = catalog.tensors[section.tensor]
        problem = section_problem(section, spec)
        if problem:
            out.append(problem)
        if i and sections[i - 1].tensor == section.tensor and sections[i - 1].stop > section.start:
            out.append(f"{spec.name!r} has two sections over element {section.start}")
    return out


def _untiled(sections: list[SectionRef], catalog: Catalog) -> list[str]:
    """Tensors that disjoint `sections` do not cover whole."""
    covered = [0] * len(catalog.tensors)
    for section in sections:
        if section.whole:
            covered[section.tensor] += section.stop - section.start
    return [
        f"{spec.name!r} has {spec.numel} elements, the anchor holds {n}"
        for spec, n in zip(catalog.tensors, covered, strict=True)
        if n != spec.numel
    ]
