"""`deltasync store compact`: store a version whole, so that readers start there and older ones can go."""

import argparse
from pathlib import Path

from chunkstore.words import counted, human_bytes
from deltasync.commands._common import (
    Commands,
    add_base_option,
    add_store_options,
    add_trust_option,
    base_of,
    duration,
    newest_version,
    print_json,
    store_of,
    trust_of,
    version_number,
)
from deltasync.commands.store_gc import GRACE


def register(commands: Commands) -> None:
    parser = commands.add_parser(
        "compact",
        help="store a version whole, without its trainer",
        description="Build an anchor of a version from an older anchor and deltas, prove it by digest, and put it "
        "under alternates/. Nothing is replaced. Needs temporary disk space of the model's size.",
    )
    add_store_options(parser)
    add_trust_option(parser)
    add_base_option(parser)
    parser.add_argument("--version", type=version_number, metavar="V", help="default: the newest")
    parser.add_argument(
        "--grace",
        type=duration,
        default=GRACE,
        metavar="TIME",
        help="what `store gc` is given; past half of it compaction gives up (default: %(default)s)",
    )
    parser.add_argument(
        "--signing-key",
        type=Path,
        metavar="FILE",
        help="private key to sign the anchor of a signed stream with",
    )
    parser.add_argument(
        "--scratch", type=Path, metavar="DIR", help="where the temporary space is; default: the system's"
    )
    parser.add_argument("--json", action="store_true", help="say what was written as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from deltasync.commands._progress import transfer
    from manifest.key_files import read_private_key
    from manifest.log import VersionLog, open_stream
    from publisher.compact import compact

    signer = None if args.signing_key is None else read_private_key(args.signing_key)
    # What carries this signer's name must not be built from what anybody may have written.
    trust = trust_of(args) or (None if signer is None else signer.trust)
    with transfer("compact") as moving:
        store = store_of(args, moving)
        log = VersionLog(store, open_stream(store, trust), trust=trust, signer=signer)
        version = newest_version(log) if args.version is None else args.version
        anchor = compact(log, version, args.grace, scratch=args.scratch, base=base_of(args))
    if args.json:
        chunks = [ref.key for ref in anchor.chunks]
        print_json({"version": version, "root": anchor.root, "nbytes": anchor.nbytes, "chunks": chunks})
    else:
        print(
            f"version {version} is stored whole: {human_bytes(anchor.nbytes)} in {counted(len(anchor.chunks), 'chunk')}"
        )
    return 0
