"""Where keys come from: files that `deltasync keys generate` writes, and the sections of both daemons' YAML."""

import os
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import AfterValidator, Field, SecretStr, model_validator

from chunkstore.config import Section, matching
from chunkstore.errors import ConfigError
from manifest.errors import LocalDiskError
from manifest.signing import PRIVATE, PublicKey, Signer, Trust

_MAX_FILE: Final = 4096


def _public(text: str) -> str:
    if text.strip().startswith(PRIVATE):  # not a ValueError, whose message would show the value
        raise ConfigError(
            "trust.keys: holds a private key",
            hint="name the public one, and make a new pair: this one is not secret now",
        )
    return str(PublicKey.parse(text))


class TrustConfig(Section):
    """`keys`: public keys, any of which may sign. `stream`: hex id of the only stream to follow; else any they sign."""

    keys: tuple[Annotated[str, AfterValidator(_public)], ...] = Field(min_length=1, max_length=16)
    stream: (
        Annotated[str, matching("[0-9a-f]{32}", "has to be the 32 hex digits that `deltasync status` prints")]
        | None
    ) = None

    def load(self) -> Trust:
        """Raises ConfigError if `cryptography` is not installed."""
        stream = None if self.stream is None else bytes.fromhex(self.stream)
        return Trust(map(PublicKey.parse, self.keys), stream)


class SigningConfig(Section):
    """Exactly one of `key_file`, which the signing process alone reads, and `key`, to be written as `${NAME}`."""

    key_file: Path | None = None
    key: SecretStr | None = None

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        if (self.key_file is None) == (self.key is None):
            raise ValueError("give exactly one of key_file and key")
        return self

    def load(self) -> Signer:
        """Raises ConfigError if the key cannot be read or is none."""
        if self.key_file is not None:
            return read_private_key(self.key_file)
        assert self.key is not None
        try:
            return Signer.parse(self.key.get_secret_value())
        except ValueError as error:
            raise ConfigError(f"signing.key: {error}", hint="`deltasync keys generate` makes one") from None


def load_trust(config: TrustConfig | None) -> Trust | None:
    """What a section that may be missing asks for."""
    return None if config is None else config.load()


def load_signer(config: SigningConfig | None) -> Signer | None:
    """What a section that may be missing asks for."""
    return None if config is None else config.load()


def read_private_key(path: Path) -> Signer:
    """Raises ConfigError, which does not show what the file holds."""
    try:
        with path.expanduser().open("rb") as file:
            text = file.read(_MAX_FILE).decode(errors="replace")
    except OSError as error:
        raise ConfigError(
            f"the signing key {path} cannot be read: {error.strerror}",
            hint="`deltasync keys generate` makes one; only the process that signs needs to read it",
        ) from error
    try:
        return Signer.parse(text)
    except ValueError as error:
        raise ConfigError(f"{path} {error}", hint="`deltasync keys generate` makes one") from None


def read_public_key(text: str) -> PublicKey:
    """The key that `text` is, or that the file named `text` holds. Raises ConfigError."""
    try:
        if not text.startswith("ed25519"):
            text = Path(text).expanduser().read_text(encoding="ascii", errors="replace")[:_MAX_FILE]
        return PublicKey.parse(text)
    except OSError as error:
        raise ConfigError(
            f"{text} is neither a public key nor a file that can be read: {error.strerror}",
            hint="public keys begin with 'ed25519:'; `deltasync keys generate` prints one and writes it to a .pub file",
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"a trusted key {error}", hint="`deltasync keys generate` prints it and writes it to a .pub file"
        ) from None


def generate_key(target: Path) -> tuple[Path, Path, PublicKey]:
    """Write a new private key, readable by its owner alone, and beside it the public one: `target` and `target`.pub.

    In a directory that exists they are called signing.key and signing.key.pub. Nothing is overwritten: raises
    LocalDiskError if either file is there already or cannot be written.
    """
    private = target / "signing.key" if target.is_dir() else target
    public = private.with_name(private.name + ".pub")
    signer, text = Signer.generate()
    written: list[Path] = []
    try:
        for path, content, mode in ((private, text, 0o600), (public, str(signer.public), 0o644)):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            written.append(path)
            with os.fdopen(file, "w") as stream:
                stream.write(content + "\n")
                stream.flush()
                os.fsync(stream.fileno())
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise LocalDiskError(
            f"cannot write the key to {error.filename or private}: {error.strerror}",
            hint="keys are never overwritten: name another file"
            if isinstance(error, FileExistsError)
            else "check that the directory exists and can be written",
        ) from error
    return private, public, signer.public
