"""`deltasync status`: how far a stream is, and how far behind its subscribers are."""

import argparse
import time
from typing import TYPE_CHECKING

from deltasync.commands._common import (
    Commands,
    add_store_options,
    add_trust_option,
    counted,
    human_bytes,
    print_json,
    store_of,
    table,
    trust_of,
)

if TYPE_CHECKING:
    from deltasync.overview import Overview


def register(commands: Commands) -> None:
    parser = commands.add_parser(
        "status",
        help="versions, sizes, subscribers and their lag",
        description="Versions, sizes, chain and subscribers of a stream. With --max-lag the exit code is 1 if a "
        "running subscriber is further behind, refuses a version or has gone silent, or a version is damaged or not "
        "trusted.",
    )
    add_store_options(parser)
    add_trust_option(parser)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument(
        "--max-lag", type=int, metavar="VERSIONS", help="fail if a subscriber is further behind"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from deltasync.overview import overview

    seen = overview(store_of(args), time.time(), trust_of(args))
    if args.json:
        print_json(seen.as_json())
    else:
        print("\n".join(_lines(seen)))
    if args.max_lag is None:
        return 0
    return int(bool(seen.refused) or any(not s.within(args.max_lag) for s in seen.subscribers))


def _lines(seen: "Overview") -> list[str]:
    lines = [f"stream {seen.stream} at {seen.url}"]
    if seen.newest is None:
        lines.append("no version is committed yet" if not seen.refused else "no version can be used")
    else:
        lines += [
            f"newest version {seen.newest}, epoch {seen.epoch}, publisher {seen.publisher}",
            f"model: {seen.tensors} tensors, {seen.elements} elements, {human_bytes(seen.dense_bytes)}",
            _cold_start(seen),
            "",
            table([_version_cells(seen, i) for i in range(len(seen.versions))]),
        ]
    lines += ["", table(_subscriber_rows(seen)) if seen.subscribers else "no subscribers have reported yet"]
    for row in seen.subscribers:
        lines += [f"{row.status.id}: {row.status.reason}"] if row.status.state == "held" else []
        lines += [
            f"{row.status.id} refuses version {r.version}: error[{r.kind}]: {r.message}"
            for r in row.status.refused
        ]
    lines += [f"version {r.version} is refused: error[{r.kind}]: {r.message}" for r in seen.refused]
    lines += [f"{key} is no status object" for key in seen.unreadable]
    return lines


def _cold_start(seen: "Overview") -> str:
    if seen.cold_start_bytes is None:
        return f"chain: a new subscriber cannot start: {seen.chain_problem}"
    return (
        f"chain: a new subscriber starts from the anchor of version {seen.cold_start_anchor} and fetches "
        f"{human_bytes(seen.cold_start_bytes)} in {counted(seen.cold_start_steps or 0, 'step')}"
    )


def _version_cells(seen: "Overview", index: int) -> dict[str, object]:
    row = seen.versions[index]
    percent = 100 * row.changed / seen.elements if seen.elements else 0.0
    return {
        "version": row.version,
        "kind": row.kind + ("+anchor" if row.alternate else ""),
        "base": row.base_version,
        "epoch": row.epoch,
        "step": row.train_step,
        "changed": f"{percent:.3f} %",
        "size": human_bytes(row.nbytes),
        "created": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.created_at)),
    }


def _subscriber_rows(seen: "Overview") -> list[dict[str, object]]:
    return [
        {
            "subscriber": row.status.id,
            "state": "silent" if row.silent else row.status.state,
            "applied": row.status.applied_version,
            "lag": row.lag_versions,
            "lag seconds": None if row.lag_seconds is None else f"{row.lag_seconds:.1f}",
            "refused": len(row.status.refused),
            "last seen": f"{row.silent_seconds:.0f} s ago",
        }
        for row in seen.subscribers
    ]
