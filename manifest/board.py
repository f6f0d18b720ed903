"""Where the writers of one stream meet: calls and parts in its store."""

import logging
import re
from collections.abc import Iterator

from chunkstore.store import Store
from manifest.errors import ForeignStream, ManifestInvalid, Untrusted
from manifest.keys import attempt_key, attempt_prefix, part_key, part_prefix
from manifest.log import StreamInfo
from manifest.parts import MAX_CALL_BYTES, MAX_PART_BYTES, MAX_WRITERS, Call, Part
from manifest.settle import Patience, settle
from manifest.signing import Signer

log = logging.getLogger("deltasync.publisher")

_ID = re.compile(r"[0-9a-f]{32}")
_PART = re.compile(r"(0|[1-9][0-9]{0,3})\.part")


class Board:
    """One group's calls and parts; those of other groups (another layout) are left alone. For one thread at a time.

    `signer`: all writers of a signed stream have the same; it signs what is stored, and nothing else is believed.
    """

    def __init__(
        self,
        store: Store,
        stream: StreamInfo,
        layout: bytes,
        patience: Patience,
        signer: Signer | None = None,
    ) -> None:
        self.store = store
        self.stream = stream
        self.layout = layout
        self._patience = patience
        self._signer = signer
        self._trust = None if signer is None else signer.trust
        self._calls: dict[str, Call] = {}  # by key, of the version that was last asked for

    def call(self, call: Call) -> None:
        """Store `call`, durable on return. Raises as `settle` does."""
        key = attempt_key(call.version, call.attempt)
        call = call if self._signer is None else call.signed(self._signer)
        held = settle(self.store, key, call.data, limit=MAX_CALL_BYTES, patience=self._patience)
        if held != call.data:
            raise ManifestInvalid(f"{self.store.url}/{key} holds another's bytes, though its name is random")

    def calls(self, version: int, base: bytes | None) -> list[Call]:
        """The group's calls for `version` on top of the manifest with hash `base`, oldest first."""
        calls = [c for c in self._read_calls(version) if c.layout == self.layout and c.base == base]
        return sorted(calls, key=lambda call: call.number)

    def find_call(self, version: int, attempt: bytes) -> Call | None:
        """That one call, if it is the group's."""
        key = attempt_key(version, attempt)
        if self.store.head(key) is None:
            return None
        call = self._parse_call(key, version)
        return call if call.layout == self.layout else None

    def answer(self, part: Part) -> bool:
        """Store one's `part`, durable on return; False if another process has answered in this writer's place."""
        key = part_key(part.version, part.attempt, part.writer)
        part = part if self._signer is None else part.signed(self._signer)
        return settle(self.store, key, part.data, limit=MAX_PART_BYTES, patience=self._patience) == part.data

    def answered(self, version: int, attempt: bytes) -> set[int]:
        """Writers whose part of this attempt is there."""
        prefix = part_prefix(version, attempt)
        names = (_PART.fullmatch(info.key.removeprefix(prefix)) for info in self.store.list_after(prefix))
        return {writer for name in names if name and (writer := int(name[1])) < MAX_WRITERS}

    def part(self, version: int, attempt: bytes, writer: int) -> Part:
        """One writer's part. Raises ObjectMissing, ManifestInvalid, FormatUnsupported, ForeignStream, Untrusted."""
        key = part_key(version, attempt, writer)
        name = f"{self.store.url}/{key}"
        part = Part.from_bytes(self.store.get(key, limit=MAX_PART_BYTES), name=name)
        self._check_place(name, part, (part.version, part.attempt, part.writer) == (version, attempt, writer))
        return part

    def _read_calls(self, version: int) -> Iterator[Call]:
        prefix = attempt_prefix(version)
        known, self._calls = self._calls, {}
        for info in self.store.list_after(prefix):
            name = info.key.removeprefix(prefix).removesuffix(".msgpack")
            if _ID.fullmatch(name) and info.key == attempt_key(version, bytes.fromhex(name)):
                try:
                    call = known.get(info.key) or self._parse_call(info.key, version)
                except Untrusted as error:  # a stranger's word counts for nothing, and stops nobody
                    log.warning("%s", error)
                    continue
                self._calls[info.key] = call
                yield call

    def _parse_call(self, key: str, version: int) -> Call:
        name = f"{self.store.url}/{key}"
        call = Call.from_bytes(self.store.get(key, limit=MAX_CALL_BYTES), name=name)
        self._check_place(name, call, call.version == version and attempt_key(version, call.attempt) == key)
        return call

    def _check_place(self, name: str, record: Call | Part, at_home: bool) -> None:
        if self._trust is not None:
            self._trust.check(record.signature, record.domain, record.signed_bytes, name)
        if record.stream != self.stream.id:
            raise ForeignStream(
                f"{name} belongs to stream {record.stream.hex()}, not {self.stream.id.hex()}",
                hint="two streams share one prefix, or objects were copied: give each stream its own prefix",
            )
        if not at_home:
            raise ManifestInvalid(
                f"{name} holds the record of another key", hint="objects were moved or copied by hand"
            )
