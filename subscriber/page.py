"""The subscriber's status page: what is served, what is wrong, and the timeline of versions."""

from typing import Final

from chunkstore.http import html_page
from subscriber.report import AppliedVersion, Report

_PHASES: Final = ("detect", "fetch", "stage", "prepare", "scatter", "pause")


def page(report: Report, now: float) -> str:
    """The page as of `now`, Unix seconds; newest version first."""
    status = report.status()
    versions, seconds = report.lag()
    facts = {
        "subscriber": status.id,
        "stream": status.stream,
        "state": status.state if status.reason is None else f"{status.state}: {status.reason}",
        "applied version": status.applied_version,
        "newest version": status.newest_version,
        "behind": f"{versions} versions, {seconds:.1f} s",
        "last error": "none"
        if status.last_error is None
        else f"{status.last_error.kind}: {status.last_error.message}",
        "refused": ", ".join(str(refusal.version) for refusal in status.refused) or "none",
    }
    columns = ("version", "ago", "path", "bytes", "changed", *_PHASES)
    rows = [_row(applied, now) for applied in reversed(report.timeline())]
    return html_page("deltasync subscriber", facts, columns, rows)


def _row(applied: AppliedVersion, now: float) -> list[object]:
    steps = len(applied.manifests)
    path = ("anchor" if applied.from_anchor else "delta") + (f" + {steps - 1}" if steps > 1 else "")
    changed = "all" if applied.changed is None else f"{applied.changed:,}"
    times = (f"{applied.seconds[name]:.3f}" if name in applied.seconds else "" for name in _PHASES)
    return [applied.version, f"{now - applied.at:.0f} s", path, f"{applied.nbytes:,}", changed, *times]
