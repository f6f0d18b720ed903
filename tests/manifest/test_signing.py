"""Signatures: what is signed cannot be changed, moved or passed off as another's; what is refused is named."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkstore.config import parse_config
from chunkstore.errors import ConfigError, FormatUnsupported
from chunkstore.memory import MemoryStore
from manifest.errors import LocalDiskError, ManifestInvalid, Untrusted
from manifest.key_files import SigningConfig, TrustConfig, generate_key, read_public_key
from manifest.keys import alternate_key, manifest_key
from manifest.log import StreamInfo, VersionLog, create_or_open_stream, open_stream
from manifest.schema import Manifest
from manifest.signing import MANIFEST_DOMAIN, PRIVATE, PublicKey, Signer, Trust, signer_of
from tests.support.keys import make_signer
from tests.support.manifests import STREAM_ID, fixed_bytes, make_alternate, make_chain, make_manifest

SIGNER, OTHER = make_signer("a"), make_signer("b")
INFO = StreamInfo(STREAM_ID)
MANIFEST = make_manifest(0)
SIGNED = SIGNER.sign(MANIFEST)


def check(manifest: Manifest, trust: Trust = SIGNER.trust, stream: bytes = STREAM_ID) -> None:
    trust.check_manifest(manifest, stream, "the manifest")


def test_what_is_signed_is_believed_and_only_the_signature_was_added() -> None:
    check(SIGNED)
    check(Manifest.from_bytes(SIGNED.data, name="x"))
    assert SIGNED.model_copy(update={"signature": None}).data == MANIFEST.data
    assert SIGNED.signed_bytes == MANIFEST.signed_bytes == MANIFEST.data[:-1]
    assert SIGNER.sign(SIGNED).data == SIGNED.data
    assert signer_of(SIGNED.signature) == str(SIGNER.public)


def test_unsigned_is_refused_and_the_message_says_what_to_do() -> None:
    with pytest.raises(Untrusted, match="the manifest is not signed; trusted: ed25519:") as refused:
        check(MANIFEST)
    assert "signing" in refused.value.hint
    assert "docs/security.md" in refused.value.hint


def test_another_key_is_refused_and_named() -> None:
    with pytest.raises(Untrusted) as refused:
        check(OTHER.sign(MANIFEST))
    assert f"claims to be signed by {OTHER.public}, which is not trusted" in refused.value.message
    assert str(SIGNER.public) in refused.value.message
    check(OTHER.sign(MANIFEST), Trust([SIGNER.public, OTHER.public]))


def test_a_stranger_cannot_claim_to_be_trusted() -> None:
    forged = OTHER.signature(MANIFEST_DOMAIN, MANIFEST.signed_bytes)
    lie = MANIFEST.model_copy(update={"signature": SIGNER.public.raw + forged[32:]})
    with pytest.raises(Untrusted, match="changed afterwards"):
        check(lie)


@pytest.mark.parametrize("signature", [b"", b"x", SIGNED.signature[:-1], SIGNED.signature + b"\0"])  # type: ignore[index, operator]
def test_a_signature_of_another_length_is_refused(signature: bytes) -> None:
    with pytest.raises(Untrusted, match=rf"signature of {len(signature)} bytes"):
        check(MANIFEST.model_copy(update={"signature": signature}))


@given(st.integers(0, len(SIGNED.data) - 1), st.integers(1, 255))
def test_no_byte_of_a_signed_manifest_can_be_changed(position: int, flip: int) -> None:
    data = bytearray(SIGNED.data)
    data[position] ^= flip
    store = MemoryStore()
    store.put(manifest_key(0), bytes(data))
    log = VersionLog(store, INFO, trust=SIGNER.trust)
    with pytest.raises((ManifestInvalid, FormatUnsupported)):
        log.read(0)


@pytest.mark.parametrize(
    "changes",
    [
        {"stream": fixed_bytes("other", length=16)},
        {"version": 1, "parent_hash": fixed_bytes("parent"), "chunks": []},
        {"root": fixed_bytes("root")},
        {"catalog": fixed_bytes("other catalog")},
        {"digests": bytes(8)},
        {"train_step": 7},
        {"chunks": [c.model_copy(update={"hash": fixed_bytes("c")}) for c in MANIFEST.chunks]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_field_is_covered(changes: dict[str, object]) -> None:
    with pytest.raises(Untrusted, match="changed afterwards"):
        check(SIGNED.model_copy(update=changes))


def test_a_signature_for_something_else_is_no_signature_of_a_manifest() -> None:
    other = SIGNER.signature(b"deltasync part v1\0", MANIFEST.signed_bytes)
    with pytest.raises(Untrusted, match="changed afterwards"):
        check(MANIFEST.model_copy(update={"signature": other}))


# The log


def test_a_replay_from_another_stream_is_refused_as_untrusted() -> None:
    """Not as a foreign stream, which ends every plan: what is trusted further on must stay in reach."""
    store = MemoryStore()
    store.put(manifest_key(0), SIGNED.data)
    here = fixed_bytes("here", length=16)
    with pytest.raises(Untrusted, match=f"signed for stream {STREAM_ID.hex()}, not for {here.hex()}"):
        VersionLog(store, StreamInfo(here), trust=SIGNER.trust).read(0)


def test_a_replay_as_another_version_is_refused() -> None:
    store = MemoryStore()
    store.put(manifest_key(4), SIGNED.data)
    log = VersionLog(store, INFO, trust=SIGNER.trust)
    with pytest.raises(ManifestInvalid, match="holds the manifest of version 0"):
        log.read(4)


def test_an_alternate_needs_a_signature_too() -> None:
    store = MemoryStore()
    chain = [SIGNER.sign(manifest) for manifest in make_chain(1)]
    log = VersionLog(store, INFO, trust=SIGNER.trust, signer=SIGNER)
    assert log.commit(chain[0]).won
    store.put(alternate_key(0), make_alternate(chain[0]).data)
    with pytest.raises(Untrusted, match="alternates"):
        log.read_alternate(0)
    store.delete(alternate_key(0))
    assert log.put_alternate(log.signed(make_alternate(chain[0]))).won
    assert log.read_alternate(0) is not None


def test_an_alternate_of_what_is_not_trusted_is_not_made() -> None:
    """Whoever compacts must not lend its signature to what it would not believe."""
    store = MemoryStore()
    (unsigned,) = make_chain(1)
    VersionLog(store, INFO).commit(unsigned)
    log = VersionLog(store, INFO, trust=SIGNER.trust, signer=SIGNER)
    with pytest.raises(Untrusted):
        log.put_alternate(log.signed(make_alternate(unsigned)))


def test_without_trust_signed_streams_are_read_as_any_other() -> None:
    store = MemoryStore()
    log = VersionLog(store, INFO)
    assert log.commit(SIGNED).won
    assert log.read(0) == SIGNED
    assert log.signed(MANIFEST) is MANIFEST


def test_the_trusted_stream_can_be_named() -> None:
    store = MemoryStore()
    stream = create_or_open_stream(store)
    assert open_stream(store, Trust([SIGNER.public], stream.id)) == stream
    with pytest.raises(Untrusted, match=f"is stream {stream.id.hex()}, only {STREAM_ID.hex()} is trusted"):
        open_stream(store, Trust([SIGNER.public], STREAM_ID))


# Keys and configs


def test_generated_keys_are_private_and_work(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        private, public, key = generate_key(tmp_path / "mine")
    finally:
        os.umask(before)
    assert (private, public) == (tmp_path / "mine", tmp_path / "mine.pub")
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    signer = SigningConfig(key_file=private).load()
    assert signer.public == key == read_public_key(str(public)) == read_public_key(str(key))
    check(signer.sign(MANIFEST), TrustConfig(keys=(public.read_text().strip(),)).load())


def test_a_directory_gets_both_files_and_nothing_is_overwritten(tmp_path: Path) -> None:
    private, public, key = generate_key(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["signing.key", "signing.key.pub"]
    text = private.read_text()
    for present in (private, public):
        other = public if present is private else private
        other.unlink()
        with pytest.raises(LocalDiskError, match=r"signing\.key") as refused:
            generate_key(tmp_path)
        assert "never overwritten" in refused.value.hint
        assert not other.exists()
        other.write_text(text if other is private else str(key))
    assert private.read_text() == text
    with pytest.raises(LocalDiskError, match="No such file"):
        generate_key(tmp_path / "no" / "folder" / "key")


def test_a_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    signer, text = Signer.generate()
    monkeypatch.setenv("SIGNING_KEY", text)
    config = parse_config({"key": "${SIGNING_KEY}"}, SigningConfig, source="x")
    assert config.load().public == signer.public
    assert text not in repr(config) + config.model_dump_json()


@pytest.mark.parametrize("text", ["", "secret", PRIVATE + "c2hvcnQ=", str(SIGNER.public), PRIVATE + "A" * 44])
def test_a_wrong_private_key_is_refused_without_showing_it(text: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    with pytest.raises(ConfigError, match="is no private key") as refused:
        SigningConfig(key_file=file).load()
    with pytest.raises(ConfigError, match="is no private key") as as_value:
        parse_config({"key": text}, SigningConfig, source="x").load()
    for error in (refused, as_value):
        assert not text or text not in str(error.value)


@pytest.mark.parametrize("text", ["", "ed25519:", "ed25519:AAAA", "rsa:AAAA", str(SIGNER.public)[:-1]])
def test_a_wrong_public_key_is_an_error_of_the_config(text: str) -> None:
    with pytest.raises(ConfigError, match=r"keys\[0\].*is no public key"):
        parse_config({"keys": [text]}, TrustConfig, source="x")


def test_a_private_key_in_place_of_a_public_one_is_said_and_not_shown(tmp_path: Path) -> None:
    _, text = Signer.generate()
    file = tmp_path / "key"
    file.write_text(text)
    with pytest.raises(ConfigError, match="is a private key") as refused:
        read_public_key(str(file))
    assert text.removeprefix(PRIVATE) not in str(refused.value)
    with pytest.raises(ConfigError, match="holds a private key") as in_config:
        parse_config({"keys": [text]}, TrustConfig, source="x")
    assert text.removeprefix(PRIVATE) not in str(in_config.value)


@given(st.binary(min_size=32, max_size=32))
def test_public_keys_survive_their_text(raw: bytes) -> None:
    assert PublicKey.parse(str(PublicKey(raw))).raw == raw


def test_who_neither_signs_nor_demands_signatures_needs_no_cryptography() -> None:
    """SGLang's environment has no `cryptography`; there `None` in `sys.modules` makes importing it fail."""
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "import subscriber.sglang.plugin, subscriber.sglang.rank, manifest.log, subscriber.config\n"
        "from manifest.signing import Signer\n"
        "try: Signer(bytes(32))\n"
        "except Exception as error: print(error.kind, error.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("config install deltasync with its extra")
