"""The subscriber's configuration: one strict YAML file, or the same keys in Python."""

import re
import socket
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, SecretStr, model_validator

from chunkstore.config import ORIGIN, Section, matching
from chunkstore.http import HttpConfig
from chunkstore.open import StoreConfig
from manifest.key_files import TrustConfig

Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]

SERVER_NAME: Final = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,60}"

_NAMING: Final = "has to be at most {} letters, digits, '.', '_' and '-', the first of them no '.'"


def unsendable(key: str) -> str | None:
    """Why `key` cannot be sent in an HTTP header, in words that do not show it; None if it can be."""
    wrong = {
        "is empty": not key,
        "begins with a byte order mark": key.startswith("\ufeff"),
        "has characters that are not ASCII": not key.isascii(),
        "has several lines": any(char in key for char in "\r\n"),
        "has control characters": not key.isprintable(),
        "begins or ends with a space": key != key.strip(),
    }
    return next((why for why, holds in wrong.items() if holds), None)


def _sendable(key: SecretStr) -> SecretStr:
    why = unsendable(key.get_secret_value())
    if why is not None:
        raise ValueError(f"{why}; a key is one line of ASCII, and left out where the servers want none")
    return key


_Key = Annotated[SecretStr, AfterValidator(_sendable)]


def _name_of_server(fields: dict[str, Any]) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", fields.get("url", "").partition("://")[2].rstrip("/"))


class TorchEngineConfig(Section):
    """A module in the daemon's own process.

    `factory`: `module:function` of your own code; called without arguments, returns the `torch.nn.Module`.
    """

    type: Literal["torch"]
    factory: Annotated[
        str,
        matching(
            r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", "has to be module:function, such as my_rollout:build_model"
        ),
    ]


class ServerConfig(Section):
    """One SGLang server. `name`: for status, metrics and files; the URL's host and port unless given."""

    url: Annotated[str, ORIGIN]
    name: Annotated[str, matching(SERVER_NAME, _NAMING.format(61))] = Field(
        default_factory=_name_of_server, validate_default=True
    )


class SGLangEngineConfig(Section):
    """SGLang servers on this host, which see `staging_dir` under the same path.

    `api_key`, `admin_api_key`: what the servers were started with; write `${NAME}` to take them from the environment,
    or name a file, which is read anew for every request.
    `pause`: what happens to running requests while weights are written: they are `retract`ed and go on afterwards with
    the new weights, or they `abort`.
    Timeouts, in seconds, of one step: `request_timeout` of any small request, `prepare_timeout` of everything beside
    serving, a full digest included, `pause_timeout` until nothing runs any more, `write_timeout` of writing.
    """

    type: Literal["sglang"]
    servers: tuple[ServerConfig, ...] = Field(min_length=1, max_length=64)
    api_key: _Key | None = None
    api_key_file: Path | None = None
    admin_api_key: _Key | None = None
    admin_api_key_file: Path | None = None
    pause: Literal["retract", "abort"] = "retract"
    request_timeout: Seconds = 30.0
    prepare_timeout: Seconds = 600.0
    pause_timeout: Seconds = 60.0
    write_timeout: Seconds = 120.0

    @model_validator(mode="after")
    def _one_source_each(self) -> Self:
        names = [server.name for server in self.servers]
        if len(set(names)) != len(names) or len({server.url.rstrip("/") for server in self.servers}) != len(
            names
        ):
            raise ValueError("two servers have the same name or URL")
        for key in ("api_key", "admin_api_key"):
            if getattr(self, key) is not None and getattr(self, f"{key}_file") is not None:
                raise ValueError(f"give {key} or {key}_file, not both")
        return self


EngineConfig = Annotated[TorchEngineConfig | SGLangEngineConfig, Field(discriminator="type")]
"""Which engine `deltasync subscriber run` drives."""


def _host_id() -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:100] or "subscriber"


class SubscriberConfig(Section):
    """How one subscriber follows one stream.

    `id`: names its status object and its local files; unique per stream, the host name unless given.
    `base_checkpoint`: the Hugging Face folder that the trainer started from, for streams whose version 0 refers to it.
    `poll_interval`: seconds between looks for a new version; grows up to fourfold while nothing comes.
    `relist_interval`: seconds between listings of the log, and between checks that the stream is still the same.
    `state_dir`: the journal, kept across restarts. `staging_dir`: fetched and staged data, default
    `<state_dir>/staging`; a directory in /dev/shm is faster where it has room for one anchor, twice.
    `status_interval`: seconds between renewals of the status object, which is also the lease.
    `audit_every`: versions between full digests of the live weights.
    `fetch_concurrency`: chunks in flight; each takes up to 128 MiB of memory.
    `prefetch_bytes`: how much of later versions may be fetched while one is being applied, and how much that other
    servers are done with stays for one that is behind.
    `http`: null turns the server off. `trust`: follow only what these keys have signed.
    """

    store: StoreConfig
    base_checkpoint: Path | None = None
    id: Annotated[str, matching(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", _NAMING.format(100))] = Field(
        default_factory=_host_id
    )
    poll_interval: Seconds = 1.0
    relist_interval: Seconds = 60.0
    state_dir: Path = Path("~/.local/state/deltasync")
    staging_dir: Path | None = None
    status_interval: Seconds = 30.0
    audit_every: int = Field(default=100, ge=1)
    fetch_concurrency: int = Field(default=4, ge=1, le=64)
    prefetch_bytes: int = Field(default=1 << 30, ge=0)
    http: HttpConfig | None = HttpConfig()
    engine: EngineConfig | None = None
    trust: TrustConfig | None = None

    @property
    def state_path(self) -> Path:
        """This subscriber's own directory for its journal."""
        return self.state_dir.expanduser() / self.id

    @property
    def staging_path(self) -> Path:
        """This subscriber's own directory for fetched and staged data; absolute, since servers are told it."""
        base = self.staging_dir or self.state_dir / "staging"
        return base.expanduser().absolute() / self.id
