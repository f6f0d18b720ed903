"""What the daemon answers over HTTP: for its one engine, or for each of several and for all of them together."""

import json
import time
from collections.abc import Mapping

from chunkstore.http import Answers
from chunkstore.metrics import StoreMetrics
from subscriber.metrics import text_by_server
from subscriber.page import page, page_of_all
from subscriber.report import Report


def answers_of(
    subscriber_id: str, reports: Mapping[str, Report], store: StoreMetrics
) -> tuple[Answers, dict[str, Answers]]:
    """The daemon's answers and, with several engines, those of each, by path. `reports`: by server's name."""
    if len(reports) == 1:
        return next(_answers(report) for report in reports.values()), {}
    together = Answers(
        unready=lambda: _unready(reports),
        status=lambda: _status(subscriber_id, reports),
        metrics=lambda: text_by_server({name: report.metrics for name, report in reports.items()}, store),
        page=lambda: page_of_all(subscriber_id, reports, time.time()),
    )
    return together, {f"/servers/{name}": _answers(report) for name, report in reports.items()}


def _answers(report: Report) -> Answers:
    return Answers(
        unready=lambda: report.reason,
        status=lambda: report.status().model_dump_json(indent=1),
        metrics=report.metrics.text,
        page=lambda: page(report, time.time()),
    )


def _unready(reports: Mapping[str, Report]) -> str | None:
    reasons = {name: report.reason for name, report in reports.items()}
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason is not None) or None


def _status(subscriber_id: str, reports: Mapping[str, Report]) -> str:
    servers = {name: report.status().model_dump(mode="json") for name, report in reports.items()}
    return json.dumps({"id": subscriber_id, "servers": servers}, indent=1)
