"""Fetch one chunk and check everything its manifest says about it before anyone decodes it."""

import blake3

from chunkstore.codec import ChunkReader, SectionInfo
from chunkstore.errors import CorruptObject, LimitExceeded
from chunkstore.store import Buffer, Store
from manifest.catalog import Catalog
from manifest.layout import section_problem
from manifest.schema import ChunkRef
from manifest.sections import SectionRef


def fetch_chunk(store: Store, ref: ChunkRef, catalog: Catalog) -> ChunkReader:
    """The chunk `ref` names: its length, blake3 and section list are as promised and fit `catalog`.

    Holds one chunk in memory. Raises CorruptObject naming the key, ObjectMissing, FormatUnsupported,
    LimitExceeded, or the store's error.
    """
    name = f"{store.url}/{ref.key}"
    try:
        data = store.get(ref.key, limit=ref.nbytes)
    except LimitExceeded as error:
        raise _corrupt(name, f"is larger than the {ref.nbytes} bytes its manifest promises") from error
    return open_chunk(data, ref, catalog, name)


def open_chunk(data: Buffer, ref: ChunkRef, catalog: Catalog, name: str) -> ChunkReader:
    """The chunk whose bytes are `data`, checked as `fetch_chunk` does. `name`: for errors, where they come from."""
    if len(data) != ref.nbytes:
        raise _corrupt(name, f"has {len(data)} bytes, its manifest promises {ref.nbytes}")
    if blake3.blake3(data).digest() != ref.hash:
        raise _corrupt(name, "does not have the hash its manifest promises")
    reader = ChunkReader(data, name=name)
    if len(reader.sections) != len(ref.sections):
        raise _corrupt(name, f"has {len(reader.sections)} sections, its manifest names {len(ref.sections)}")
    for number, (info, section) in enumerate(zip(reader.sections, ref.sections, strict=True)):
        problem = _mismatch(info, section, catalog)
        if problem:
            raise _corrupt(name, f"and its manifest disagree on section {number}: {problem}")
    return reader


def _mismatch(info: SectionInfo, section: SectionRef, catalog: Catalog) -> str | None:
    promised = (section.tensor, section.start, section.stop, section.changed, section.whole)
    stored = (info.tensor, info.start, info.stop, info.count, info.whole)
    if stored != promised:
        return f"tensor, start, stop, elements, whole are {stored}, promised {promised}"
    if section.tensor >= len(catalog.tensors):
        return f"the catalog has no tensor {section.tensor}"
    spec = catalog.tensors[section.tensor]
    if info.dtype != spec.dtype:
        return f"{spec.name!r} is {spec.dtype}, stored as {info.dtype}"
    return section_problem(section, spec)


def _corrupt(name: str, problem: str) -> CorruptObject:
    return CorruptObject(
        f"{name} {problem}", hint="the object was damaged; plan again from an anchor without it"
    )
