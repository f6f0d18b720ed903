"""The subscriber's status pages: what is served, what is wrong, and the timeline of versions."""

from collections.abc import Mapping
from typing import Final

from chunkstore.http import html_page
from subscriber.report import TIMELINE, AppliedVersion, Report
from subscriber.status import SubscriberStatus

_PHASES: Final = ("detect", "fetch", "stage", "prepare", "scatter", "pause")
_COLUMNS: Final = ("version", "ago", "path", "bytes", "changed", *_PHASES)


def page(report: Report, now: float) -> str:
    """The page as of `now`, Unix seconds; newest version first."""
    status = report.status()
    facts = {
        "subscriber": status.id,
        "stream": status.stream,
        "state": _state(status),
        "applied version": status.applied_version,
        "newest version": status.newest_version,
        "behind": _behind(report),
        "last error": "none"
        if status.last_error is None
        else f"{status.last_error.kind}: {status.last_error.message}",
        "refused": ", ".join(str(refusal.version) for refusal in status.refused) or "none",
    }
    rows = [_row(applied, now) for applied in reversed(report.timeline())]
    return html_page("deltasync subscriber", facts, _COLUMNS, rows)


def page_of_all(subscriber_id: str, reports: Mapping[str, Report], now: float) -> str:
    """The page of several engines, by name: how each of them is, and their versions, the latest first."""
    facts: dict[str, object] = {"subscriber": subscriber_id}
    applies: list[tuple[AppliedVersion, str]] = []
    for name, report in reports.items():
        status = report.status()
        version = "" if status.applied_version is None else f" version {status.applied_version}"
        facts[name] = f"{_state(status)}{version}, behind: {_behind(report)}"
        applies += [(applied, name) for applied in report.timeline()]
    applies.sort(key=lambda item: item[0].at, reverse=True)
    rows = [[name, *_row(applied, now)] for applied, name in applies[:TIMELINE]]
    return html_page("deltasync subscriber", facts, ("server", *_COLUMNS), rows)


def _state(status: SubscriberStatus) -> str:
    return status.state if status.reason is None else f"{status.state}: {status.reason}"


def _behind(report: Report) -> str:
    versions, seconds = report.lag()
    return f"{versions} versions, {seconds:.1f} s"


def _row(applied: AppliedVersion, now: float) -> list[object]:
    steps = len(applied.manifests)
    path = ("anchor" if applied.from_anchor else "delta") + (f" + {steps - 1}" if steps > 1 else "")
    changed = "all" if applied.changed is None else f"{applied.changed:,}"
    times = (f"{applied.seconds[name]:.3f}" if name in applied.seconds else "" for name in _PHASES)
    return [applied.version, f"{now - applied.at:.0f} s", path, f"{applied.nbytes:,}", changed, *times]
