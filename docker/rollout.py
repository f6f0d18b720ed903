"""The compose demo's rollout worker: an empty model that a subscriber fills, and a batch of completions per version.

It needs the model's configuration and tokenizer, and reads no weights but those of the stream.
"""

import argparse
import json
import logging
from pathlib import Path

import deltasync
from deltasync.demo import MODEL_NAMES
from deltasync.demo.model import build_empty, load_tokenizer
from deltasync.demo.sampler import Sample, Sampler

log = logging.getLogger("rollout")


def write_batch(path: Path, samples: list[Sample]) -> None:
    """Make the batch appear whole."""
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps([sample.to_json() for sample in samples]))
    scratch.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="subscriber.yaml")
    parser.add_argument("--model", choices=MODEL_NAMES, default="smollm2")
    parser.add_argument("--models", type=Path, default=Path("/models"), help="folder with the checkpoint")
    parser.add_argument("--samples", type=Path, default=Path("/samples"), help="folder for the batches")
    parser.add_argument("--versions", type=int, default=6)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    model = build_empty(args.models / args.model)
    sampler = Sampler(model, load_tokenizer(args.models / args.model))
    engine = deltasync.TorchEngine(model)
    subscriber = deltasync.Subscriber(args.config, engine)
    subscriber.start()
    try:
        version = -1
        while version < args.versions:
            subscriber.wait_for(version + 1, timeout=3600)
            with engine.serving() as version:
                samples = sampler.sample(prompts=6, group=6, seed=version)
            write_batch(args.samples / f"{version}.json", samples)
            log.info("version %d: %d completions", version, len(samples))
    finally:
        subscriber.stop()


if __name__ == "__main__":
    main()
