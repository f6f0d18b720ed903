"""Steps of `smoke`: what they learn of the stream and of live weights."""

from typing import Final

from chunkstore.digest import U64
from chunkstore.errors import ObjectMissing
from chunkstore.open import StoreConfig, open_store
from chunkstore.words import counted, human_bytes
from manifest.catalog import Catalog
from manifest.errors import Untrusted
from manifest.history import find_plan
from manifest.log import StreamInfo, VersionLog, open_stream, read_catalog
from manifest.schema import Manifest
from manifest.signing import Trust
from subscriber.engine import Engine
from subscriber.errors import EngineChanged
from subscriber.threads import in_thread

_SEARCHED: Final = 100  # newest versions that live weights are compared with
_TRIES: Final = 5  # of reading weights that the daemon happens to write


class Stream:
    """What is learned of the stream: each method is a step and may count on those before it."""

    catalog: Catalog

    def __init__(self, config: StoreConfig, trust: Trust | None, *, references: bool) -> None:
        self._config = config
        self._references = references
        self._trust = trust
        self._found: StreamInfo | ObjectMissing | Untrusted | None = None

    async def reach(self) -> str:
        def reach() -> str:
            self._store = open_store(self._config, make=False)
            try:
                self._found = open_stream(self._store, self._trust)
            except (ObjectMissing, Untrusted) as error:
                self._found = error
            return f"{self._store.url} answers"

        return await in_thread(lambda _: reach())

    async def open(self) -> str:
        if not isinstance(self._found, StreamInfo):
            assert self._found is not None, "reached"
            raise self._found
        self._log = VersionLog(self._store, self._found, trust=self._trust)
        return f"stream {self._found.id.hex()}"

    async def plan(self) -> str:
        def plan() -> str:
            newest = self._newest()
            path = find_plan(self._log, None, newest.version, references=self._references)
            self.catalog = read_catalog(self._store, newest.catalog)
            return (
                f"the newest is {newest.version}; a new engine starts from the anchor of {path.steps[0].version}, "
                f"{human_bytes(path.nbytes)} in {counted(len(path.steps), 'step')}; "
                f"{counted(len(self.catalog.tensors), 'tensor')}"
            )

        return await in_thread(lambda _: plan())

    async def name(self, live: U64) -> str:
        """The version whose digests these are."""

        def name() -> str:
            newest = self._newest()
            bits = live.astype("<u8").tobytes()
            for version in range(newest.version, max(-1, newest.version - _SEARCHED), -1):
                manifest = newest if version == newest.version else self._log.read(version)
                if (
                    manifest is not None
                    and manifest.catalog == self.catalog.hash
                    and manifest.digests == bits
                ):
                    return f"version {version} of the stream; the newest is {newest.version}"
            return "no version of the stream: the subscriber will bring it there from an anchor"

        return await in_thread(lambda _: name())

    def _newest(self) -> Manifest:
        newest = self._log.newest()
        if newest is None:
            raise ObjectMissing(
                f"{self._store.url} has no version yet", hint="wait for the publisher's first anchor"
            )
        return newest


async def name_weights(stream: Stream, engine: Engine) -> str:
    """Digest what is live, and say which version it is."""
    for left in reversed(range(_TRIES)):
        try:
            return await stream.name((await engine.state(stream.catalog)).digests)
        except EngineChanged:  # the daemon has just applied a version
            if not left:
                raise
    raise AssertionError("the last try raises")
