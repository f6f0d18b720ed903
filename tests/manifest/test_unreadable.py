"""What is at a manifest's key and is none: readers name it, and go on with other versions."""

import pytest

from manifest.errors import ChainError
from manifest.history import find_plan
from manifest.keys import alternate_key, manifest_key
from manifest.plan import Applied
from tests.manifest.test_plan import log_of, versions
from tests.support.manifests import make_chain, make_manifest


@pytest.mark.parametrize("larger", [False, True])
def test_what_is_no_manifest_only_ends_the_paths_through_it(
    larger: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is larger than any manifest may be: it must not stop all readers."""
    monkeypatch.setattr("manifest.log.MAX_MANIFEST_BYTES", 5000)
    chain = make_chain(3)
    chain.append(make_manifest(3, chain[2], nbytes=1))
    chain.append(make_manifest(4, chain[3], base=chain[3]))
    log, junk = log_of([m for m in chain if m.version != 2]), bytes(5001 if larger else 5)
    for key in (manifest_key(2), alternate_key(4)):
        log.store.put(key, junk)
    for applied in (None, Applied(1, chain[1].root)):
        assert versions(find_plan(log, applied, 4)) == [3, 4]
    with pytest.raises(ChainError, match=manifest_key(2)):
        find_plan(log, Applied(1, chain[1].root), 3, {chain[3].hash})


def test_a_manifest_that_cannot_be_read_is_named() -> None:
    chain = make_chain(4)
    log = log_of(chain)
    log.store.put(manifest_key(2), b"junk")
    with pytest.raises(ChainError, match=f"{manifest_key(2)} is not msgpack"):
        find_plan(log, Applied(1, chain[1].root), 3)
