"""The checkpoint that version 0 may refer to: compared with what refers to it, each anew."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from manifest.catalog import Catalog
from manifest.checkpoint import Checkpoint
from manifest.errors import BaseMissing
from manifest.schema import Manifest
from publisher.takeover import reference_version
from subscriber.base import Base


def test_what_was_proved_for_one_stream_is_not_for_another(tmp_path: Path) -> None:
    """A prefix may be deleted and used again, by a run that started from another checkpoint of the same shapes."""
    save_file({"a": torch.arange(8).bfloat16()}, tmp_path / "model.safetensors")
    held = Checkpoint.open(tmp_path)
    catalog = Catalog.of(list(held.tensors.values()))

    def reference(stream: bytes, digest: int) -> Manifest:
        return reference_version(stream, catalog, [digest], b"publisher-number")

    base, digest = Base(tmp_path), held.digest("a")
    first = reference(b"s" * 16, digest)
    assert base.proved(first, catalog) is base.proved(first, catalog)
    with pytest.raises(BaseMissing, match="a has other values"):
        base.proved(reference(b"t" * 16, digest ^ 1), catalog)
    assert base.proved(reference(b"u" * 16, digest), catalog).digest("a") == digest
