"""What several commands share: options for reaching a store, JSON output, tables and times for people."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from chunkstore.metrics import StoreMetrics
    from chunkstore.open import StoreConfig
    from chunkstore.store import Store
    from manifest.checkpoint import Checkpoint
    from manifest.log import VersionLog
    from manifest.signing import Trust


class Commands(Protocol):
    """What `add_subparsers` returns, as far as commands use it."""

    def add_parser(self, name: str, *, help: str, description: str = ...) -> argparse.ArgumentParser: ...


def add_store_options(parser: argparse.ArgumentParser) -> None:
    """The stream's URL, and how to reach an S3 server that is not AWS. Credentials: the standard AWS chain."""
    parser.add_argument("url", metavar="URL", help="the stream: a path, file:///path or s3://bucket/prefix")
    parser.add_argument("--endpoint-url", metavar="URL", help="S3 server to use instead of AWS")
    parser.add_argument("--region", help="S3 region")
    parser.add_argument("--path-style", action="store_true", help="bucket in the path, as MinIO wants it")


def store_of(args: argparse.Namespace, metrics: "StoreMetrics | None" = None) -> "Store":
    """The store that the options of `add_store_options` name, counted in `metrics`. Raises ConfigError."""
    from chunkstore.open import open_store
    from deltasync.commands._progress import Patience

    return open_store(store_config_of(args), metrics or Patience())


def store_config_of(args: argparse.Namespace) -> "StoreConfig":
    """What the options of `add_store_options` say. Raises ConfigError."""
    from chunkstore.config import parse_config
    from chunkstore.open import StoreConfig, absolute

    options = {
        "endpoint_url": args.endpoint_url,
        "region": args.region,
        "path_style": args.path_style or None,
    }
    given = {name: value for name, value in options.items() if value is not None}
    return parse_config({"url": absolute(args.url), **given}, StoreConfig, source="command line")


def add_trust_option(parser: argparse.ArgumentParser) -> None:
    """Whose signatures are demanded. Without it, everything is read, signed or not."""
    parser.add_argument(
        "--trusted-key",
        action="append",
        metavar="KEY|FILE",
        help="refuse what this public key, or a further one, has not signed; may be repeated",
    )


def trust_of(args: argparse.Namespace) -> "Trust | None":
    """What the option of `add_trust_option` asks for. Raises ConfigError."""
    if args.trusted_key is None:
        return None
    from manifest.key_files import read_public_key
    from manifest.signing import Trust

    return Trust(map(read_public_key, args.trusted_key))


def add_base_option(parser: argparse.ArgumentParser) -> None:
    """For streams whose version 0 refers to a checkpoint."""
    parser.add_argument(
        "--base-checkpoint",
        type=Path,
        metavar="DIR",
        help="the checkpoint that the run started from, if version 0 refers to it instead of holding it",
    )


def base_of(args: argparse.Namespace) -> "Checkpoint | None":
    """What the option of `add_base_option` names. Raises BaseMissing."""
    if args.base_checkpoint is None:
        return None
    from manifest.checkpoint import Checkpoint

    return Checkpoint.open(args.base_checkpoint)


def version_number(text: str) -> int:
    """What an option takes that names a version: argparse turns the ValueError into a usage error."""
    from manifest.keys import MAX_VERSION

    if not text.isascii() or not text.isdigit() or int(text) > MAX_VERSION:
        raise argparse.ArgumentTypeError(f"{text!r} is no version: versions are whole numbers from 0 on")
    return int(text)


def newest_version(log: "VersionLog") -> int:
    """Raises ObjectMissing if there is no version."""
    from chunkstore.errors import ObjectMissing

    newest = log.newest()
    if newest is None:
        raise ObjectMissing(
            f"{log.store.url} has no version yet", hint="wait for the publisher's first anchor"
        )
    return newest.version


_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def duration(text: str) -> float:
    """Seconds, from what an option takes: `90`, `90s`, `15m`, `2h`, `1d`."""
    number, unit = (text[:-1], text[-1:]) if text[-1:] in _UNITS else (text, "s")
    if not number.isascii() or not number.isdigit() or not int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is no duration: say 90s, 15m, 2h or 1d")
    return float(int(number) * _UNITS[unit])


def count(text: str) -> int:
    """What an option takes that counts something, perhaps nothing."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 on")
    return int(text)


def positive(text: str) -> int:
    """What an option takes that counts something, at least one."""
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return int(text)


def print_json(value: Any) -> None:
    """One JSON document on stdout; bytes as hex."""
    json.dump(value, sys.stdout, indent=2, default=_plain)
    print()


def _plain(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def age(seconds: float) -> str:
    """12 s, 5 min, 3 h, 4 d: how long ago something was, or for how long it has been so."""
    seconds = max(0.0, seconds)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 100 * 3600 else f"{seconds / 86400:.0f} d"


def table(rows: list[dict[str, Any]]) -> str:
    """Aligned columns under the keys of the first row; None as `-`. Empty for no rows."""
    if not rows:
        return ""
    cells = [list(rows[0])] + [
        ["-" if value is None else str(value) for value in row.values()] for row in rows
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in cells)


def add_log_level(parser: argparse.ArgumentParser) -> None:
    """How much a daemon writes to stderr."""
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="how much is written to stderr (default: %(default)s)",
    )
