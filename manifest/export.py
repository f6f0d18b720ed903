"""Write one version as a Hugging Face safetensors checkpoint."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from chunkstore.codec import WINDOW
from chunkstore.crashpoints import crash_point
from chunkstore.digest import digest
from chunkstore.dtypes import Bits
from chunkstore.store import Store
from manifest.catalog import Catalog, TensorSpec
from manifest.errors import LocalDiskError
from manifest.image import Image, map_file
from manifest.keys import manifest_key
from manifest.log import VersionLog, open_stream, read_catalog
from manifest.rebuild import rebuild
from manifest.signing import Trust

MAX_SHARD_BYTES: Final = 5 * 10**9
_ADAPTER: Final = ("adapter_model.safetensors", "adapter_config.json")
_COPIED: Final = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*processor_config.json",
)

if TYPE_CHECKING:  # it needs torch
    from manifest.checkpoint import Checkpoint
_HEADER_LIMIT: Final = 100_000_000  # the safetensors format's own


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: the version, its root digest, the files in `directory`, and the tensors' size in bytes."""

    version: int
    root: bytes
    directory: Path
    files: tuple[str, ...]
    nbytes: int


def export_checkpoint(
    store: Store,
    version: int,
    directory: Path,
    config_dir: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    trust: Trust | None = None,
    base: "Checkpoint | None" = None,
) -> Exported:
    """Write `version` into `directory`, which must not exist or be empty: all of it once it is verified, or nothing.

    One `model.safetensors`, or shards of up to `max_shard_bytes` bytes (a larger tensor has its own) and their index;
    of a PEFT adapter one `adapter_model.safetensors`, whatever its size.
    `base`: the checkpoint that version 0 may refer to.
    Aliases are not written: they are the same weights. Configuration, generation and tokenizer files of `config_dir`
    are copied. The tensors are built in the files themselves, so memory stays at one chunk and one window; every
    tensor is read back and its digest checked before the directory is put in place. `trust`: what every manifest
    must satisfy.

    Raises LocalDiskError if the directory cannot be written, else as `restore`.
    """
    log = VersionLog(store, open_stream(store, trust), trust=trust)
    catalog = read_catalog(store, log.read_required(version).catalog)
    with _new_directory(directory) as temporary:
        shards = _shards(catalog, max_shard_bytes)
        image = Image(catalog, _create_shards(temporary, catalog, shards))
        manifest = rebuild(log, version, image, base=base)
        name = f"{store.url}/{manifest_key(version)}"
        image.digests = [_digest(spec.name, a) for spec, a in zip(catalog.tensors, image.arrays, strict=True)]
        image.check(manifest, name)
        if len(shards) > 1:
            _write_index(temporary, catalog, shards)
        if config_dir is not None:
            _copy_configuration(config_dir, temporary, _ADAPTER[1] if catalog.adapter else "config.json")
        files = tuple(sorted(path.name for path in temporary.iterdir()))
        for name in files:
            _sync(temporary / name)
    return Exported(version, manifest.root, directory, files, catalog.nbytes)


@contextmanager
def _new_directory(directory: Path) -> Iterator[Path]:
    """A temporary directory that becomes `directory` if the body succeeds, and is removed if not.

    It lies beside one that does not exist yet, and inside one that does: that may be a mount, or somebody's working
    directory, so it is kept and its files are moved up. Raises LocalDiskError, also if the body raises OSError.
    """
    try:
        exists = directory.exists()
        home = directory if exists else directory.parent
        temporary = home / f".deltasync-export-{directory.name}"
        if exists and (not directory.is_dir() or any(path != temporary for path in directory.iterdir())):
            raise LocalDiskError(
                f"{directory} is not an empty directory",
                hint="an export into it was interrupted: empty it"
                if temporary.exists()
                else "name one that does not exist yet, or is empty",
            )
        home.mkdir(parents=True, exist_ok=True)
        with _alone_in(temporary):
            yield temporary
            crash_point("export.before_rename")
            if exists:
                for path in sorted(temporary.iterdir()):
                    path.rename(directory / path.name)
                    crash_point("export.mid_move")
            else:
                temporary.chmod(0o755)
                _sync(temporary)
                temporary.rename(directory)
            crash_point("export.after_rename")
            _sync(home)
    except OSError as error:
        raise LocalDiskError(
            f"cannot write the checkpoint to {directory}: {error}",
            hint="check its permissions and free space",
        ) from error


@contextmanager
def _alone_in(temporary: Path) -> Iterator[None]:
    """Make the directory, or take over that of an export that was killed; empty at first, and gone afterwards.

    Raises LocalDiskError if a running one has it.
    """
    while True:
        temporary.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):  # whoever had it has just ended
            lock = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(lock), os.stat(temporary)):
                    break
            except BlockingIOError as error:
                os.close(lock)
                raise LocalDiskError(
                    f"another export is writing {temporary}", hint="wait for it, or name another directory"
                ) from error
            os.close(lock)
    try:
        for path in temporary.iterdir():
            path.unlink()
        yield
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(lock)


def _shards(catalog: Catalog, limit: int) -> dict[str, list[TensorSpec]]:
    """File name → its tensors in file order: filled in catalog order, within a file the widest first, for alignment."""
    groups: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in catalog.tensors:
        if groups[-1] and filled + spec.nbytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += spec.nbytes
    names = ["model.safetensors"]
    if catalog.adapter:
        names, groups = [_ADAPTER[0]], [list(catalog.tensors)]
    elif len(groups) > 1:
        names = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    return {n: sorted(group, key=lambda spec: -spec.width) for n, group in zip(names, groups, strict=True)}


def _create_shards(directory: Path, catalog: Catalog, shards: dict[str, list[TensorSpec]]) -> list[Bits]:
    arrays: dict[str, Bits] = {}
    for name, specs in shards.items():
        with (directory / name).open("x+b") as file:
            mapped = map_file(file, _header(specs), specs)
        arrays |= {spec.name: array for spec, array in zip(specs, mapped, strict=True)}
    return [arrays[spec.name] for spec in catalog.tensors]


def _header(specs: Sequence[TensorSpec]) -> bytes:
    """The head of a safetensors file: 8 bytes little-endian length, then JSON padded with spaces to a multiple of 8."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for spec in specs:
        entries[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.nbytes],
        }
        at += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _HEADER_LIMIT:
        raise LocalDiskError(
            f"the header of one file would have {len(text)} bytes, safetensors allows {_HEADER_LIMIT}",
            hint="choose smaller shards",
        )
    return len(text).to_bytes(8, "little") + text


def _write_index(directory: Path, catalog: Catalog, shards: dict[str, list[TensorSpec]]) -> None:
    index = {
        "metadata": {"total_size": catalog.nbytes},
        "weight_map": {spec.name: name for name, specs in shards.items() for spec in specs},
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _copy_configuration(source: Path, target: Path, required: str) -> None:
    if not (source / required).is_file():
        raise LocalDiskError(
            f"{source} has no {required}", hint="name the directory of the model's configuration"
        )
    for pattern in (required, *_COPIED):
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, target / path.name)


def _digest(name: str, array: Bits) -> int:
    pieces = range(0, array.size, WINDOW)
    return sum(digest(name, np.asarray(array[i : i + WINDOW]), i) for i in pieces) % (1 << 64)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
