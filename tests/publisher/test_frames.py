"""Frames and messages: what is sent arrives, and bytes that are no message are refused before anything is done."""

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

import chunkstore.errors
import manifest.errors
import publisher.errors
from chunkstore.errors import DeltasyncError, LimitExceeded
from publisher.errors import SpoolInvalid
from publisher.frames import MAX_FRAME, SOCKET, Frames, socket_address
from publisher.messages import REPLY, REQUEST, ErrorInfo, GroupRecord, Publish, Result, parse

ERRORS = [
    e
    for module in (chunkstore.errors, manifest.errors, publisher.errors)
    for e in vars(module).values()
    if isinstance(e, type) and issubclass(e, DeltasyncError)
]
_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@contextmanager
def _pair() -> Iterator[tuple[socket.socket, Frames]]:
    left, right = socket.socketpair(socket.AF_UNIX)
    with left, right:
        yield left, Frames(right, 5.0)


@given(st.lists(st.dictionaries(st.text(), _PLAIN, max_size=4), max_size=4))
def test_what_is_sent_arrives_in_order(messages: list[dict[str, Any]]) -> None:
    with _pair() as (left, frames):
        sender = Frames(left, 5.0)
        for message in messages:
            sender.send(message)
        sender.shut()
        for message in messages:
            assert repr(frames.receive()) == repr(message)  # NaN is not equal to itself
        assert frames.receive() is None


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with _pair() as (left, frames):
        left.sendall(data)
        left.close()
        try:
            while (raw := frames.receive()) is not None:
                with pytest.raises(SpoolInvalid):
                    parse(raw, REQUEST)
                with pytest.raises(SpoolInvalid):
                    parse(raw, REPLY)
        except SpoolInvalid:
            return


def test_a_length_over_the_limit_is_refused_before_its_bytes_come() -> None:
    with _pair() as (left, frames):
        left.sendall(struct.pack("<I", MAX_FRAME + 1))
        with pytest.raises(SpoolInvalid, match="announces"):
            frames.receive()
        with pytest.raises(LimitExceeded):
            frames.send({"x": bytes(MAX_FRAME)})


def test_a_peer_that_says_nothing_is_not_waited_for_without_end() -> None:
    with _pair() as (left, frames):
        left.sendall(b"\x05")
        with pytest.raises(TimeoutError):
            frames.receive(within=0.05)


def test_a_peer_that_does_not_read_is_given_up() -> None:
    left, right = socket.socketpair(socket.AF_UNIX)
    with left, right:
        frames = Frames(left, 0.05)
        with pytest.raises(OSError, match="temporarily unavailable"):
            frames.send({"x": bytes(8 << 20)})
        assert frames.receive() is None  # the connection is of no more use


def test_a_spool_path_may_be_longer_than_an_address(tmp_path: Path) -> None:
    spool = tmp_path / ("long-" * 30)
    spool.mkdir()
    with socket.socket(socket.AF_UNIX) as listener, socket_address(spool) as address:
        listener.bind(address)
    assert (spool / SOCKET).is_socket()


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: e.kind)
def test_an_error_is_the_same_on_the_other_side(error: type[DeltasyncError]) -> None:
    sent = error("what happened", hint="what to do")
    raw = msgpack.unpackb(msgpack.packb(Result(seq=1, error=ErrorInfo.of(sent)).model_dump()))
    result = parse(raw, REPLY)
    assert isinstance(result, Result)
    assert result.error is not None
    received = result.error.error()
    assert type(received) is error
    assert str(received) == str(sent)


def test_a_record_has_one_step_count_per_tensor() -> None:
    hyper = {"lr": 1.0, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
    record = {**hyper, "tensors": [0, 1], "steps": [4, 5]}
    raw = {"kind": "publish", "seq": 1, "train_step": None, "anchor": False, "missed": 1, "groups": [record]}
    message = parse(raw, REQUEST)
    assert isinstance(message, Publish)
    assert message.groups == [GroupRecord.model_validate(record)]
    record["steps"] = [4]
    with pytest.raises(SpoolInvalid, match="2 tensors but 1 step counts"):
        parse(raw, REQUEST)
