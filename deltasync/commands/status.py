"""`deltasync status`: how far a stream is, and how far behind its subscribers are."""

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from chunkstore.words import counted, human_bytes
from deltasync.commands._common import (
    Commands,
    add_store_options,
    add_trust_option,
    age,
    count,
    positive,
    print_json,
    store_of,
    table,
    trust_of,
)

if TYPE_CHECKING:
    from deltasync.overview import Overview, SubscriberRow, VersionRow

_ANCHORS: Final = 5  # that are shown to people
_WELL: Final = 10  # subscribers, of those that are all well
_PROBLEMS: Final = 40
_WIDEST: Final = 500  # characters of one error


def register(commands: Commands) -> None:
    parser = commands.add_parser(
        "status",
        help="versions, sizes, subscribers and their lag",
        description="The chain, versions, sizes and subscribers of a stream, and all that is wrong with them. With "
        "--max-lag the exit code is 1 if anything is wrong, or a running subscriber is further behind.",
    )
    add_store_options(parser)
    add_trust_option(parser)
    parser.add_argument(
        "--json", action="store_true", help="one JSON document on stdout, all subscribers in it"
    )
    parser.add_argument(
        "--max-lag",
        type=count,
        metavar="VERSIONS",
        help="fail on any problem, or if a subscriber is further behind",
    )
    parser.add_argument(
        "--versions",
        type=positive,
        default=10,
        metavar="N",
        help="how many versions to show (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from deltasync.overview import overview

    seen = overview(store_of(args), time.time(), trust_of(args), args.versions)
    problems = seen.problems(args.max_lag)
    if args.json:
        print_json(seen.as_json() | {"problems": problems})
    else:
        print("\n".join(_lines(seen, problems, time.time())))
    return int(args.max_lag is not None and bool(problems))


def _lines(seen: "Overview", problems: list[str], now: float) -> list[str]:
    lines = [f"stream   {seen.stream} at {seen.url}"]
    if seen.newest is None:
        lines.append(
            "newest   no version can be used" if seen.refused else "newest   no version is committed yet"
        )
    else:
        lines += [f"newest   {_newest(seen, now)}", f"model    {_model(seen)}", f"chain    {_chain(seen)}"]
        lines.append(f"anchors  {_anchors(seen.anchors)}")
    lines += ["", *_verdict(problems)]
    if seen.versions:
        lines += ["", table([_version_cells(row, now) for row in seen.versions])]
    return [*lines, "", *_subscriber_lines(seen)]


def _verdict(problems: list[str]) -> list[str]:
    if not problems:
        return ["no problems"]
    shown = [f"  {_short(problem)}" for problem in problems[:_PROBLEMS]]
    more = len(problems) - len(shown)
    return [counted(len(problems), "problem") + ":", *shown, *([f"  and {more} more"] if more else [])]


def _short(text: str) -> str:
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"


def _newest(seen: "Overview", now: float) -> str:
    text = f"version {seen.newest}, epoch {seen.epoch}, publisher {seen.publisher}"
    row = seen.versions[0]
    step = "" if row.train_step is None else f", step {row.train_step}"
    return f"{text}{step}, {age(now - row.created_at)} ago"


def _model(seen: "Overview") -> str:
    if seen.tensors is None or seen.dense_bytes is None:
        return "its catalog cannot be read"
    return f"{seen.tensors} tensors, {seen.elements} elements, {human_bytes(seen.dense_bytes)}"


def _chain(seen: "Overview") -> str:
    start = seen.cold_start
    if start is None:
        return "a new subscriber cannot start, see below"
    after = f"{human_bytes(start.nbytes - start.anchor_nbytes)} in {counted(start.steps - 1, 'version')}"
    if start.reference:
        return (
            f"a new subscriber starts from the checkpoint that version {start.anchor} refers to (base_checkpoint), "
            f"then fetches {after}"
        )
    return (
        f"a new subscriber fetches {human_bytes(start.nbytes)}: the anchor of version {start.anchor}, "
        f"{human_bytes(start.anchor_nbytes)}, then {after}"
    )


def _anchors(versions: Sequence[int]) -> str:
    """The newest few."""
    shown = ", ".join(str(version) for version in versions[: -_ANCHORS - 1 : -1])
    more = len(versions) - _ANCHORS
    return (f"of {shown}" if shown else "none") + (f" and {more} more" if more > 0 else "")


def _version_cells(row: "VersionRow", now: float) -> dict[str, object]:
    return {
        "version": row.version,
        "kind": ("takeover" if row.takeover else row.kind) + ("+anchor" if row.alternate else ""),
        "base": row.base_version,
        "epoch": row.epoch,
        "step": row.train_step,
        "changed": f"{100 * row.changed / row.elements:.3f} %" if row.elements else None,
        "size": human_bytes(row.nbytes),
        "age": age(now - row.created_at),
    }


def _subscriber_lines(seen: "Overview") -> list[str]:
    """All that need a look, and some of the others; then the last errors, which may be over."""
    if not seen.subscribers:
        return ["no subscribers have reported yet"]
    states = Counter(_state(row) for row in seen.subscribers)
    lines = [
        ", ".join([counted(len(seen.subscribers), "subscriber"), *(f"{n} {s}" for s, n in states.items())])
    ]
    shown = [
        row
        for i, row in enumerate(seen.subscribers)
        if row.faults or row.lag_versions or row.status.last_error or i < _WELL
    ]
    lines.append(table([_subscriber_cells(row) for row in shown]))
    if len(shown) < len(seen.subscribers):
        lines.append(f"and {len(seen.subscribers) - len(shown)} more that are serving the newest version")
    return lines + [
        f"{row.status.id}, last error: {_short(f'error[{e.kind}]: {e.message}')}"
        for row in shown
        if (e := row.status.last_error) is not None
        and e.message not in (r.message for r in row.status.refused)
    ]


def _state(row: "SubscriberRow") -> str:
    return "silent" if row.silent else row.status.state


def _subscriber_cells(row: "SubscriberRow") -> dict[str, object]:
    error = row.status.last_error
    return {
        "subscriber": row.status.id,
        "state": _state(row),
        "version": row.status.applied_version,
        "lag": row.lag_versions,
        "behind for": "-" if not row.lag_versions or row.lag_seconds is None else age(row.lag_seconds),
        "refused": len(row.status.refused) or None,
        "last seen": f"{age(row.silent_seconds)} ago",
        "last error": None if error is None else error.kind,
    }
