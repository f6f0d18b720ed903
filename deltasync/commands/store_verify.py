"""`deltasync store verify`: re-read every object of a stream and recompute every digest."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from chunkstore.words import counted, human_bytes
from deltasync.commands._common import (
    Commands,
    add_base_option,
    add_store_options,
    add_trust_option,
    base_of,
    print_json,
    store_of,
    trust_of,
)

if TYPE_CHECKING:
    from manifest.verify import VerifyReport


def register(commands: Commands) -> None:
    parser = commands.add_parser(
        "verify",
        help="re-read every object and recompute every digest",
        description="Re-read every object of a stream, recompute every digest, and list every problem. "
        "Exit code 1 if there is one. Needs temporary disk space of the model's size.",
    )
    add_store_options(parser)
    add_trust_option(parser)
    add_base_option(parser)
    parser.add_argument(
        "--scratch", type=Path, metavar="DIR", help="where the temporary space is; default: the system's"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from deltasync.commands._progress import transfer
    from manifest.keys import CHUNKS
    from manifest.verify import verify_stream

    with transfer("verify") as reading:
        store = store_of(args, reading)
        if reading.shown:
            reading.expect(sum(info.size for info in store.list_after(CHUNKS)))
        report = verify_stream(store, args.scratch, trust_of(args), base_of(args))
    if args.json:
        print_json({"ok": report.ok, **asdict(report)})
    else:
        print("\n".join(_lines(report)))
    return 0 if report.ok else 1


def _lines(report: "VerifyReport") -> list[str]:
    lines = [f"{problem.key}: {problem.kind}: {problem.message}" for problem in report.problems]
    if report.unverified:
        lines.append(
            f"not verified, {'for the problems above' if report.problems else 'without its --base-checkpoint'}: "
            f"versions {', '.join(map(str, report.unverified))}"
        )
    if report.collected:
        lines.append(f"removed by garbage collection: {counted(len(report.collected), 'version')}")
    verdict = "ok" if report.ok else counted(len(report.problems), "problem")
    counts = [
        counted(report.versions, "version"),
        counted(report.alternates, "alternate anchor"),
        counted(report.chunks, "chunk"),
        human_bytes(report.nbytes),
    ]
    return [*lines, f"{verdict}: {report.url}: {', '.join(counts)}"]
