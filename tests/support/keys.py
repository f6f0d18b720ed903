"""Signing keys that are the same in every run."""

import hashlib

from manifest.signing import Signer


def make_signer(name: str = "a") -> Signer:
    """A key of its own for each name."""
    return Signer(hashlib.sha256(b"key of tests " + name.encode()).digest())
