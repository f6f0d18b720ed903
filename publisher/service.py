"""`deltasync publisher run`: write a trainer's versions from a process beside it, or only keep a stream's anchors.

One trainer at a time. It may die at any moment and another one come: whatever it shared is forgotten, and the next
one's weights are compared with the committed version by digest. So may this process: see `publisher.sidecar`.

Without a spool the trainer publishes by itself, or several do; then this process stores versions whole, by policy and
for subscribers that refuse one.
"""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from chunkstore.errors import ConfigError, StoreFull, StoreUnavailable
from chunkstore.http import StatusServer
from chunkstore.metrics import StoreMetrics
from chunkstore.open import open_store
from chunkstore.probe import require_put_if_absent
from chunkstore.store import Store
from manifest.key_files import load_signer
from publisher.anchors import RoutineAnchors
from publisher.config import PublisherConfig
from publisher.frames import SOCKET
from publisher.listener import Listener
from publisher.messages import ErrorInfo
from publisher.refusals import Refusals
from publisher.report import Report
from publisher.session import Session
from publisher.spool import remove_stale

log = logging.getLogger("deltasync.publisher")


def run_publisher(config: PublisherConfig) -> int:
    """Serve trainers until SIGTERM or SIGINT; then the last version's outcome is awaited, and 0 returned.

    Raises ConfigError with neither spool nor anchors or if the HTTP port is taken, LocalDiskError if the spool cannot
    be used or has a publisher process already, AccessDenied or StoreUnsuitable if the store would never take a version.
    """
    if config.spool is None and config.anchors is None:
        raise ConfigError(
            "neither spool nor anchors: there is nothing to do for a publisher process",
            hint="name a spool, such as /dev/shm/deltasync, that the trainer sees too; or anchors",
        )
    metrics = StoreMetrics()
    store = open_store(config.store, metrics)
    report = Report(metrics, expects_trainer=config.spool is not None)
    with ExitStack() as stack:
        listener = None
        if config.spool is not None:
            listener = stack.enter_context(Listener(config.spool, config.capture_timeout))
        if config.http is not None:
            server = stack.enter_context(StatusServer(config.http, report.answers()))
            log.info("serving HTTP at %s:%d", config.http.host, server.port)
        if config.anchors is not None:
            signer = load_signer(config.signing)
            refusals = Refusals(store) if listener is None else None
            stack.enter_context(
                RoutineAnchors(
                    store, config.anchors, signer, report, base=config.base_checkpoint, refusals=refusals
                )
            )
        stopped = threading.Event()
        stack.enter_context(_on_signals(stopped.set if listener is None else listener.stop))
        _check_store(store, report)
        if listener is None or config.spool is None:
            log.info("no spool: keeping the anchors of %s", store.url)
            stopped.wait()
        else:
            serve_trainers(config, store, config.spool, listener, report)
    log.info("stopped")
    return 0


def serve_trainers(
    config: PublisherConfig, store: Store, spool: Path, listener: Listener, report: Report
) -> None:
    """One trainer after the other, until the listener is stopped."""
    remove_stale(spool)
    log.info("waiting for a trainer at %s", spool / SOCKET)
    while (frames := listener.accept()) is not None:
        try:
            Session(config, store, spool, frames, report).run()
        finally:
            listener.hang_up()
        remove_stale(spool)


def _check_store(store: Store, report: Report) -> None:
    """Rather now than when a trainer comes. What may pass by itself is reported, and found again then."""
    try:
        require_put_if_absent(store)
    except (StoreUnavailable, StoreFull) as error:
        report.failed(ErrorInfo.of(error))
        log.warning("nothing can be published for now: %s", error)


@contextmanager
def _on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Within, SIGTERM and SIGINT call `stop`. In the main thread; elsewhere, signals are not ours."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        log.info("stopping on %s", signal.Signals(number).name)
        stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
