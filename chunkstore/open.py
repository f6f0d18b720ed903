"""From a store's configuration to a store that is ready to use."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import unquote

from pydantic import Field, model_validator

from chunkstore.config import ORIGIN, Section
from chunkstore.errors import ConfigError
from chunkstore.limit import LimitStore
from chunkstore.memory import MemoryStore
from chunkstore.metrics import MetricsStore, StoreMetrics
from chunkstore.posix import PosixStore
from chunkstore.retry import Backoff, RetryStore
from chunkstore.store import Store

Hold = Callable[[], object] | None

Seconds = Annotated[float, Field(gt=0, le=3600)]


class StoreConfig(Section):
    """Which store, and how to talk to it. Credentials come from the AWS chain, never from here.

    `url`: `file:///absolute/path` or a plain absolute path; `s3://bucket/prefix`; `memory://name` for tests; any other
    fsspec URL for reading only. `endpoint_url`, `region`, `path_style` and the two timeouts (seconds) are for s3.
    `retry_deadline`: seconds after which a failing operation is no longer repeated.
    """

    url: str = Field(min_length=1)
    endpoint_url: Annotated[str, ORIGIN] | None = None
    region: str | None = Field(default=None, min_length=1)
    path_style: bool = False
    concurrency: int = Field(default=8, ge=1, le=256)
    connect_timeout: Seconds = 10.0
    read_timeout: Seconds = 60.0
    retry_deadline: Seconds = 60.0

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        scheme, rest = _split(self.url)
        for_s3 = {
            "endpoint_url",
            "region",
            "path_style",
            "connect_timeout",
            "read_timeout",
        } & self.model_fields_set
        if scheme != "s3" and for_s3:
            raise ValueError(f"{', '.join(sorted(for_s3))}: only for s3:// URLs")
        if scheme == "s3":
            bucket, _, prefix = rest.partition("/")
            if not bucket or "@" in bucket or ":" in bucket:
                raise ValueError(
                    "url: s3:// needs a bucket name: s3://bucket/prefix; credentials do not go here"
                )
            if any(part in ("", ".", "..") for part in prefix.strip("/").split("/")) and prefix.strip("/"):
                raise ValueError("url: the prefix has an empty, '.' or '..' segment")
        elif scheme == "" and not rest.startswith(("/", "~")):
            raise ValueError(  # relative, it would name another folder in each process
                "url: is neither an absolute path nor a URL: /path/to/folder or s3://bucket/prefix"
            )
        elif scheme == "file" and not rest.removeprefix("localhost").startswith("/"):
            raise ValueError("url: file:// needs an absolute path: file:///absolute/path")
        return self

    @property
    def can_publish(self) -> bool:
        """Whether a publisher can write there; stores of other kinds are for reading only."""
        return _split(self.url)[0] in ("", "file", "s3", "memory")


def absolute(url: str) -> str:
    """A path as it is meant in the working directory; any URL as it is."""
    return url if "://" in url or not url else str(Path(url).expanduser().absolute())


def open_store(
    config: StoreConfig,
    metrics: StoreMetrics | None = None,
    *,
    page: int = 1000,
    make: bool = True,
    hold: Hold = None,
) -> Store:
    """The store of `config`, counted in `metrics`, limited and retried. Connects to nothing yet.

    `page`: keys per request of a listing, where that takes requests. `make`: whether a write creates a folder that is
    not there; if not, every call says that it is not. `hold`: called in every put_if_absent before its last step, where
    it has several. Raises ConfigError if the package for this kind of store is not installed or its URL is not usable.
    """
    counters = metrics or StoreMetrics()
    raw = _raw(config, page, make, hold)
    retried = RetryStore(raw, Backoff(deadline=config.retry_deadline), on_retry=counters.retried)
    return MetricsStore(LimitStore(retried, config.concurrency), counters)


def _raw(config: StoreConfig, page: int, make: bool, hold: Hold) -> Store:
    scheme, rest = _split(config.url)
    if scheme == "":
        return PosixStore(Path(rest).expanduser(), make=make, hold=hold)
    if scheme == "file":
        return PosixStore(unquote(rest.removeprefix("localhost")), make=make, hold=hold)
    if scheme == "memory":
        return MemoryStore.named(rest)
    # Imported only here: a process that keeps its streams elsewhere need not have, or load, these packages.
    try:
        if scheme == "s3":
            from chunkstore.s3 import S3Store

            bucket, _, prefix = rest.partition("/")
            return S3Store(
                bucket,
                prefix,
                endpoint_url=config.endpoint_url,
                region=config.region,
                path_style=config.path_style,
                connect_timeout=config.connect_timeout,
                read_timeout=config.read_timeout,
                connections=config.concurrency,
                page=page,
                hold=hold,
            )
        from chunkstore.fsspec_store import FsspecStore

        return FsspecStore(config.url)
    except ImportError as error:
        raise ConfigError(
            f"url: {scheme}:// needs a package that is not installed: {error.name}",
            hint="install deltasync with its extra 's3', 'publisher' or 'subscriber'",
        ) from error


def _split(url: str) -> tuple[str, str]:
    """Scheme, empty for a plain path, and what follows it."""
    scheme, separator, rest = url.partition("://")
    return (scheme, rest) if separator else ("", url)
