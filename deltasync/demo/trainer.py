"""The demo's trainer process: a learner with fp32 master weights, which it shares with the publisher process."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import deltasync
from chunkstore.config import load_config
from chunkstore.open import open_store
from deltasync.demo.child import Handler, Reply, claim_stdout, work
from deltasync.demo.compare import dump_bf16
from deltasync.demo.errors import DemoFailed
from deltasync.demo.learner import Learner
from deltasync.demo.model import load_policy, load_tokenizer
from deltasync.demo.sampler import Sample
from manifest.log import VersionLog, open_stream
from manifest.schema import Manifest

_COMMIT_TIMEOUT: Final = 240.0
"""Seconds. Shorter than the wait of the process that asks, so that it hears what happened."""


class Trainer:
    """Trains the config's base checkpoint and has it published."""

    def __init__(self, config: deltasync.PublisherConfig) -> None:
        assert config.base_checkpoint is not None
        self._model = load_policy(config.base_checkpoint)
        self._learner = Learner(self._model, load_tokenizer(config.base_checkpoint).pad_token_id)
        self._store = config.store
        self._publisher = deltasync.Publisher.attach(self._learner.optimizer, self._model, config)

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {"anchor": self.anchor, "step": self.step, "publish": self.publish, "dump": self.dump}

    def step(self, samples: list[dict[str, Any]]) -> Reply:
        """One policy-gradient step."""
        result = self._learner.step([Sample(**sample) for sample in samples])
        return {"loss": result.loss, "reward": result.reward}

    def anchor(self) -> Reply:
        """What version 0 took, which was committed at attach."""
        store = open_store(self._store)
        manifest = VersionLog(store, open_stream(store)).read_required(self._publisher.version)
        return self._published(manifest, manifest.stats.seconds)

    def publish(self, train_step: int) -> Reply:
        """Publish, wait for the commit, and say what it took. Raises DemoFailed if there was nothing to publish."""
        commit = self._publisher.publish(train_step=train_step).result(_COMMIT_TIMEOUT)
        if commit is None:
            raise DemoFailed(
                f"step {train_step} changed no weight", hint="this is a bug: every step has a gradient"
            )
        return self._published(commit.manifest, commit.seconds)

    def _published(self, manifest: Manifest, seconds: Mapping[str, float]) -> Reply:
        """Phase `capture`, by the publisher process's clock, is what holds the trainer: finding changes in the step's
        hook, sealing them at publish.
        """
        held = {"capture": seconds["capture"] + seconds["seal"]}
        return {
            "version": manifest.version,
            "kind": manifest.kind,
            "elements": manifest.stats.elements,
            "changed": manifest.stats.changed,
            "chunk_bytes": manifest.nbytes,
            "dense_bytes": sum(2 * p.numel() for p in self._model.parameters()),
            "seconds": held
            | {phase: seconds[phase] for phase in ("encode", "upload", "commit") if phase in seconds},
        }

    def dump(self, path: str) -> Reply:
        """Write the weights as plain bf16, for the comparison; names the model's tensors, tied ones each."""
        weights = self._model.state_dict()
        dump_bf16(weights, Path(path))
        return {"tensors": len(weights)}

    def close(self) -> None:
        self._publisher.close()


def main() -> None:
    """argv[1]: publisher.yaml."""
    replies = claim_stdout()
    work(lambda: Trainer(load_config(Path(sys.argv[1]), deltasync.PublisherConfig)), replies)


if __name__ == "__main__":
    main()
