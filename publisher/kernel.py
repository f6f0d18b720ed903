"""The compiled passes over CPU state: the inversion of fp32 state for bf16 on the wire, which reads θ, m and v once,
and the comparison of 16-bit parameters with their masters.

The inversion computes what `publisher.find.find_reference`, its oracle, does; they differ only where torch's vectorised
sqrt is not correctly rounded, far inside the guard. Per row of 4096 elements a wide fp32 pass digests the new bits and
finds candidates with a bound that is never below R; only those, about one in a hundred, are looked at again in fp64.
Releases the GIL, so that pieces run on threads.
"""

from collections.abc import Callable
from typing import Any, Final

import numba
import numpy as np

_ROW: Final = 4096
_BLOCK: Final = 4 * _ROW
_U16, _U32, _U64, _F32, _F64 = np.uint16, np.uint32, np.uint64, np.float32, np.float64
_EXPONENT: Final = _U32(0x7F800000)
_ROUNDING: Final = 2.0**-21  # inversion.ROUNDING, restated: the compiler's cache looks at this file alone


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile, and cache the machine code on disk where there is a place that can be written."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # no such place: compile once per process
        return numba.njit(**options)(function)  # type: ignore[no-any-return]


# Numba computes uint32 arithmetic in 64 bits. Every step is cast back, or vectors hold half as many elements.
@_compiled
def _bf16(x):  # type: ignore[no-untyped-def]
    """fp32 bits to bf16 bits, to nearest, ties to even; wrong for NaN, which callers exclude."""
    odd = _U32(_U32(x >> _U32(16)) & _U32(1))
    return _U32(_U32(_U32(x + _U32(0x7FFF)) + odd) >> _U32(16))


@_compiled
def _bits(x):  # type: ignore[no-untyped-def]
    return _F32(x).view(_U32)


@_compiled
def _ulp32(bits):  # type: ignore[no-untyped-def]
    exponent = max(_U32(bits & _EXPONENT), _U32(1 << 23))
    return _F64(_U32(exponent).view(_F32)) * 2.0**-23


@_compiled
def _digest_row(theta, c):  # type: ignore[no-untyped-def]
    """Σ C·bits of one row, and the largest exponent in it: all ones if a value is not finite."""
    total, largest = _U64(0), _U32(0)
    for j in range(theta.size):
        x = _bits(theta[j])
        total += c[j] * _U64(_bf16(x))
        largest = max(largest, _U32(x & _EXPONENT))
    return total, largest


@_compiled
def _digest_rows(theta, c):  # type: ignore[no-untyped-def]
    """The same of the four rows of a block, side by side: memory answers faster when several streams are read."""
    w, x, y, z, largest = _U64(0), _U64(0), _U64(0), _U64(0), _U32(0)
    for j in range(_ROW):
        p, q = _bits(theta[j]), _bits(theta[j + _ROW])
        r, s = _bits(theta[j + 2 * _ROW]), _bits(theta[j + 3 * _ROW])
        w += c[j] * _U64(_bf16(p))
        x += c[j] * _U64(_bf16(q))
        y += c[j] * _U64(_bf16(r))
        z += c[j] * _U64(_bf16(s))
        largest = max(largest, _U32(p & _EXPONENT), _U32(q & _EXPONENT))
        largest = max(largest, _U32(r & _EXPONENT), _U32(s & _EXPONENT))
    return w, x, y, z, largest


@_compiled
def _digest_block(theta, a, c):  # type: ignore[no-untyped-def]
    """Σ A·C·bits of one block, which may be short, and the largest exponent as before."""
    if theta.size == _BLOCK:
        w, x, y, z, largest = _digest_rows(theta, c)
        return a[0] * w + a[1] * x + a[2] * y + a[3] * z, largest
    digest, largest = _U64(0), _U32(0)
    for start in range(0, theta.size, _ROW):
        total, exponent = _digest_row(theta[start : start + _ROW], c)
        digest += a[start // _ROW] * total
        largest = max(largest, exponent)
    return digest, largest


@_compiled
def weigh(firsts, length, seed, c, weights):  # type: ignore[no-untyped-def]
    """A·C of every element of runs of `length`, which begin at flat indices `firsts`: splitmix64 as in FORMAT.md."""
    k = 0
    for first in firsts:
        row, a = -1, _U64(0)
        for i in range(first, first + length):
            if i >> 12 != row:
                row = i >> 12
                z = seed + (_U64(row) + _U64(1)) * _U64(0x9E3779B97F4A7C15)
                z = (z ^ (z >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
                z = (z ^ (z >> _U64(27))) * _U64(0x94D049BB133111EB)
                a = (z ^ (z >> _U64(31))) | _U64(1)
            weights[k] = a * c[i & 4095]
            k += 1


@_compiled
def weighted_digests(values, weights, digests):  # type: ignore[no-untyped-def]
    """Digest of each block of uint16 bits, given the weight of every element."""
    for block in range(digests.size):
        digest = _U64(0)
        for i in range(block * _BLOCK, min((block + 1) * _BLOCK, values.size)):
            digest += weights[i] * _U64(values[i])
        digests[block] = digest


@_compiled
def _digest_weighted(theta, weights):  # type: ignore[no-untyped-def]
    """As `_digest_block`, given the weight of every element."""
    digest, largest = _U64(0), _U32(0)
    for j in range(theta.size):
        x = _bits(theta[j])
        digest += weights[j] * _U64(_bf16(x))
        largest = max(largest, _U32(x & _EXPONENT))
    return digest, largest


@_compiled
def _candidates(theta, m, v, size, correction, eps, back, flags):  # type: ignore[no-untyped-def]
    """Set flags[j] where the element may have changed, or where a bound is not finite.

    An element has not changed if θ̂ ± R stays between the rounding boundaries of θ_t. In magnitudes, with |θ_t| as `at`:
    neither boundary may be closer than `slack`, which covers 1.5·(ulp + ulp) and this pass's own fp32 rounding; and the
    one that u leads to must be farther, by more than |u| and the rest of R with room to spare (`of_u`). As u is
    step / (√v·scale + eps), a² < ahead²·(v·scale² + eps²) is enough: neither root nor division, and rounding is far
    inside the room. `least`, `tiny` and `most` keep out whatever under- or overflows, v ≥ 0 what has no root.
    """
    scale = _F32(1.0) / correction
    scale2, eps2 = scale * scale, eps * eps
    of_theta = _F32(3.0 * 2.0**-23) * (_F32(1.0) + back) * back
    of_u = (_F32(1.0 + 2.0**-12) + _F32(3.0 * 2.0**-23) * back) * back
    least, tiny, most = _F32(2.0**-60), _F32(2.0**-120), _F32(2.0**126)
    for j in range(theta.size):
        step = size * m[j]
        x = _bits(theta[j])
        magnitude = _U32(x & _U32(0x7FFFFFFF))
        at = _F32(magnitude.view(_F32))
        rounded = _U32(_bf16(magnitude) << _U32(16))
        half = _F32(_U32(rounded & _EXPONENT).view(_F32)) * _F32(2.0**-8)
        below = half * _F32(0.5) if _U32(rounded & _U32(0x7F0000)) == _U32(0) else half  # a power of two
        beyond = at * back - _F32(rounded.view(_F32))
        slack = at * of_theta
        up, down = (half - beyond) - slack, (below + beyond) - slack
        ahead = up if _U32(_U32(x ^ _bits(step)) >> _U32(31)) == _U32(0) else down
        a = step * of_u
        room = ahead * ahead * (v[j] * scale2 + eps2)
        flags[j] = not ((min(up, down) > least) & (a * a + tiny < room) & (room < most) & (v[j] >= _F32(0.0)))
    flags[theta.size :] = 0


@_compiled
def _collect(flags, words, start, chosen, count):  # type: ignore[no-untyped-def]
    """Append start + j of every set flags[j] to `chosen`, without a branch per element; returns the new count."""
    end = _U64(count)
    for word in range(words.size):
        if words[word] != _U64(0):
            for j in range(8 * word, 8 * word + 8):
                chosen[end] = start + j
                end += _U64(flags[j])
    return np.int64(end)


@_compiled
def _exactly(theta, m, v, size, correction, eps, decay, u, old, radius, now, guess, low, high):  # type: ignore[no-untyped-def]
    """Fill the outputs from `u` on, operation by operation as `publisher.inversion.reconstruct` does.

    u, old, radius: fp64; now, guess, low, high: bf16 bits. Returns the largest exponent of a radius, as `_digest_row`
    does. One loop per output: the compiler vectorises no loop that writes many arrays, which might overlap.
    """
    for k in range(theta.size):
        u[k] = _F64((size * m[k]) / (np.sqrt(v[k]) / correction + eps))
    for k in range(theta.size):
        before = (_F64(theta[k]) + u[k]) / decay
        old[k] = 0.0 if abs(before) < abs(u[k]) * _ROUNDING else before
    largest = _U32(0)
    for k in range(theta.size):
        ulps = _ulp32(_bits(theta[k])) + _ulp32(_bits(old[k]))
        radius[k] = (1.5 * ulps + abs(u[k]) * 2.0**-13) / decay
    for k in range(theta.size):
        largest = max(largest, _U32(_bits(radius[k]) & _EXPONENT))
    for k in range(theta.size):
        now[k] = _bf16(_bits(theta[k]))
    for k in range(theta.size):
        guess[k] = _bf16(_bits(old[k]))
    for k in range(theta.size):
        low[k] = _bf16(_bits(old[k] - radius[k]))
    for k in range(theta.size):
        high[k] = _bf16(_bits(old[k] + radius[k]))
    return largest


@_compiled
def scan(  # type: ignore[no-untyped-def]
    theta, m, v, kept, skip, a, c, weights, size, correction, eps, decay, digests, missing, local, bits
):
    """Invert a run of whole blocks of one parameter; the last one may be short. Returns the number found, or −1.

    theta, m, v: fp32, flat. kept, skip: uint64 and bool per block; blocks to skip are digested only. a, c: the
    coefficients of the run's rows and of a row. weights: uint64, of every element, in place of a and c unless empty.
    size, correction, eps: fp32; decay: fp64 (`_update`, `Hyper.decay`).

    Fills, per block, `digests` of the new bits and `missing`, kept minus the reconstruction's digest (0 where skipped);
    and, per element whose bounds do not both equal its new bits, `local` offset and `bits` [4, …]: new, guess, low,
    high. −1: a value is not finite somewhere; nothing but the caller's time is lost.
    """
    flags, chosen = np.empty(_ROW, np.uint8), np.empty(_BLOCK + 8, np.int64)
    words, state, doubles = flags.view(_U64), np.empty((3, _BLOCK), _F32), np.empty((3, _BLOCK), _F64)
    exact, back = np.empty((4, _BLOCK), _U16), _F32(1.0 / decay)
    found = 0
    for block in range(kept.size):
        first, end = block * _BLOCK, min((block + 1) * _BLOCK, theta.size)
        if weights.size:
            digest, largest = _digest_weighted(theta[first:end], weights[first:end])
        else:
            digest, largest = _digest_block(theta[first:end], a[first // _ROW :], c)
        if largest == _EXPONENT:
            return -1
        digests[block] = digest
        missing[block] = 0
        if skip[block] or digest == kept[block]:
            continue
        count = 0
        for start in range(first, end, _ROW):
            part = slice(start, min(start + _ROW, end))
            _candidates(theta[part], m[part], v[part], size, correction, eps, back, flags)
            count = _collect(flags, words, start, chosen, count)
        for k in range(count):
            i = chosen[k]
            state[0, k], state[1, k], state[2, k] = theta[i], m[i], v[i]
        some = slice(0, count)
        theta_m_v = state[0, some], state[1, some], state[2, some]
        u, old, radius = doubles[0, some], doubles[1, some], doubles[2, some]
        now, guess, low, high = exact[0, some], exact[1, some], exact[2, some], exact[3, some]
        largest = _exactly(*theta_m_v, size, correction, eps, decay, u, old, radius, now, guess, low, high)
        if largest == _EXPONENT:
            return -1
        difference = _U64(0)
        for k in range(count):
            i = chosen[k]
            weight = weights[i] if weights.size else a[i >> 12] * c[i & 4095]
            difference += weight * (_U64(now[k]) - _U64(guess[k]))  # 0 unless it is found
            local[found] = i
            bits[0, found], bits[1, found], bits[2, found], bits[3, found] = now[k], guess[k], low[k], high[k]
            found += (low[k] != now[k]) | (high[k] != now[k])
        missing[block] = kept[block] - (digest - difference)
    return found


@_compiled
def compare(new, old, kept, skip, a, c, weights, digests, missing, local):  # type: ignore[no-untyped-def]
    """Find where a run of whole blocks differs, and prove `old`; the last block may be short. Returns the number found.

    new, old: uint16 bits, flat. The rest as in `scan`; `local`: offsets of the elements of unskipped, changed blocks.
    """
    count = 0
    for block in range(kept.size):
        first, end = block * 4 * _ROW, min((block + 1) * 4 * _ROW, new.size)
        digest, before = _U64(0), _U64(0)
        for start in range(first, end, _ROW):
            total, total_before = _U64(0), _U64(0)
            if weights.size:
                for i in range(start, min(start + _ROW, end)):
                    digest += weights[i] * _U64(new[i])
                    before += weights[i] * _U64(old[i])
                continue
            for j in range(min(_ROW, end - start)):
                total += c[j] * _U64(new[start + j])
                total_before += c[j] * _U64(old[start + j])
            digest += a[start // _ROW] * total
            before += a[start // _ROW] * total_before
        digests[block] = digest
        missing[block] = 0
        if skip[block] or digest == kept[block]:
            continue
        missing[block] = kept[block] - before
        for i in range(first, end):
            if new[i] != old[i]:
                local[count] = i
                count += 1
    return count
