"""Ed25519 signatures (docs/FORMAT.md, "Signature"): who may write a stream, and who is believed.

`cryptography` is loaded by whoever signs or demands signatures, and by nobody else: an environment without it reads
streams as they are.
"""

import base64
import binascii
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from chunkstore.errors import ConfigError
from manifest.errors import Untrusted

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

    from manifest.schema import Manifest

PUBLIC: Final = "ed25519:"
PRIVATE: Final = "ed25519-private:"
MANIFEST_DOMAIN: Final = b"deltasync manifest v1\0"

_KEY: Final = 32
_SIGNATURE: Final = 64


@dataclass(frozen=True, slots=True)
class PublicKey:
    """32 bytes; as text `ed25519:` and their base64."""

    raw: bytes

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError, which never shows a private key given by mistake."""
        if text.startswith(PRIVATE):
            raise ValueError(
                f"is a private key; the public one, which begins with {PUBLIC!r}, is wanted here"
            )
        return cls(_decode(PUBLIC, text, "public"))

    def __str__(self) -> str:
        return PUBLIC + base64.b64encode(self.raw).decode()


class Signer:
    """Signs with one private key, 32 bytes. Raises ConfigError if `cryptography` is not installed."""

    def __init__(self, private: bytes) -> None:
        private_key, _ = _ed25519()
        self._key = private_key.from_private_bytes(private)
        self.public = PublicKey(self._key.public_key().public_bytes_raw())

    @classmethod
    def parse(cls, text: str) -> Self:
        """The key whose text is `ed25519-private:` and its base64. Raises ValueError, which does not show the text."""
        return cls(_decode(PRIVATE, text, "private"))

    @classmethod
    def generate(cls) -> tuple[Self, str]:
        """A new key, and its text."""
        private_key, _ = _ed25519()
        raw = private_key.generate().private_bytes_raw()
        return cls(raw), PRIVATE + base64.b64encode(raw).decode()

    @property
    def trust(self) -> "Trust":
        """Believes this signer alone."""
        return Trust([self.public])

    def signature(self, domain: bytes, record: bytes) -> bytes:
        """96 bytes: the public key, then the signature of `domain` and `record`. `domain`: says what a record is."""
        return self.public.raw + self._key.sign(domain + record)

    def sign(self, manifest: "Manifest") -> "Manifest":
        """The same manifest, signed."""
        return manifest.model_copy(
            update={"signature": self.signature(MANIFEST_DOMAIN, manifest.signed_bytes)}
        )


class Trust:
    """Believes what was signed by one of `keys`, and nothing else. `stream`: the only stream it believes, if given.

    Raises ConfigError if `cryptography` is not installed.
    """

    def __init__(self, keys: Iterable[PublicKey], stream: bytes | None = None) -> None:
        _, public_key = _ed25519()
        self.stream = stream
        self._keys = {key: public_key.from_public_bytes(key.raw) for key in keys}

    def check(self, signature: bytes | None, domain: bytes, record: bytes, name: str) -> None:
        """Raises Untrusted, calling the object `name`, unless `signature` is that of `domain` and `record`."""
        from cryptography.exceptions import InvalidSignature

        if signature is None:
            raise Untrusted(
                f"{name} is not signed; trusted: {self._listed()}",
                hint="sign with `signing` in publisher.yaml; if your publisher did not write it, somebody else can "
                "write to this stream: see docs/security.md",
            )
        if len(signature) != _KEY + _SIGNATURE:
            raise Untrusted(
                f"{name} has a signature of {len(signature)} bytes, {_KEY + _SIGNATURE} are right",
                hint="it was damaged or forged: see docs/security.md",
            )
        signed_by = PublicKey(signature[:_KEY])
        key = self._keys.get(signed_by)
        if key is None:
            raise Untrusted(
                f"{name} claims to be signed by {signed_by}, which is not trusted; trusted: {self._listed()}",
                hint="add that key to `trust.keys` only if it is your publisher's; else see docs/security.md",
            )
        try:
            key.verify(signature[_KEY:], domain + record)
        except InvalidSignature:
            raise Untrusted(
                f"{name} is not what {signed_by} has signed: it was changed afterwards",
                hint="it was damaged or forged: see docs/security.md",
            ) from None

    def check_manifest(self, manifest: "Manifest", stream: bytes, name: str) -> None:
        """Raises Untrusted unless `manifest`, which lies at `name`, was signed for `stream`, 16 bytes."""
        self.check(manifest.signature, MANIFEST_DOMAIN, manifest.signed_bytes, name)
        if manifest.stream != stream:
            raise Untrusted(
                f"{name} was signed for stream {manifest.stream.hex()}, not for {stream.hex()}: it was copied here",
                hint="the signature is right, the place is not: see docs/security.md",
            )

    def _listed(self) -> str:
        return ", ".join(map(str, self._keys))


def signer_of(signature: bytes | None) -> str | None:
    """Whom a signature names, unverified, for people; None if there is none."""
    return None if signature is None else str(PublicKey(signature[:_KEY]))


def _decode(prefix: str, text: str, what: str) -> bytes:
    encoded = text.strip().removeprefix(prefix)
    try:
        raw = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if not text.strip().startswith(prefix) or len(raw) != _KEY or base64.b64encode(raw).decode() != encoded:
        raise ValueError(f"is no {what} key: {prefix!r} and the base64 of {_KEY} bytes are expected")
    return raw


def _ed25519() -> "tuple[type[Ed25519PrivateKey], type[Ed25519PublicKey]]":
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ConfigError(
            "signatures need a package that is not installed: cryptography",
            hint="install deltasync with its extra 'publisher', 'subscriber' or 'cli'",
        ) from error
    return ed25519.Ed25519PrivateKey, ed25519.Ed25519PublicKey
