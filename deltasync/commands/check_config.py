"""`deltasync check-config`: is this YAML right, without starting anything."""

import argparse
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from deltasync.commands._common import Commands, print_json

if TYPE_CHECKING:
    from pydantic import BaseModel

Kind = Literal["publisher", "subscriber"]


def register(commands: Commands) -> None:
    parser = commands.add_parser(
        "check-config",
        help="check a daemon's YAML file",
        description="Check a publisher's or subscriber's YAML file. Whose it is shows from its keys, or say it.",
    )
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument("--kind", choices=("publisher", "subscriber"), help="whose file it is")
    parser.add_argument("--json", action="store_true", help="print the whole config, defaults filled in")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    kind, config = check_config(args.file, args.kind)
    if args.json:
        print_json({"kind": kind, "config": config.model_dump(mode="json")})
    else:
        print(f"{args.file}: ok, checked as a {kind}'s config")
    return 0


def check_config(path: Path, kind: Kind | None = None) -> tuple[Kind, "BaseModel"]:
    """Read the file as a `kind`'s config, by default the kind its keys show. Raises ConfigError."""
    from chunkstore.config import load_config
    from publisher.config import PublisherConfig
    from subscriber.config import SubscriberConfig

    kind = kind or detect_kind(path)
    return kind, load_config(path, PublisherConfig if kind == "publisher" else SubscriberConfig)


def detect_kind(path: Path) -> Kind:
    """Whose config the file is, by the top-level keys that only one of the two has. Raises ConfigError."""
    from pydantic import BaseModel, ConfigDict

    from chunkstore.config import load_config
    from chunkstore.errors import ConfigError
    from publisher.config import PublisherConfig
    from subscriber.config import SubscriberConfig

    class AnyKeys(BaseModel):
        model_config = ConfigDict(extra="allow")

    publishers, subscribers = set(PublisherConfig.model_fields), set(SubscriberConfig.model_fields)
    known = publishers | subscribers
    given = load_config(path, AnyKeys).model_extra or {}
    # A misspelt key counts as the one that is meant: then that it is misspelt is what people are told.
    keys = {near for key in given for near in get_close_matches(key, known, n=1) or [key]}
    of_publisher, of_subscriber = (
        sorted(keys & publishers - subscribers),
        sorted(keys & subscribers - publishers),
    )
    if not of_subscriber and "base_checkpoint" in keys:
        return "publisher"  # only of a publisher can it be the one key that matters
    if bool(of_publisher) == bool(of_subscriber):
        found = (
            f"it has keys of both: {', '.join(of_publisher)} and {', '.join(of_subscriber)}"
            if of_publisher
            else "it has no key that only one of them has"
        )
        raise ConfigError(
            f"{path}: cannot tell whether this is a publisher's or a subscriber's config: {found}",
            hint="say which with --kind publisher or --kind subscriber",
        )
    return "publisher" if of_publisher else "subscriber"
