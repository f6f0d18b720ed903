"""Trainers that die, come back and fence each other, two at a time, where 40 % of all requests go wrong.

Nobody is told the opposite of the truth, no version has two histories, and the subscriber ends bit-identical. The
proxy's record is the oracle. `DELTASYNC_SOAK=N` gives the trainers N times as many lives.
"""

import hashlib
import json
import os
import random
import threading
import uuid
from pathlib import Path

import pytest
import torch

from chunkstore.open import StoreConfig, open_store
from deltasync.s3server import BUCKET
from manifest.keys import VERSIONS, manifest_key
from manifest.log import VersionLog, open_stream
from manifest.schema import MAX_MANIFEST_BYTES
from manifest.verify import verify_stream
from subscriber.config import SubscriberConfig
from subscriber.daemon import Subscriber
from subscriber.torch_engine import TorchEngine
from tests.e2e.contenders import Said, contend, network, weights_of
from tests.publisher.zoo import published
from tests.subscriber.parts import running
from tests.support.fault_proxy import CLIENT, FaultProxy, seeded
from tests.support.processes import PROCESSES
from tests.support.verdict import History, histories, summary

LIVES = 3 * int(os.environ.get("DELTASYNC_SOAK", "1"))
WAIT = 120.0


class Arena:
    """Two places for trainers, whose successive lives meet in one stream."""

    def __init__(self, proxy: FaultProxy, prefix: str, folder: Path) -> None:
        self.proxy, self.prefix, self.folder = proxy, prefix, folder
        self.killed = 0

    def live(self, name: str, versions: int, killed_after: int | None = None) -> None:
        """One life, killed when so many of its requests have come in."""
        seed = random.Random(name).randrange(1 << 30)
        arguments = (BUCKET, self.prefix, self.proxy.url, name, seed, versions, self.folder / name)
        life = PROCESSES.Process(target=contend, args=arguments, daemon=True)
        life.start()
        while life.is_alive():
            life.join(0.01)
            if killed_after is not None and self.proxy.count(name) >= killed_after:
                life.kill()
                life.join()
                self.killed += 1
                return
        assert life.exitcode == 0, name

    def contend(self, place: str) -> None:
        for number in range(LIVES):
            name = f"{place}{number}"
            # One place's die while they start, which nobody does with less; the other's later, if they get there.
            within = (3, 8) if place == "a" else (10, 60)
            killed_after = random.Random(name).randrange(*within) if number % 2 else None
            self.live(name, versions=4, killed_after=killed_after)

    def said(self) -> dict[str, list[Said]]:
        return {
            path.name: [Said(**json.loads(line)) for line in path.read_text().splitlines()]
            for path in self.folder.iterdir()
        }


def test_publishers_that_fail_over_again_and_again(
    s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CLIENT, "subscriber")
    prefix = f"contended/{uuid.uuid4().hex}"
    config = StoreConfig(url=f"s3://{BUCKET}/{prefix}", endpoint_url=s3_endpoint, path_style=True)
    (tmp_path / "said").mkdir()
    with FaultProxy(s3_endpoint, seeded(2, 0.4)) as proxy:
        arena = Arena(proxy, prefix, tmp_path / "said")
        module = network(0).to(torch.bfloat16)
        follows = SubscriberConfig(
            store=config.model_copy(update={"endpoint_url": proxy.url, "retry_deadline": 5.0}),
            id="worker",
            poll_interval=0.1,
            state_dir=tmp_path / "state",
            http=None,
        )
        with running(Subscriber(follows, TorchEngine(module, boot_id="boot"))) as subscriber:
            places = [threading.Thread(target=arena.contend, args=(place,)) for place in "ab"]
            for place in places:
                place.start()
            for place in places:
                place.join()
            said: list[Said] = []
            for number in range(100):  # one that is alone, until it gets through its start
                arena.live(name := f"last{number}", versions=2)
                said = arena.said()[name]
                if said[0].what == "won":
                    break
            subscriber.wait_for(said[-1].version, WAIT)
        record = proxy.record()
    assert weights_of(module) == said[-1].weights, "the subscriber ends bit-identical to the last trainer"
    store = open_store(config)
    log = VersionLog(store, open_stream(store))
    assert not verify_stream(store).problems
    newest = log.newest()
    assert newest is not None
    assert newest.version == said[-1].version
    held = {
        manifest_key(version): hashlib.sha256(
            store.get(manifest_key(version), limit=MAX_MANIFEST_BYTES)
        ).hexdigest()
        for version in log.versions()
    }
    offered = {key: one for key, one in histories(record, VERSIONS).items() if one.offered}
    assert {key: one.created for key, one in offered.items()} == {key: [truth] for key, truth in held.items()}
    told = arena.said()
    for name, lines in told.items():
        for one in lines:
            if one.version >= 0:
                key = manifest_key(one.version)
                check(one, offered[key].of(name, until=one.at), held[key])
            if one.weights:
                state = published(store, one.version)
                bits = b"".join(state[name].tobytes() for name in sorted(state))
                assert hashlib.sha256(bits).hexdigest() == one.weights
    kinds = [one.what for lines in told.values() for one in lines]
    counts = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    print(
        f"{len(told)} lives, {arena.killed} killed, {newest.version + 1} versions, epoch {newest.epoch}, told {counts}"
    )
    print(summary(record))
    assert {one.method for one in record} <= {"GET", "HEAD", "PUT", "DELETE"}, (
        "multipart uploads begin with POST"
    )
    assert arena.killed
    assert counts["won"] >= LIVES
    assert newest.epoch > 2


def check(said: Said, mine: History, truth: str) -> None:
    """`mine`: all that the trainer exchanged by then, from its first offer of the version on."""
    learned = {one for one in mine.known if one is not None}
    if said.what == "unknown":
        assert not learned, f"{mine.key}: in doubt, and yet it was told"
        return
    assert learned <= {truth}
    assert learned or mine.perhaps, f"{mine.key}: guessed"
    assert (truth in mine.offered) == (said.what == "won")
    assert said.manifest in ("", truth)
