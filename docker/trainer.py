"""The compose demo's trainer: one policy-gradient step per batch of the rollout worker, one version per step.

`deltasync publisher run` does the work beside it, on memory that both share. Batches arrive as files `<version>.json`,
sampled from that version, in a folder that trainer and rollout worker mount.
"""

import argparse
import json
import logging
import time
from pathlib import Path

import deltasync
from deltasync.demo import MODEL_NAMES
from deltasync.demo.learner import Learner
from deltasync.demo.model import load_policy, load_tokenizer, prepare_model
from deltasync.demo.sampler import Sample

log = logging.getLogger("trainer")


def wait_for_batch(path: Path) -> list[Sample]:
    """The batch in `path`, which appears whole: the rollout worker renames it into place."""
    while not path.exists():
        time.sleep(0.5)
    return [Sample(**sample) for sample in json.loads(path.read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="publisher.yaml")
    parser.add_argument("--model", choices=MODEL_NAMES, default="smollm2")
    parser.add_argument("--models", type=Path, default=Path("/models"), help="folder for the checkpoint")
    parser.add_argument("--samples", type=Path, default=Path("/samples"), help="folder of the batches")
    parser.add_argument("--versions", type=int, default=6)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    folder = prepare_model(args.model, args.models)
    model = load_policy(folder)
    learner = Learner(model, load_tokenizer(folder).pad_token_id)
    with deltasync.Publisher.attach(learner.optimizer, model, config=args.config) as publisher:
        version = publisher.version
        while version < args.versions:
            result = learner.step(wait_for_batch(args.samples / f"{version}.json"))
            commit = publisher.publish(train_step=version + 1).result()
            assert commit is not None, "every step has a gradient"
            version = commit.version
            log.info("version %d: loss %.3f reward %.2f", version, result.loss, result.reward)


if __name__ == "__main__":
    main()
