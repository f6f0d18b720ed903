"""Run the demo: start the processes, lead them through the loop, judge every version."""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from chunkstore.errors import ConfigError
from deltasync.demo.child import Child, Reply, child_command
from deltasync.demo.daemon import make_spool
from deltasync.demo.rows import Comparison, Row, all_identical
from deltasync.demo.sglang_server import find_sglang
from deltasync.demo.store import DemoStore, open_demo_store
from deltasync.demo.table import Display, summary

CACHE: Final = Path(".demo")
"""Where models made once stay, below the current directory."""

_PROMPTS: Final = 6
_GROUP: Final = 6
_WAIT: Final = 300.0
"""Seconds that any single request to a process may take."""

_THREADS: Final = {"smollm2": {}, "tiny": {"OMP_NUM_THREADS": "1"}}
"""The processes take turns, so each may use every core; sharing out tiny tensors only loses time."""

_START: Final = 900.0
"""Seconds until the rollout worker generates: SGLang's servers need minutes on a machine that is busy."""

_COMPARED: Final = {
    "torch": "tensors compared with the trainer's",
    "sglang": "checksums of live parameters compared with those of a second SGLang server, into which SGLang's own "
    "loader read the trainer's weights",
}


def rollout_command(engine: str, python: Path | None) -> tuple[str, ...]:
    """The rollout worker of `engine`, without its options. `python`: of SGLang's environment. Raises DemoFailed."""
    if engine == "torch":
        return child_command("rollout")
    return (*child_command("sglang_rollout"), str(find_sglang(python)))


@dataclass(frozen=True)
class Demo:
    """One run below folder `work`.

    `spool`: where trainer and publisher share memory. `environment`: variables for trainer, publisher and rollout
    worker. `rollout`: the latter's command, without its options.
    """

    checkpoint: Path
    store: DemoStore
    versions: int
    work: Path
    spool: Path
    environment: Mapping[str, str]
    rollout: tuple[str, ...]

    def rows(self, display: Display) -> Generator[Row, None, None]:
        """Yield the anchor's row and one per trained version. Ends all processes when it is left, however."""
        folder, logs = self.work / "rollout", self.work / "logs"
        copy_without_weights(self.checkpoint, folder)
        # As given, not as completed: options of s3 are refused for other stores.
        store = self.store.config.model_dump(mode="json", exclude_unset=True)
        config = self.work / "publisher.yaml"
        settings = {
            "store": store, "base_checkpoint": str(self.checkpoint), "spool": str(self.spool), "http": None
        }  # fmt: skip
        config.write_text(json.dumps(settings, indent=2))  # YAML as well
        publisher_command = (*child_command("daemon"), "publisher", str(config))
        trainer_command = (*child_command("trainer"), str(config))
        options = {"folder": str(folder), "store": store, "logs": str(logs)}
        worker_command = (*self.rollout, json.dumps(options))
        # Libraries leave caches among temporary files; these go with the run.
        environment = {**self.store.environment, **self.environment, "TMPDIR": str(self.work)}
        with (
            Child("publisher", publisher_command, logs / "publisher.log", environment),
            Child("trainer", trainer_command, logs / "trainer.log", environment) as trainer,
            Child("rollout", worker_command, logs / "rollout.log", environment, hurry=5.0) as rollout,
        ):
            display.stage("version 0: the trainer loads the model and publishes the anchor")
            anchor = trainer.call("anchor", timeout=_WAIT)
            display.stage("the rollout worker starts")
            rollout.call("start", timeout=_START)
            yield self._deliver(trainer, rollout, display, published=anchor, learned={})
            for step in range(1, self.versions + 1):
                display.stage(f"version {step}: the rollout worker generates completions")
                batch = rollout.call("generate", timeout=_WAIT, prompts=_PROMPTS, group=_GROUP, seed=step)
                display.stage(f"version {step}: the trainer takes a step")
                learned = trainer.call("step", timeout=_WAIT, samples=batch["samples"])
                published = trainer.call("publish", timeout=_WAIT, train_step=step)
                yield self._deliver(trainer, rollout, display, published=published, learned=learned)

    def _deliver(
        self, trainer: Child, rollout: Child, display: Display, *, published: Reply, learned: Reply
    ) -> Row:
        """Let the rollout worker sync to what was published, and compare it with the trainer."""
        version = published["version"]
        display.stage(f"version {version}: the rollout worker syncs")
        synced = rollout.call("sync", timeout=_WAIT, version=version)
        display.stage(f"version {version}: all bits are compared")
        dump = self.work / "trainer-weights.safetensors"
        dumped = trainer.call("dump", timeout=_WAIT, path=str(dump))
        compared = rollout.call("compare", timeout=_WAIT, path=str(dump))
        dump.unlink()
        return Row(
            version=version,
            kind=published["kind"],
            loss=learned.get("loss"),
            reward=learned.get("reward"),
            elements=published["elements"],
            changed=published["changed"],
            chunk_bytes=published["chunk_bytes"],
            dense_bytes=published["dense_bytes"],
            seconds=published["seconds"] | synced["seconds"],
            model_tensors=compared["model_tensors"] if "model_tensors" in compared else dumped["tensors"],
            comparison=Comparison.from_json(compared),
        )


def run_demo(args: argparse.Namespace, rollout: tuple[str, ...] | None = None) -> int:
    """`deltasync demo` with the options of `deltasync.demo.add_arguments`. `rollout`: the rollout worker's command,
    by default that of the engine.
    """
    begin = time.monotonic()
    rollout = rollout or rollout_command(args.engine, args.sglang_python)
    with ExitStack() as stack:
        stack.enter_context(_sigterm_unwinds())
        console = Console(stderr=args.json)
        work = stack.enter_context(_work_folder(args.keep))
        title = f"deltasync demo: {args.model} in {args.engine} through {args.store}"
        display = stack.enter_context(Display(console, title))
        display.stage(f"the model {args.model} is made ready (slow only the first time)")
        checkpoint = _ready_model(args.model, work)
        store = stack.enter_context(open_demo_store(args.store, args.store_url, args.endpoint_url, work))
        spool = stack.enter_context(make_spool(checkpoint, work))
        demo = Demo(checkpoint, store, args.versions, work, spool, _THREADS[args.model], rollout)
        rows: list[Row] = []
        for row in stack.enter_context(closing(demo.rows(display))):
            rows.append(row)
            display.add(row)
    ok = all_identical(rows, args.versions)
    seconds = time.monotonic() - begin
    verdict = summary(rows, _COMPARED[args.engine], ok=ok, seconds=seconds)
    console.print(verdict, style="bold green" if ok else "bold red", highlight=False, soft_wrap=True)
    if args.json:
        print(json.dumps(_document(args, rows, ok=ok, seconds=seconds), indent=2))
    return 0 if ok else 1


def copy_without_weights(checkpoint: Path, target: Path) -> None:
    """Copy config and tokenizer, and no weights: all that a rollout worker gets to start from."""
    shutil.copytree(checkpoint, target, ignore=shutil.ignore_patterns("*.safetensors"))


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Within, SIGTERM ends the process in order, as Ctrl-C does: children stopped, files removed."""

    def leave(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _work_folder(keep: Path | None) -> Iterator[Path]:
    """The run's own folder, absolute: `keep`, which stays, or a temporary one."""
    with ExitStack() as stack:
        if keep is None:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deltasync-demo-")))
            (work / "logs").mkdir()
        else:
            work = keep.absolute()
            _make_kept(work, keep)
        yield work


def _make_kept(work: Path, keep: Path) -> None:
    try:
        work.mkdir(parents=True, exist_ok=True)
        if any(work.iterdir()):
            raise ConfigError(f"--keep {keep} is not empty", hint="name a new or an empty folder")
        (work / "logs").mkdir()
    except OSError as error:
        raise ConfigError(
            f"--keep {keep} cannot be made: {error}", hint="name a folder that this user can write"
        ) from error


def _ready_model(name: str, work: Path) -> Path:
    """The model's checkpoint folder, made by a process of its own if it is not there yet."""
    folder = CACHE.resolve() / name
    if folder.exists():
        return folder
    with Child("model", child_command("model"), work / "logs" / "model.log") as maker:
        return Path(maker.call("prepare", timeout=_WAIT, name=name, cache=str(folder.parent))["folder"])


def _document(args: argparse.Namespace, rows: list[Row], *, ok: bool, seconds: float) -> dict[str, Any]:
    """The machine-readable result."""
    return {
        "identical": ok,
        "compared": _COMPARED[args.engine],
        "engine": args.engine,
        "model": args.model,
        "store": args.store,
        "versions": args.versions,
        "seconds": seconds,
        "rows": [row.to_json() for row in rows],
    }
