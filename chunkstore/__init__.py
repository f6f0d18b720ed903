"""Bytes: object stores, the chunk codec and digests.

In: bit patterns of tensor parts, and store URLs. Out: immutable objects, decoded sections, 64-bit digests.
Knows no versions, manifests, models or optimizers.
"""
