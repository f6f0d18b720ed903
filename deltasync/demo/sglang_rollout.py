"""The demo's rollout worker with SGLang: a server that generates, a subscriber daemon for it, a server to compare with.

Both servers start with noise. The first one gets its weights from the subscriber. The second one runs without our code:
for each comparison SGLang's own loader reads the trainer's file into it.
"""

import json
import math
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families
from safetensors import safe_open

from chunkstore.errors import Action
from deltasync.demo.child import Child, Handler, Reply, child_command, claim_stdout, log_tail, work
from deltasync.demo.errors import DemoFailed
from deltasync.demo.model import build_empty, load_tokenizer
from deltasync.demo.rows import Comparison
from deltasync.demo.sampler import Judge
from deltasync.demo.sglang_server import SglangOptions, SglangServer, free_port
from deltasync.demo.task import MAX_NEW_TOKENS, make_problems
from subscriber.status import SubscriberStatus

_SYNC_TIMEOUT: Final = 240.0
"""Seconds. Shorter than the wait of the process that asks, so that it hears what happened."""
_REQUEST: Final = 200.0
"""Seconds that a batch, or a load, may take."""
_POLL_INTERVAL: Final = 0.2
"""Seconds: versions come every few seconds here, and the store is next door."""

_FLAGS: Final = ("--context-length", "128", "--max-running-requests", "36")
"""What the tiny model bears, and a whole batch at a time."""

_SECONDS: Final = "deltasync_subscriber_phase_seconds_sum"
_APPLIES: Final = "deltasync_subscriber_applies_total"


class SGLangRollout:
    """`folder`: config and tokenizer only; the subscriber's state goes there. `store`: as in subscriber.yaml."""

    def __init__(self, python: Path, folder: Path, store: Mapping[str, Any], logs: Path) -> None:
        self._model = folder.with_name("model")
        noise: Any = build_empty(folder)
        noise.save_pretrained(self._model)
        self._judge = Judge(load_tokenizer(folder))
        self._version = -1
        self._spent: dict[str, float] = {}
        with ExitStack() as stack:
            self._servers = [
                stack.enter_context(SglangServer(self._options(python, plugins), logs / f"{name}.log"))
                for name, plugins in (("sglang", "deltasync"), ("reference", "none"))
            ]
            with _unless_abandoned():
                for server in self._servers:
                    server.wait_ready()
            self._live, self._reference = self._servers
            for file in self._model.glob("*.safetensors"):
                file.unlink()
            port = free_port()
            self._status_url = f"http://127.0.0.1:{port}"
            config = folder.with_name("subscriber.yaml")
            settings = {
                "store": store,
                "id": "rollout",
                "state_dir": str(folder / "state"),
                "poll_interval": _POLL_INTERVAL,
                "http": {"port": port},
                "engine": {"type": "sglang", "servers": [{"url": self._live.url}]},
            }
            config.write_text(json.dumps(settings, indent=2))  # YAML as well
            command = (*child_command("daemon"), "subscriber", str(config))
            self._subscriber = stack.enter_context(Child("subscriber", command, logs / "subscriber.log"))
            self._stack = stack.pop_all()

    def _options(self, python: Path, plugins: str) -> SglangOptions:
        environment = {"SGLANG_PLUGINS": plugins}
        return SglangOptions(python=python, model=self._model, flags=_FLAGS, environment=environment)

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {"start": dict, "sync": self.sync, "generate": self.generate, "compare": self.compare}

    def sync(self, version: int) -> Reply:
        """Wait until the subscriber reports that the server is at `version`, and say what that took."""
        deadline = time.monotonic() + _SYNC_TIMEOUT
        while (status := self._status()) is None or status.applied_version != version:
            error = None if status is None else status.last_error
            hopeless = error is not None and error.action == Action.FATAL
            if hopeless or not self._subscriber.running or time.monotonic() > deadline:
                raise DemoFailed(
                    f"the subscriber has not applied version {version}: "
                    f"{f'{error.kind}: {error.message}' if error else 'it does not say why'}"
                    f"{log_tail(self._subscriber.log)}",
                    hint="subscriber.log and sglang.log say more (--keep DIR)",
                )
            time.sleep(_POLL_INTERVAL)
        self._version = version
        before, spent = self._spent, self._metrics()
        while spent[_APPLIES] == before.get(_APPLIES, 0.0) and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL)  # what it took is recorded a moment later
            spent = self._metrics()
        took = {name: total - before.get(name, 0.0) for name, total in spent.items()}
        self._spent = spent
        took["prepare"] += took["stage"]
        return {"seconds": {name: took[name] for name in ("detect", "fetch", "prepare", "scatter", "pause")}}

    def _status(self) -> SubscriberStatus | None:
        try:
            answer = httpx.get(f"{self._status_url}/status", timeout=10.0, trust_env=False)
        except httpx.TransportError:  # it has just been started
            return None
        return SubscriberStatus.model_validate_json(answer.content)

    def _metrics(self) -> dict[str, float]:
        """Of all versions so far: seconds that the subscriber has spent in each phase, and how often it has applied."""
        answer = httpx.get(f"{self._status_url}/metrics", timeout=10.0, trust_env=False)
        return {
            sample.labels.get("phase", sample.name): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
            if sample.name in (_SECONDS, _APPLIES)
        }

    def generate(self, prompts: int, group: int, seed: int) -> Reply:
        """Completions at temperature 1, all from the version that was synced last."""
        asked = [
            (number, problem, self._judge.encode(problem))
            for number, problem in enumerate(make_problems(prompts, seed))
            for _ in range(group)
        ]
        sampling = {
            "temperature": 1.0,
            "max_new_tokens": MAX_NEW_TOKENS,
            "stop_token_ids": list(self._judge.ends),
        }
        answers = _post(
            self._live, "/generate", input_ids=[ids for *_, ids in asked], sampling_params=sampling
        )
        versions = {answer["meta_info"]["weight_version"] for answer in answers}
        if versions != {str(self._version)}:
            raise DemoFailed(f"completions come from versions {versions}, not from {self._version} alone")
        samples = [
            self._judge.judge(*question, _completion(answer))
            for question, answer in zip(asked, answers, strict=True)
        ]
        return {"version": self._version, "samples": [sample.to_json() for sample in samples]}

    def compare(self, path: str) -> Reply:
        """Compare what both servers hold, by SGLang's checksum of every parameter of every rank."""
        weights = self._model / "model.safetensors"
        weights.symlink_to(path)
        try:
            _post(self._reference, "/update_weights_from_disk", model_path=str(self._model))
        finally:
            weights.unlink()
        with safe_open(path, "np") as file:
            elements = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        expected, live = _checksums(self._reference), _checksums(self._live)
        return compare_checksums(expected, live, elements).to_json() | {"model_tensors": len(expected)}

    def close(self) -> None:
        for server in self._servers:  # first what takes no time and leaves most behind
            server.stop()
        self._stack.close()


def _completion(answer: Mapping[str, Any]) -> list[int]:
    """The tokens of one answer, with the one that ended it, which SGLang may leave out."""
    ids, reason = list(answer["output_ids"]), answer["meta_info"]["finish_reason"]
    ended = reason["type"] == "stop" and ids[-1:] != [reason["matched"]]
    return [*ids, reason["matched"]] if ended else ids


def compare_checksums(expected: Mapping[str, str], live: Mapping[str, str], elements: int) -> Comparison:
    """Compare names and checksums. `elements`: that `expected` stands for."""
    problems = [f"{name} is missing in the rollout" for name in expected.keys() - live.keys()]
    problems += [f"{name} is only in the rollout" for name in live.keys() - expected.keys()]
    both = expected.keys() & live.keys()
    problems += [f"{name} has another checksum" for name in both if expected[name] != live[name]]
    return Comparison(len(both), elements, tuple(sorted(problems)))


def _checksums(server: SglangServer) -> dict[str, str]:
    ranks = _post(server, "/weights_checker", action="checksum")["ranks"]
    return {
        f"rank {number}: {name}": value
        for number, rank in enumerate(ranks)
        for name, value in rank["checksums"].items()
    }


def _post(server: SglangServer, path: str, **body: Any) -> Any:
    with server.client(_REQUEST) as client:
        answer = client.post(path, json=body)
    if answer.is_error:
        raise DemoFailed(f"SGLang's {path} failed: HTTP {answer.status_code}: {answer.text[:500]}")
    return answer.json()


@contextmanager
def _unless_abandoned() -> Iterator[None]:
    """Leave the block with SystemExit as soon as nobody holds the other end of stdin any more."""
    over = threading.Event()

    def watch() -> None:
        poll = select.poll()
        poll.register(0, 0)
        while not over.is_set():
            if poll.poll(200):
                signal.raise_signal(signal.SIGTERM)
                return

    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        signal.signal(signal.SIGTERM, before)


def main(worker_class: type[SGLangRollout] = SGLangRollout) -> None:
    """argv: the interpreter of SGLang's environment; JSON with `folder`, `store` (of a subscriber.yaml) and `logs`."""
    replies = claim_stdout()
    options = json.loads(sys.argv[2])
    work(
        lambda: worker_class(
            Path(sys.argv[1]), Path(options["folder"]), options["store"], Path(options["logs"])
        ),
        replies,
    )


if __name__ == "__main__":
    main()
