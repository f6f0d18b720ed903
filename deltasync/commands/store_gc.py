"""`deltasync store gc`: delete what nobody needs any more."""

import argparse
from collections import Counter
from typing import TYPE_CHECKING, Final

from chunkstore.words import counted, human_bytes
from deltasync.commands._common import (
    Commands,
    add_store_options,
    add_trust_option,
    duration,
    positive,
    print_json,
    store_of,
    trust_of,
)

if TYPE_CHECKING:
    from manifest.gc import Doomed, Garbage

GRACE: Final = "1d"


def register(commands: Commands) -> None:
    parser = commands.add_parser(
        "gc",
        help="delete what nobody needs any more",
        description="Delete the objects of versions below the newest anchor that nobody needs any more, and what dead "
        "processes left. Manifests stay. May be interrupted and run again at any time, beside everything else.",
    )
    add_store_options(parser)
    add_trust_option(parser)
    parser.add_argument("--dry-run", action="store_true", help="delete nothing; print what would be deleted")
    parser.add_argument(
        "--grace",
        type=duration,
        default=GRACE,
        metavar="TIME",
        help="keep everything younger (default: %(default)s)",
    )
    parser.add_argument(
        "--keep",
        type=positive,
        default=1,
        metavar="N",
        help="keep the newest N versions restorable (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from manifest.collect import delete_garbage, read_holdings
    from manifest.gc import Policy, collectable
    from manifest.log import VersionLog, open_stream

    store, trust = store_of(args), trust_of(args)
    policy = Policy(args.grace, args.keep)
    log = VersionLog(store, open_stream(store, trust), trust=trust)
    garbage = collectable(read_holdings(log, policy), policy)

    def deleted(one: "Doomed") -> None:
        if not args.json:
            print(f"{one.key}  {human_bytes(one.nbytes)}  {one.reason}")

    if args.dry_run:
        for one in garbage.objects:
            deleted(one)
    else:
        delete_garbage(store, garbage.objects, deleted)
    if args.json:
        print_json(_as_json(store.url, garbage, dry_run=args.dry_run))
    else:
        print("\n".join(_summary(garbage, dry_run=args.dry_run)))
    return 0


def _as_json(url: str, garbage: "Garbage", *, dry_run: bool) -> dict[str, object]:
    return {
        "url": url,
        "dry_run": dry_run,
        "floor": garbage.floor,
        "needed_from": garbage.bound and garbage.bound.version,
        "needed_why": garbage.bound and garbage.bound.why,
        "nbytes": garbage.nbytes,
        "objects": [{"key": one.key, "nbytes": one.nbytes, "reason": one.reason} for one in garbage.objects],
    }


def _summary(garbage: "Garbage", *, dry_run: bool) -> list[str]:
    reasons = Counter(one.reason for one in garbage.objects)
    listed = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    verb = "would delete" if dry_run else "deleted"
    objects = counted(len(garbage.objects), "object")
    lines = [f"{verb} {objects}, {human_bytes(garbage.nbytes)}" + (f": {listed}" if listed else "")]
    if garbage.bound is not None:
        why = f"version {garbage.bound.version} has to stay reachable: {garbage.bound.why}"
        kept = "all versions are kept: there is no settled anchor to start from"
        lines.append(
            f"{kept}; {why}" if garbage.floor is None else f"kept from version {garbage.floor} on; {why}"
        )
    return lines
