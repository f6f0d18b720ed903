"""The compiled inversion for fp32 state on the CPU and bf16 on the wire: one pass over θ, m and v.

It computes what `publisher.find.find_reference`, its oracle, does; they differ only where torch's vectorised sqrt is
not correctly rounded, far inside the guard. Per row of 4096 elements a wide fp32 pass digests the new bits and finds
candidates with a bound that is never below R; only those, about one in a hundred, are looked at again in fp64.
Releases the GIL, so that pieces run on threads.
"""

from collections.abc import Callable
from typing import Any, Final

import numba
import numpy as np

_ROW: Final = 4096
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


@_compiled
def _bf16(x):  # type: ignore[no-untyped-def]
    """fp32 bits to bf16 bits, to nearest, ties to even; wrong for NaN, which callers exclude."""
    return (x + _U32(0x7FFF) + ((x >> _U32(16)) & _U32(1))) >> _U32(16)


@_compiled
def _bits(x):  # type: ignore[no-untyped-def]
    return _F32(x).view(_U32)


@_compiled
def _ulp32(bits):  # type: ignore[no-untyped-def]
    exponent = max(_U32(bits) & _EXPONENT, _U32(1 << 23))
    return _F64(_U32(exponent).view(_F32)) * 2.0**-23


@_compiled
def _digest_row(theta, c):  # type: ignore[no-untyped-def]
    """Σ C·bits of one row, and the largest exponent in it: all ones if a value is not finite."""
    total, largest = _U64(0), _U32(0)
    for j in range(theta.size):
        x = _bits(theta[j])
        total += c[j] * _U64(_bf16(x))
        largest = max(largest, x & _EXPONENT)
    return total, largest


@_compiled
def _candidates(theta, m, v, size, correction, eps, back, flags):  # type: ignore[no-untyped-def]
    """Set flags[j] where the element may have changed; return the largest exponent of a bound, as `_digest_row`.

    3·2⁻²³·(|θ_t| + |θ̂|) covers 1.5·(ulp + ulp) and this pass's own fp32 rounding; the rest is R with room to spare.
    """
    largest = _U32(0)
    for j in range(theta.size):
        t = theta[j]
        u = (size * m[j]) / (np.sqrt(v[j]) / correction + eps)
        old = (t + u) * back
        radius = (abs(t) + abs(old)) * _F32(3.0 * 2.0**-23) + abs(u) * _F32(1.01 * 2.0**-13) + _F32(2.0**-120)
        largest = max(largest, _bits(radius) & _EXPONENT)
        now = _bf16(_bits(t))
        flags[j] = (_bf16(_bits(old - radius)) ^ now) | (_bf16(_bits(old + radius)) ^ now)
    return largest


@_compiled
def scan(  # type: ignore[no-untyped-def]
    theta, m, v, kept, skip, a, c, size, correction, eps, decay, digests, missing, local, bits, flags
):
    """Invert a run of whole blocks of one parameter; the last one may be short. Returns the number found, or −1.

    theta, m, v: fp32, flat. kept, skip: uint64 and bool per block; blocks to skip are digested only. a, c: the
    coefficients of the run's rows and of a row. size, correction, eps: fp32; decay: fp64 (`_update`, `Hyper.decay`).

    Fills, per block, `digests` of the new bits and `missing`, kept minus the reconstruction's digest (0 where skipped);
    and, per element whose bounds do not both equal its new bits, `local` offset and `bits` [4, …]: new, guess, low,
    high. flags: uint32[4096], scratch. −1: a value is not finite somewhere; nothing but the caller's time is lost.
    """
    count = 0
    for block in range(kept.size):
        first, end = block * 4 * _ROW, min((block + 1) * 4 * _ROW, theta.size)
        digest, largest = _U64(0), _U32(0)
        for start in range(first, end, _ROW):
            total, exponent = _digest_row(theta[start : min(start + _ROW, end)], c)
            digest += a[start // _ROW] * total
            largest = max(largest, exponent)
        if largest == _EXPONENT:
            return -1
        digests[block] = digest
        missing[block] = 0
        if skip[block] or digest == kept[block]:
            continue
        before = digest
        for start in range(first, end, _ROW):
            stop = min(start + _ROW, end)
            row = slice(start, stop)
            if (
                _candidates(theta[row], m[row], v[row], size, correction, eps, _F32(1.0 / decay), flags)
                == _EXPONENT
            ):
                return -1
            difference = _U64(0)
            for j in range(stop - start):
                if flags[j] == 0:
                    continue
                i = start + j
                now, guess, low, high = _exactly(theta[i], m[i], v[i], size, correction, eps, decay)
                if low == now and high == now:
                    continue
                local[count] = i
                bits[0, count], bits[1, count], bits[2, count], bits[3, count] = now, guess, low, high
                count += 1
                difference += c[j] * (_U64(now) - _U64(guess))
            before -= a[start // _ROW] * difference
        missing[block] = kept[block] - before
    return count


@_compiled
def _exactly(t, m, v, size, correction, eps, decay):  # type: ignore[no-untyped-def]
    """New bits, guess, low, high of one element: `publisher.inversion.reconstruct`, operation by operation."""
    u = _F64((size * m) / (np.sqrt(v) / correction + eps))
    old = (_F64(t) + u) / decay
    if abs(old) < abs(u) * _ROUNDING:
        old = 0.0
    radius = (1.5 * (_ulp32(_bits(t)) + _ulp32(_bits(old))) + abs(u) * 2.0**-13) / decay
    return (
        _U16(_bf16(_bits(t))),
        _U16(_bf16(_bits(old))),
        _U16(_bf16(_bits(old - radius))),
        _U16(_bf16(_bits(old + radius))),
    )
