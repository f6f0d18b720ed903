"""Commits whose replies are lost, invented, cut and late: nobody is told the opposite of the truth.

Two processes race for every version through a proxy that spoils 40 % of all requests; its record is the oracle.
`DELTASYNC_SOAK=N` makes N times as many versions.
"""

import hashlib
import itertools
import os
import uuid

from chunkstore.open import StoreConfig, open_store
from deltasync.s3server import BUCKET
from manifest.keys import VERSIONS, manifest_key
from manifest.log import StreamInfo, VersionLog
from manifest.schema import MAX_MANIFEST_BYTES
from tests.manifest.rivals import Told, race
from tests.support.fault_proxy import Fault, FaultProxy, seeded
from tests.support.manifests import STREAM_ID
from tests.support.verdict import History, histories, summary

VERSIONS_RACED = 220 * int(os.environ.get("DELTASYNC_SOAK", "1"))


def test_two_racing_processes_and_40_percent_faults(s3_endpoint: str) -> None:
    url = f"s3://{BUCKET}/ambiguity/{uuid.uuid4().hex}"
    with FaultProxy(s3_endpoint, seeded(1, 0.4)) as proxy:
        spoiled = StoreConfig(
            url=url, endpoint_url=proxy.url, path_style=True, retry_deadline=0.05, read_timeout=30
        )
        told = race(spoiled, VERSIONS_RACED)
        record = proxy.record()
    store = open_store(StoreConfig(url=url, endpoint_url=s3_endpoint, path_style=True))
    log = VersionLog(store, StreamInfo(STREAM_ID))
    chain = list(log.tail(-1))
    assert [manifest.version for manifest in chain] == list(range(VERSIONS_RACED))
    assert all(child.parent_hash == parent.hash for parent, child in itertools.pairwise(chain))
    by_key = histories(record, VERSIONS)
    assert by_key.keys() == {manifest_key(version) for version in range(VERSIONS_RACED)}
    for version in range(VERSIONS_RACED):
        held = store.get(manifest_key(version), limit=MAX_MANIFEST_BYTES)
        history = by_key[manifest_key(version)]
        assert history.created == [hashlib.sha256(held).hexdigest()], "one history, by the server's own word"
        assert [one.won[version] for one in told].count(True) == 1
        for one in told:
            assert one.winners[version] == held
            check_told(one, version, history.of(one.writer))
    print(summary(record), "unknown:", [one.unknown.total() for one in told])
    assert {one.fault for one in record} == set(Fault), "every fault has been met"
    assert told[0].unknown, "and left the impatient one in doubt"


def check_told(told: Told, version: int, mine: History) -> None:
    """It was told what the record says that it could know, and in doubt as long as it could not."""
    *before, last = mine.known
    assert before == [None] * len(before), f"{mine.key}: {told.writer} ignored what it was told"
    if last is None:
        assert mine.perhaps, f"{mine.key}: {told.writer} guessed"
        last = mine.exchanges[-1].sent
    assert len(mine.offered) == 1, f"{mine.key}: {told.writer} offered different bytes"
    assert told.won[version] == (mine.offered == {last})
    assert last == hashlib.sha256(told.winners[version]).hexdigest()
