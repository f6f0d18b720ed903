"""The digest against its definition, in numpy and in torch."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkstore import digest as dn
from chunkstore import digest_torch as dt
from chunkstore.digest import Coefficients

M = (1 << 64) - 1
WIDTHS = st.sampled_from([1, 2, 4, 8])
STARTS = st.one_of(st.integers(0, 10_000), st.sampled_from([4095, 4096, 8192, 1 << 22, (1 << 40) - 7]))


def splitmix(seed: int, k: int) -> int:
    z = (seed + (k + 1) * 0x9E3779B97F4A7C15) & M
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & M
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & M
    return z ^ z >> 31


def oracle(name: str, elements: dict[int, int], width: int) -> int:
    """The definition, one lane at a time."""
    seed_a, seed_c = (xxhash.xxh3_64_intdigest(d + name.encode()) for d in (b"A", b"C"))
    per = max(1, width // 2)
    total = 0
    for index, value in elements.items():
        for j in range(per):
            k = index * per + j
            a, c = splitmix(seed_a, k >> 12) | 1, splitmix(seed_c, k & 4095) | 1
            total += a * c * (value >> 16 * j & 0xFFFF)
    return total & M


def random_bits(seed: int, n: int, width: int) -> npt.NDArray[Any]:
    raw = np.random.default_rng(seed).integers(0, 256, n * width, dtype=np.uint8)
    return raw.view(f"<u{width}")


def tensor(bits: npt.NDArray[Any]) -> torch.Tensor:
    """The same bits as a signed torch tensor: trainers and engines hold no unsigned ones."""
    return torch.from_numpy(bits.view(f"<i{bits.itemsize}").copy())


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 1 << 30),
    WIDTHS,
    st.integers(0, 700),
    STARTS,
    st.sampled_from(["w", "model.embed.weight", "é"]),
)
def test_matches_the_definition(seed: int, width: int, n: int, start: int, name: str) -> None:
    bits = random_bits(seed, n, width)
    expected = oracle(name, {start + i: int(v) for i, v in enumerate(bits)}, width)
    assert dn.digest(name, bits, start) == expected
    assert dt.digest(name, tensor(bits), start) == expected


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1 << 30), WIDTHS, st.integers(0, 500), st.sampled_from([600, 1 << 23, 1 << 39]))
def test_scattered_matches_the_definition(seed: int, width: int, n: int, numel: int) -> None:
    rng = np.random.default_rng(seed)
    indices = np.unique(rng.integers(0, numel, n))
    bits = random_bits(seed, len(indices), width)
    expected = oracle("w", dict(zip(indices.tolist(), bits.tolist(), strict=True)), width)
    assert dn.digest_at("w", indices, bits) == expected
    assert dt.digest_at("w", torch.from_numpy(indices), tensor(bits)) == expected


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1 << 30), WIDTHS, st.integers(0, 1_500_000), st.floats(0, 1), STARTS)
def test_is_additive_over_splits(seed: int, width: int, n: int, where: float, start: int) -> None:
    bits, cut = random_bits(seed, n // width, width), int(where * (n // width))
    parts = dn.digest("w", bits[:cut], start) + dn.digest("w", bits[cut:], start + cut)
    assert dn.digest("w", bits, start) == parts & M == dt.digest("w", tensor(bits), start)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1 << 30), WIDTHS, st.integers(1, 300_000))
def test_is_incremental(seed: int, width: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    old = random_bits(seed, n, width)
    at = np.unique(rng.integers(0, n, 100_000)).astype(np.int64)
    new = old.copy()
    new[at] = random_bits(seed + 1, len(at), width)
    change = dn.digest_at("w", at, new[at]) - dn.digest_at("w", at, old[at])
    assert dn.digest("w", new) == (dn.digest("w", old) + change) & M
    where = torch.from_numpy(at)
    change = dt.digest_at("w", where, tensor(new[at])) - dt.digest_at("w", where, tensor(old[at]))
    assert dt.digest("w", tensor(new)) == (dt.digest("w", tensor(old)) + change) & M


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 1 << 30),
    WIDTHS,
    st.integers(0, 200_000),
    STARTS,
    st.sampled_from([16384, 4096, 1000, 70_000]),
)
def test_block_digests(seed: int, width: int, n: int, start: int, block: int) -> None:
    bits = random_bits(seed, n, width)
    got = dt.block_digests(Coefficients.of("w"), tensor(bits), start, block)
    expected = [dn.digest("w", bits[i : i + block], start + i) for i in range(0, n, block)]
    assert got.dtype == torch.int64
    assert [x & M for x in got.tolist()] == expected


def test_a_square_matrix_and_its_transpose_differ() -> None:
    """One shared coefficient stream would make these collide at rows of exactly 4096 lanes."""
    square = random_bits(3, 1 << 24, 2).reshape(4096, 4096)
    there, back = dn.digest("w", square), dn.digest("w", square.T)
    assert there != back
    assert dt.digest("w", tensor(square)) == there
    assert dt.digest("w", tensor(square).T) == back


@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.int8, 1), (torch.bfloat16, 2), (torch.int32, 4), (torch.float64, 8)]
)
def test_bits_are_unsigned(dtype: torch.dtype, width: int) -> None:
    """A pattern with its top bit set must not be sign-extended: 0x8000 is 32768, in each lane."""
    bits = np.full(5000, 1 << (8 * width - 1), dtype=f"<u{width}")
    expected = oracle("w", dict.fromkeys(range(5000), 1 << (8 * width - 1)), width)
    assert dn.digest("w", bits) == expected
    assert dt.digest("w", tensor(bits).view(dtype)) == expected
    assert dt.digest_at("w", torch.arange(5000), tensor(bits).view(dtype)) == expected


def test_names_positions_and_zero() -> None:
    bits = np.arange(100, dtype=np.uint16)
    assert dn.digest("a", bits) != dn.digest("b", bits)
    assert dn.digest("a", bits) != dn.digest("a", bits, 1)
    assert dn.digest("a", bits[:0]) == dt.digest("a", tensor(bits[:0])) == 0
    assert dt.digest("a", torch.arange(200, dtype=torch.int16)[::2]) == dn.digest("a", bits * 2)
    assert dt.digest("a", torch.tensor([7]).expand(5)) == dn.digest("a", np.full(5, 7, np.uint64))
    assert dt.digest("a", torch.tensor(True)) == oracle("a", {0: 1}, 1)
    assert dt.block_digests(Coefficients.of("a"), torch.empty(0, dtype=torch.bfloat16)).tolist() == []


def test_a_thread_may_begin_in_inference_mode() -> None:
    bits = torch.arange(5000, dtype=torch.int16)

    def twice() -> list[int]:
        with torch.inference_mode():
            first = dt.digest("a", bits)
        return [first, dt.digest("a", bits)]

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(twice).result() == [dt.digest("a", bits)] * 2


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="3 indices but 2 elements"):
        dn.digest_at("a", np.arange(3), np.zeros(2, np.uint16))
    with pytest.raises(ValueError, match="3 indices but 2 elements"):
        dt.digest_at("a", torch.arange(3), torch.zeros(2))
