"""Gather and scatter against plain numpy, for every dtype and memory layout."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkstore import digest as numpy_digest
from chunkstore.dtypes import WIDTH, bits_dtype
from chunkstore.torch_dtypes import TORCH_DTYPES
from manifest.merge import Update
from subscriber import torch_bits
from tests.subscriber.parts import live_bits

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t().contiguous().t(),
    "sliced": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    "permuted": lambda t: t.reshape(4, 5, 6).permute(2, 0, 1).contiguous().permute(1, 2, 0).reshape(20, 6),
}


def tensor_of(dtype: str, layout: str, rng: np.random.Generator) -> torch.Tensor:
    """20 × 6 random bit patterns, NaNs and all."""
    kind = bits_dtype(dtype)
    bits = rng.integers(0, 2 if dtype == "BOOL" else 1 << 8 * kind.itemsize, (20, 6), kind)
    tensor = torch.from_numpy(bits.view(f"i{kind.itemsize}")).clone().view(TORCH_DTYPES[dtype])
    out = LAYOUTS[layout](tensor)
    assert np.array_equal(live_bits(out), bits)
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", WIDTH)
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_scatter_then_gather(dtype: str, layout: str, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    tensor = tensor_of(dtype, layout, rng)
    before = live_bits(tensor).ravel().copy()
    start = data.draw(st.integers(0, 119))
    stop = data.draw(st.integers(start + 1, 120))
    offsets = None
    if data.draw(st.booleans()):
        chosen = data.draw(st.sets(st.integers(0, stop - start - 1), min_size=1))
        offsets = np.array(sorted(chosen), np.uint32)
    where = np.arange(start, stop) if offsets is None else start + offsets.astype(np.int64)
    values = rng.integers(0, 2 if dtype == "BOOL" else 1 << 8 * WIDTH[dtype], len(where), bits_dtype(dtype))
    update = Update(0, start, stop, offsets, values)
    address = tensor.data_ptr()

    assert np.array_equal(torch_bits.gather(tensor, update), before[where])
    torch_bits.scatter(tensor, update)

    expected = before.copy()
    expected[where] = values
    assert np.array_equal(live_bits(tensor).ravel(), expected)
    assert np.array_equal(torch_bits.gather(tensor, update), values)
    assert tensor.data_ptr() == address
    assert torch_bits.digest("name", tensor) == numpy_digest.digest("name", expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("whole", [True, False])
def test_tensors_of_several_parts(layout: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not contiguous is read and written part by part, and digested window by window."""
    monkeypatch.setattr(torch_bits, "WINDOW", 50)
    monkeypatch.setattr(torch_bits, "_STRIDED_PART", 7)
    rng = np.random.default_rng(1)
    tensor = tensor_of("BF16", layout, rng)
    bits = live_bits(tensor).ravel().copy()
    offsets = None if whole else np.arange(0, 90, 3, dtype=np.uint32)
    where = np.arange(20, 110) if offsets is None else 20 + offsets
    update = Update(0, 20, 110, offsets, rng.integers(0, 1 << 16, len(where), np.uint16))
    assert np.array_equal(torch_bits.gather(tensor, update), bits[where])
    torch_bits.scatter(tensor, update)
    bits[where] = update.values
    assert np.array_equal(live_bits(tensor).ravel(), bits)
    assert torch_bits.digest("name", tensor) == numpy_digest.digest("name", bits)


@pytest.mark.parametrize("shape", [(), (0, 8), (1,)])
def test_no_dimensions_and_no_elements(shape: tuple[int, ...]) -> None:
    tensor = torch.full(shape, 1.5, dtype=torch.bfloat16)
    assert torch_bits.digest("name", tensor) == numpy_digest.digest("name", live_bits(tensor))
    if tensor.numel():
        torch_bits.scatter(tensor, Update(0, 0, 1, None, np.array([0x8000], np.uint16)))
        assert live_bits(tensor).ravel().tolist() == [0x8000]


def test_parameters_that_require_grad_are_written_in_place() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    with torch.inference_mode():
        torch_bits.scatter(
            parameter, Update(0, 0, 4, np.array([1], np.uint32), np.array([0x3F80], np.uint16))
        )
    assert parameter.tolist() == [0, 1, 0, 0]
    assert parameter.requires_grad
