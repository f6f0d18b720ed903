"""Restoring and exporting: any version comes back to the bit, and a checkpoint appears whole or not at all."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from chunkstore.codec import WINDOW
from chunkstore.errors import CorruptObject, ObjectMissing
from chunkstore.memory import MemoryStore
from manifest import export
from manifest.errors import ChainError, LocalDiskError
from manifest.export import export_checkpoint
from manifest.image import Image
from manifest.keys import chunk_prefix, manifest_key
from manifest.log import VersionLog
from manifest.rebuild import rebuild
from manifest.restore import restore
from manifest.schema import Manifest
from tests.support.streams import StreamBuilder, Tensor, Weights, random_weights

SHAPES = {
    "embed": (6, 5),
    "scalar": (),
    "none": (0, 4),
    "router": (3, 2),
    "mask": (9,),
    "steps": (2,),
    "half": (4,),
}
DTYPES = {"router": "F32", "mask": "BOOL", "steps": "I64", "half": "F16"}


def build(per_chunk: int = 2) -> StreamBuilder:
    stream = StreamBuilder(
        MemoryStore("s"), random_weights(SHAPES, DTYPES), {"head": "embed"}, per_chunk=per_chunk
    )
    stream.train(0.3, steps=3)
    stream.takeover(b"another-publish!")
    stream.train(0.05)
    stream.anchor(random_weights(SHAPES, DTYPES, seed=7))
    stream.train(0.9)
    stream.alternate(3)
    return stream


def restored(stream: StreamBuilder, version: int, scratch: Path) -> dict[str, Tensor]:
    flat = {name: np.zeros(0, t.bits.dtype) for name, t in stream.weights[version].items()}
    for spec, tensor, start, bits in restore(stream.store, stream.log, version, scratch):
        assert stream.catalog.tensors[tensor] == spec
        assert start == len(flat[spec.name])
        flat[spec.name] = np.concatenate([flat[spec.name], bits])
    return {s.name: Tensor(s.dtype, flat[s.name].reshape(s.shape)) for s in stream.catalog.tensors}


def assert_same(a: Weights, b: Weights) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        np.testing.assert_array_equal(a[name].bits, b[name].bits, strict=True)


def test_every_version_is_rebuilt_to_the_bit(tmp_path: Path) -> None:
    """FIELD_REPORTS: trl#5932. An anchor alone, or with its deltas, rebuilds every tensor of the catalog."""
    stream = build()
    for version, weights in enumerate(stream.weights):
        assert_same(restored(stream, version, tmp_path), weights)
    assert list(tmp_path.iterdir()) == []


def test_an_anchor_needs_nothing_before_it(tmp_path: Path) -> None:
    stream = build()
    for manifest in stream.manifests[:6]:
        stream.store.delete(manifest_key(manifest.version))
        for chunk in manifest.chunks:
            stream.store.delete(chunk.key)
    assert_same(restored(stream, 7, tmp_path), stream.weights[7])
    with pytest.raises(ObjectMissing, match=manifest_key(5)):
        restored(stream, 5, tmp_path)


def test_a_tensor_of_several_windows(tmp_path: Path) -> None:
    numel = 2 * WINDOW + 12345
    stream = StreamBuilder(MemoryStore(), random_weights({"big": (numel,), "small": (3,)}))
    stream.train(0.001)
    starts = [
        (spec.name, start, len(b)) for spec, _, start, b in restore(stream.store, stream.log, 1, tmp_path)
    ]
    assert starts == [
        ("big", 0, WINDOW),
        ("big", WINDOW, WINDOW),
        ("big", 2 * WINDOW, 12345),
        ("small", 0, 3),
    ]
    assert_same(restored(stream, 1, tmp_path), stream.weights[1])


def test_a_lost_chunk_is_named_and_nothing_is_yielded(tmp_path: Path) -> None:
    """FIELD_REPORTS: modelexpress#703. The missing object in the middle of the chain is named."""
    stream = build()
    lost = stream.manifests[1].chunks[0].key
    stream.store.delete(lost)
    with pytest.raises(ObjectMissing, match=lost):
        next(restore(stream.store, stream.log, 2, tmp_path))
    assert_same(restored(stream, 3, tmp_path), stream.weights[3])  # through its alternate


def test_wrong_digests_are_caught(tmp_path: Path) -> None:
    """A version that is well-formed but whose chunks do not add up to its digests: the tensors are named."""
    stream = StreamBuilder(MemoryStore(), random_weights(SHAPES, DTYPES))
    honest = stream.make(random_weights(SHAPES, DTYPES, seed=1), 0)
    lying = honest.model_dump() | {"digests": stream.manifests[0].digests, "root": stream.manifests[0].root}
    stream.commit(type(honest)(**lying), stream.weights[0])
    with pytest.raises(
        CorruptObject,
        match=rf"the delta of version 1 \({chunk_prefix(1, honest.attempt)}\): .* 6 tensors: embed, half",
    ):
        next(restore(stream.store, stream.log, 1, tmp_path))
    with pytest.raises(CorruptObject):
        export_checkpoint(stream.store, 1, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def read_safetensors(directory: Path) -> dict[str, tuple[list[int], bytes]]:
    """Name → shape and raw bytes, through the safetensors library."""
    out = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118  not a dict
                tensor = file.get_tensor(name)
                out[name] = (
                    list(tensor.shape),
                    tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
                )
    return out


@pytest.mark.parametrize("shard_bytes", [5 * 10**9, 60, 1])
def test_an_exported_checkpoint_holds_every_tensor(tmp_path: Path, shard_bytes: int) -> None:
    stream = build()
    exported = export_checkpoint(stream.store, 5, tmp_path / "new" / "out", max_shard_bytes=shard_bytes)
    assert exported.root == stream.manifests[5].root
    assert exported.directory == tmp_path / "new" / "out"
    assert sorted(path.name for path in exported.directory.iterdir()) == list(exported.files)
    expected = {n: (list(t.bits.shape), t.bits.tobytes()) for n, t in stream.weights[5].items()}
    assert read_safetensors(exported.directory) == expected
    assert exported.nbytes == sum(len(data) for _, data in expected.values())
    if shard_bytes > 1000:
        assert exported.files == ("model.safetensors",)
        return
    index = json.loads((exported.directory / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": exported.nbytes}
    assert index["weight_map"].keys() == expected.keys()
    for name, file in index["weight_map"].items():
        with safe_open(exported.directory / file, "pt") as shard:
            assert name in shard.keys()  # noqa: SIM118


def test_configuration_files_come_along(tmp_path: Path) -> None:
    stream = build()
    config = tmp_path / "config"
    config.mkdir()
    for name in (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "merges.txt",
        "model.safetensors",
        "notes.md",
    ):
        (config / name).write_text(name)
    out = tmp_path / "out"
    out.mkdir()
    exported = export_checkpoint(stream.store, 0, out, config)
    assert exported.files == (
        "config.json", "merges.txt", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    )  # fmt: skip
    assert (out / "tokenizer.json").read_text() == "tokenizer.json"
    shutil.rmtree(out)
    (config / "config.json").unlink()
    with pytest.raises(LocalDiskError, match=r"config\.json"):
        export_checkpoint(stream.store, 0, out, config)
    assert [path.name for path in tmp_path.iterdir()] == ["config"]


def test_a_directory_in_use_is_refused_and_left_alone(tmp_path: Path) -> None:
    stream = build()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    with pytest.raises(LocalDiskError, match="not an empty directory"):
        export_checkpoint(stream.store, 0, tmp_path / "out")
    with pytest.raises(LocalDiskError, match="not an empty directory"):
        export_checkpoint(stream.store, 0, tmp_path / "out" / "mine")
    with pytest.raises(LocalDiskError, match="cannot write"):
        export_checkpoint(stream.store, 0, tmp_path / "out" / "mine" / "below")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_what_the_files_hold_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests that were kept up to date while it was written say nothing of what lies in the files."""
    stream, real = build(), rebuild

    def damaged(log: VersionLog, version: int, image: Image, **kwargs: Any) -> Manifest:
        manifest = real(log, version, image, **kwargs)
        image.arrays[0][-1] ^= 1
        return manifest

    monkeypatch.setattr(export, "rebuild", damaged)
    with pytest.raises(CorruptObject, match="1 tensor: embed"):
        export_checkpoint(stream.store, 5, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_tensors_of_several_windows_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "WINDOW", 7)
    export_checkpoint(build().store, 5, tmp_path / "out")


def test_every_file_is_flushed_before_the_checkpoint_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[tuple[str, bool]] = []
    real = os.fsync

    def fsync(file: int) -> None:
        flushed.append((Path(os.readlink(f"/proc/self/fd/{file}")).name, (tmp_path / "out").exists()))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    exported = export_checkpoint(build().store, 5, tmp_path / "out", max_shard_bytes=60)
    assert len(exported.files) > 2
    before = {name for name, there in flushed if not there}
    assert before == {*exported.files, ".deltasync-export-out"}
    assert flushed[-1] == (tmp_path.name, True)


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    stream = build()
    stream.store.delete(stream.manifests[7].chunks[-1].key)
    with pytest.raises(ObjectMissing):
        export_checkpoint(stream.store, 7, tmp_path / "out")
    with pytest.raises(ObjectMissing, match="version 99"):
        export_checkpoint(stream.store, 99, tmp_path / "out")
    stream.store.delete(manifest_key(6))
    with pytest.raises(ChainError, match=manifest_key(6)):
        export_checkpoint(stream.store, 7, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
