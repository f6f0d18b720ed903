"""The demo's rollout worker: a model built from its config alone, fed by a subscriber, generating completions."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import deltasync
from chunkstore.open import StoreConfig
from deltasync.demo.child import Handler, Reply, claim_stdout, work
from deltasync.demo.compare import compare_with_file
from deltasync.demo.errors import DemoFailed
from deltasync.demo.model import build_empty, load_tokenizer
from deltasync.demo.sampler import Sampler

_SYNC_TIMEOUT = 240.0
"""Seconds. Shorter than the wait of the process that asks, so that it hears what happened."""

_POLL_INTERVAL = 0.2
"""Seconds: versions come every few seconds here, and the store is next door."""


class RolloutWorker:
    """Generates from a stream's weights. `folder`: config and tokenizer only; the subscriber's state goes there."""

    def __init__(self, folder: Path, store: StoreConfig) -> None:
        self.model = build_empty(folder)
        self.engine = deltasync.TorchEngine(self.model)
        self._sampler = Sampler(self.model, load_tokenizer(folder))
        self._applied: dict[int, deltasync.AppliedVersion] = {}
        config = deltasync.SubscriberConfig(
            store=store, id="rollout", state_dir=folder / "state", poll_interval=_POLL_INTERVAL, http=None
        )
        self._subscriber = deltasync.Subscriber(config, self.engine, on_applied=self._note)
        self._subscriber.start()

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {"start": dict, "sync": self.sync, "generate": self.generate, "compare": self.compare}

    def sync(self, version: int) -> Reply:
        """Wait until the subscriber has applied `version`. Phase `prepare` covers all that is done to fetched bytes
        before the first write: decode, merge, gather old values, verify.
        """
        try:
            self._subscriber.wait_for(version, _SYNC_TIMEOUT)
        except TimeoutError as error:
            raise DemoFailed(
                str(error), hint="rollout.log says what the subscriber tried (--keep DIR)"
            ) from error
        seconds = self._applied[version].seconds
        return {
            "seconds": {
                "detect": seconds["detect"],
                "fetch": seconds["fetch"],
                "prepare": seconds["stage"] + seconds["prepare"],
                "scatter": seconds["scatter"],
                "pause": seconds["pause"],
            }
        }

    def generate(self, prompts: int, group: int, seed: int) -> Reply:
        """Completions with the weights that the engine serves."""
        with self.engine.serving(_SYNC_TIMEOUT) as version:
            samples = self._sampler.sample(prompts=prompts, group=group, seed=seed)
        return {"version": version, "samples": [sample.to_json() for sample in samples]}

    def compare(self, path: str) -> Reply:
        """Compare the live weights with the trainer's dump, bit by bit."""
        with self.engine.serving(_SYNC_TIMEOUT):
            return compare_with_file(Path(path), self.model.state_dict()).to_json()

    def close(self) -> None:
        self._subscriber.stop()

    def _note(self, applied: "deltasync.AppliedVersion") -> None:
        self._applied[applied.version] = applied


def main(worker_class: type[RolloutWorker] = RolloutWorker) -> None:
    """argv[1]: JSON with `folder` and `store` (a StoreConfig)."""
    replies = claim_stdout()
    options = json.loads(sys.argv[1])
    store = StoreConfig.model_validate(options["store"])
    work(lambda: worker_class(Path(options["folder"]), store), replies)


if __name__ == "__main__":
    main()
