"""What SGLang loads, in each of its processes, before its scheduler exists (entry point group `sglang.srt.plugins`).

Hooks a scheduler's weight updater: requests of `/weights_checker` that carry our prefix go to `Rank`, every other way
of writing weights is counted, and while the gate is closed nobody can continue generation. Written for the SGLang
releases named in docs/sglang.md; one where a hooked name is missing is refused.
"""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import nn

    from subscriber.sglang.host import Ack
    from subscriber.sglang.rank import Rank

log = logging.getLogger("deltasync.sglang")

_UPDATER: Final = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"
_STATE: Final = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
_WRITERS: Final = (
    "update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor",
    "update_weights_from_ipc", "begin_weight_update", "end_weight_update", "release_memory_occupation",
    "resume_memory_occupation",
)  # fmt: skip
_NEEDED: Final = (
    "continue_generation", "pause_generation", "grammar_manager.grammar_queue", "handle_update_weight_version",
)  # fmt: skip
"""Of a scheduler."""
_HARMLESS: Final = {"checksum", "snapshot", "compare"}
"""Actions of `/weights_checker` that only read."""

_rank: "Rank | None" = None
"""Of this process, once its scheduler's weight updater exists. The updater has slots, so it cannot hold it."""


def register() -> None:
    """Called by SGLang once per process. Does nothing but register hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_UPDATER}.__post_init__", _after_init, HookType.AFTER)
    HookRegistry.register(f"{_UPDATER}.check_weights", _around_check, HookType.AROUND)
    for name in _WRITERS:
        HookRegistry.register(f"{_UPDATER}.{name}", _around_writer, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}.continue_generation", _around_continue, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}.handle_update_weight_version", _after_version, HookType.AFTER)
    HookRegistry.register(f"{_STATE}.get_internal_state", _after_state, HookType.AFTER)


class Server:
    """The SGLang scheduler process as `Rank` sees it."""

    def __init__(self, updater: Any) -> None:
        from sglang.srt.runtime_context import get_parallel

        self._updater = updater
        parallel = get_parallel()
        self._replica = parallel.dp_rank or 0
        self.rank: int = self._replica * parallel.tp_size + parallel.tp_rank
        self.size: int = parallel.tp_size * parallel.dp_size

    @property
    def model(self) -> "nn.Module":
        model: nn.Module = self._updater.tp_worker.model_runner.model
        return model

    @property
    def _scheduler(self) -> Any:
        return self._updater.scheduler

    def describe(self) -> "Ack":
        args = self._scheduler.server_args
        return {
            "sglang": _release("sglang"),
            "deltasync": _release("deltasync"),
            "model": str(args.model_path),
            "architecture": type(self.model).__name__,
            "replica": self._replica,
            "paused": bool(self._scheduler._engine_paused),
        }

    def refusals(self) -> list[str]:
        from subscriber.sglang.refusals import refusals

        config = self._updater.tp_worker.model_runner.model_config
        reasons: list[str] = refusals(self.model, self._scheduler.server_args, config)
        return [*unguarded(self._updater, self._scheduler), *reasons]

    def vote(self, ack: "Ack") -> "list[Ack]":
        import torch

        group = self._updater.tp_cpu_group
        acks: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(acks, ack, group=group)
        return acks

    def released(self) -> list[str]:
        return sorted(map(str, self._updater.offload_tags))

    def idle(self) -> bool:
        # Requests that wait have been retracted: they are computed anew.
        with self._without_grammars():
            return bool(self._scheduler.is_fully_idle(ignore_waiting=True))

    def stop_batches(self) -> None:
        # With the flag alone a batch at hand would stay half done: nothing could be written, and requests that are
        # to be aborted would wait for ever for a last step.
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))

    @contextmanager
    def _without_grammars(self) -> Iterator[None]:
        """Without requests whose grammar is being compiled, which hold nothing yet: to SGLang it is not idle then."""
        manager = self._scheduler.grammar_manager
        waiting, manager.grammar_queue = manager.grammar_queue, []
        try:
            yield
        finally:
            manager.grammar_queue = waiting

    def disown(self) -> "Ack":
        # Whoever writes may name a version, after this; one that does not would leave ours.
        self._updater.record_weight_version_after_update("unknown")
        return {}

    def wrote(self, version: str) -> None:
        self._updater.record_weight_version_after_update(version)

    def drop_cache(self) -> None:
        with self._without_grammars():
            dropped = self._updater.flush_cache(empty_cache=False)
        if not dropped:
            raise RuntimeError("the cache of other weights could not be dropped")


@cache
def _release(distribution: str) -> str:
    """Which is looked up on disk: milliseconds, and a scheduler is asked all the time."""
    from importlib.metadata import version

    return version(distribution)


def unguarded(updater: object, scheduler: object) -> list[str]:
    """Why this release of SGLang cannot be trusted: what is not hooked by its name may go by another one."""
    names = [name for name in _WRITERS if not hasattr(updater, name)]
    names += [name for name in _NEEDED if not _has(scheduler, name)]
    return [
        f"this release of SGLang has no {name}, so weights may change, or batches run, unnoticed: "
        "use a release that docs/sglang.md names"
        for name in names
    ]


def _has(thing: object, path: str) -> bool:
    name, _, rest = path.partition(".")
    return hasattr(thing, name) and (not rest or _has(getattr(thing, name), rest))


def _after_init(result: Any, updater: Any) -> None:
    global _rank
    try:
        from subscriber.sglang.rank import Rank

        _rank = Rank(Server(updater))
    except Exception:
        log.exception("deltasync cannot work in this scheduler; it serves without")


def _around_check(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Ours, or SGLang's own; those of its actions that write are counted."""
    from subscriber.sglang.wire import PREFIX

    if not str(request.action).startswith(PREFIX):
        if _rank is not None and request.action not in _HARMLESS:
            _rank.somebody_writes()
        return original(updater, request)
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput

    if _rank is None:
        return CheckWeightsReqOutput(
            success=False, message="deltasync failed to start in this scheduler; see its log"
        )
    try:
        message = json.dumps(_rank.handle(json.loads(request.action.removeprefix(PREFIX))))
    except (
        Exception
    ) as error:  # what is no request at all; every rank is given the same, so none waits for a vote
        log.exception("deltasync: a request failed")
        return CheckWeightsReqOutput(success=False, message=f"{type(error).__name__}: {error}")
    # SGLang joins the messages of several replicas with " | ".
    return CheckWeightsReqOutput(success=True, message=message.replace("|", "\\u007c"))


def _around_writer(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _rank is not None:
        _rank.somebody_writes()
    return original(*args, **kwargs)


def _around_continue(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _rank is not None and _rank.gate is not None:
        log.warning("deltasync: generation is not continued: %s", _rank.gate)
        return None
    return original(*args, **kwargs)


def _after_version(result: Any, *args: Any, **kwargs: Any) -> None:
    if _rank is not None:
        _rank.named()


def _after_state(result: Any, *args: Any, **kwargs: Any) -> None:
    if _rank is None:
        return
    try:
        result.internal_state["deltasync"] = _rank.hello()
    except Exception:
        log.exception("deltasync: the state cannot be shown")
