"""Where the demo publishes: a folder, a server given by URL, or an S3 server of its own, as a process."""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from chunkstore.config import parse_config
from chunkstore.errors import ConfigError
from chunkstore.open import StoreConfig, absolute
from deltasync.demo.child import Child, child_command, claim_stdout, serve
from deltasync.s3server import BUCKET, CREDENTIALS, EmbeddedS3Server

_START_TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class DemoStore:
    """The run's stream, and environment variables for the processes that open it."""

    config: StoreConfig
    environment: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def open_demo_store(kind: str, url: str | None, endpoint_url: str | None, work: Path) -> Iterator[DemoStore]:
    """The store for `kind` (posix or s3), with a fresh stream below `url` if one is given, else of the run's own.

    Raises ConfigError if url and endpoint do not fit the kind.
    """
    stream = f"demo-{secrets.token_hex(4)}"
    _check(kind, url, endpoint_url)
    if url is not None:
        elsewhere = {} if endpoint_url is None else {"endpoint_url": endpoint_url, "path_style": True}
        given = {"url": f"{absolute(url).rstrip('/')}/{stream}", **elsewhere}
        yield DemoStore(parse_config(given, StoreConfig, source="command line"))
    elif kind == "posix":
        yield DemoStore(StoreConfig(url=str(work / "store")))
    else:
        with Child("store", child_command("store"), work / "logs" / "store.log") as server:
            endpoint = server.call("url", timeout=_START_TIMEOUT)["url"]
            config = StoreConfig(url=f"s3://{BUCKET}/{stream}", endpoint_url=endpoint, path_style=True)
            # Not through a proxy, whatever the environment says of other hosts.
            yield DemoStore(config, CREDENTIALS | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"})


def _check(kind: str, url: str | None, endpoint_url: str | None) -> None:
    scheme = None if url is None else url.partition("://")[0] if "://" in url else "file"
    if scheme is not None and (scheme == "s3") != (kind == "s3"):
        raise ConfigError(
            f"--store-url {url} is no URL for --store {kind}",
            hint="posix: a path or file:///path; s3: s3://bucket/prefix",
        )
    if endpoint_url is not None and scheme != "s3":
        raise ConfigError(
            "--endpoint-url needs --store s3 and a --store-url s3://bucket/prefix",
            hint="leave it out: the run has a store of its own",
        )


def main() -> None:
    """The store process: an S3 server that lives as long as stdin is open."""
    replies = claim_stdout()
    with EmbeddedS3Server() as server:
        serve({"url": lambda: {"url": server.url}}, replies)


if __name__ == "__main__":
    main()
