"""Where each object of a stream lies (docs/FORMAT.md, "Layout"). Keys are relative to the stream's prefix."""

import re
from typing import Final

STREAM: Final = "stream.msgpack"
VERSIONS: Final = "versions/"
ALTERNATES: Final = "alternates/"
SUBSCRIBERS: Final = "subscribers/"
CHUNKS: Final = "chunks/"
ATTEMPTS: Final = "attempts/"
PARTS: Final = "parts/"

MAX_VERSION: Final = 10**20 - 1
_OF_ATTEMPT = re.compile(f"(?:{CHUNKS}|{PARTS}|{ATTEMPTS})([0-9]{{20}})/([0-9a-f]{{32}})(?:/.+|\\.msgpack)")


def version_name(version: int) -> str:
    """20 decimal digits, so that names sort as versions do. Raises ValueError outside 0 … 10²⁰−1."""
    if not 0 <= version <= MAX_VERSION:
        raise ValueError(f"version {version} is outside 0 … 10^20 - 1")
    return f"{version:020d}"


def manifest_key(version: int) -> str:
    return VERSIONS + version_name(version)


def alternate_key(version: int) -> str:
    return f"{ALTERNATES}{version_name(version)}/anchor"


def catalog_key(catalog_hash: bytes) -> str:
    return f"catalog/{catalog_hash.hex()}.msgpack"


def chunk_prefix(version: int, attempt: bytes) -> str:
    """What every chunk key of one attempt starts with."""
    return f"{CHUNKS}{version_name(version)}/{attempt.hex()}/"


def chunk_key(version: int, attempt: bytes, writer: int, number: int) -> str:
    return f"{chunk_prefix(version, attempt)}{writer}-{number}.chunk"


def attempt_prefix(version: int) -> str:
    """What the keys of all calls for one version start with."""
    return f"{ATTEMPTS}{version_name(version)}/"


def attempt_key(version: int, attempt: bytes) -> str:
    return f"{attempt_prefix(version)}{attempt.hex()}.msgpack"


def part_prefix(version: int, attempt: bytes) -> str:
    """What the keys of all parts of one attempt start with."""
    return f"{PARTS}{version_name(version)}/{attempt.hex()}/"


def part_key(version: int, attempt: bytes, writer: int) -> str:
    return f"{part_prefix(version, attempt)}{writer}.part"


def status_key(subscriber_id: str) -> str:
    return f"{SUBSCRIBERS}{subscriber_id}.json"


def parse_version_key(key: str) -> int | None:
    """The version of a `versions/…` key, or None if it is not one."""
    name = key.removeprefix(VERSIONS)
    return (
        int(name)
        if key.startswith(VERSIONS) and len(name) == 20 and name.isascii() and name.isdigit()
        else None
    )


def parse_alternate_key(key: str) -> int | None:
    """The version of an `alternates/…/anchor` key, or None if it is not one."""
    name = key.removeprefix(ALTERNATES).removesuffix("/anchor")
    version = int(name) if len(name) == 20 and name.isascii() and name.isdigit() else None
    return version if version is not None and key == alternate_key(version) else None


def parse_attempt_key(key: str) -> tuple[int, str] | None:
    """The version and attempt (hex) that a key under chunks/, parts/ or attempts/ belongs to; None for any other."""
    match = _OF_ATTEMPT.fullmatch(key)
    return None if match is None else (int(match[1]), match[2])
