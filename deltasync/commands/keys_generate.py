"""`deltasync keys generate`: a key pair to sign a stream with."""

import argparse
from pathlib import Path

from deltasync.commands._common import Commands, print_json


def register(commands: Commands) -> None:
    parser = commands.add_parser(
        "generate",
        help="make a key pair",
        description="Make an Ed25519 key pair. FILE gets the private key (mode 0600), FILE.pub the public one, which "
        "is printed as well; a directory gets signing.key and signing.key.pub. Nothing is overwritten.",
    )
    parser.add_argument("target", metavar="DIR|FILE", type=Path)
    parser.add_argument("--json", action="store_true", help="say what was written as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from manifest.key_files import generate_key

    private, public, key = generate_key(args.target)
    if args.json:
        print_json({"private_key_file": str(private), "public_key_file": str(public), "public_key": str(key)})
    else:
        print(f"{private}: the private key, for `signing.key_file` in publisher.yaml")
        print(f"{public}: the public key, for `trust.keys` in subscriber.yaml:")
        print(key)
    return 0
