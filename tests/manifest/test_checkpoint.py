"""Checkpoints on disk: what stands in the files, and whether it is what version 0 refers to."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from chunkstore.digest import digest
from manifest import checkpoint
from manifest.catalog import TensorSpec
from manifest.checkpoint import Checkpoint
from manifest.errors import BaseMissing


@pytest.fixture
def folder(tmp_path: Path) -> Checkpoint:
    """A bf16 matrix and an fp32 vector, in two files."""
    torch.manual_seed(0)
    save_file({"a": torch.randn(5, 7).bfloat16()}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.randn(9)}, tmp_path / "model-2.safetensors")
    return Checkpoint.open(tmp_path)


def test_the_digest_of_a_tensor_of_several_windows(
    folder: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "WINDOW", 8)
    for name in ("a", "b"):
        bits = folder.bits(name)
        assert folder.digest(name) == digest(name, bits)
        starts = [start for start, _ in folder.windows(name)]
        assert starts == list(range(0, len(bits), 8))
        np.testing.assert_array_equal(np.concatenate([part for _, part in folder.windows(name)]), bits)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"name": "c"}, "c is not in it"),
        ({"shape": (7, 5)}, r"a is BF16 \(5, 7\), not BF16 \(7, 5\)"),
        ({"dtype": "F16"}, r"a is BF16 \(5, 7\), not F16"),
        ({}, "a has other values"),
    ],
)
def test_another_checkpoint_is_refused_by_name(
    folder: Checkpoint, changes: dict[str, object], problem: str
) -> None:
    specs, digests = list(folder.tensors.values()), [folder.digest(name) for name in folder.tensors]
    folder.require(specs, digests)
    wanted: TensorSpec = replace(specs[0], **changes)  # type: ignore[arg-type]
    other = digests[0] if changes else digests[0] ^ 1
    with pytest.raises(BaseMissing, match=problem):
        folder.require([wanted, specs[1]], [other, digests[1]])


def test_a_name_in_two_files_is_refused(folder: Checkpoint) -> None:
    save_file({"a": torch.zeros(1)}, folder.directory / "model-3.safetensors")
    with pytest.raises(BaseMissing, match="'a' stands in both"):
        Checkpoint.open(folder.directory)
