"""What a publisher process refuses from whoever connects: typed, and it serves on."""

import socket
import struct
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

from manifest.catalog import Catalog, TensorSpec
from publisher.frames import MAX_FRAME, SOCKET
from publisher.publisher import Publisher
from publisher.share import share_optimizer_state
from tests.publisher.sidecars import WAIT, sidecar_thread, store_of, write_config
from tests.publisher.zoo import Zoo, adamw, assert_identical, train


def _frame(message: object) -> bytes:
    data: bytes = msgpack.packb(message)
    return struct.pack("<I", len(data)) + data


_OPEN: dict[str, Any] = {
    "kind": "open", "protocol": 1, "seq": 1, "state": "0" * 32, "catalog": b"", "sources": [], "steps": [],
}  # fmt: skip

HOSTILE = {
    "too long": (struct.pack("<I", MAX_FRAME + 1), "spool_invalid"),
    "not msgpack": (struct.pack("<I", 3) + b"\xc1\xc1\xc1", "spool_invalid"),
    "not a map": (_frame([1, 2]), "spool_invalid"),
    "unknown kind": (_frame({"kind": "exec"}), "spool_invalid"),
    "step first": (_frame({"kind": "step", "seq": 1, "groups": []}), "spool_invalid"),
    "path as state": (_frame({**_OPEN, "state": "../../../../etc/passwd"}), "spool_invalid"),
    "other protocol": (_frame({**_OPEN, "protocol": 2}), "spool_invalid"),
    "no catalog": (_frame(_OPEN), "manifest_invalid"),
    "deep": (struct.pack("<I", 5000) + b"\x91" * 5000, "spool_invalid"),
}


def test_hostile_frames_are_refused_and_the_process_serves_on(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with sidecar_thread(config):
        for name, (data, kind) in HOSTILE.items():
            assert _answer(tmp_path / "spool" / SOCKET, data)["error"]["kind"] == kind, name
        with socket.socket(socket.AF_UNIX) as peer:  # half a frame, then gone
            peer.connect(str(tmp_path / "spool" / SOCKET))
            peer.sendall(struct.pack("<I", 100) + b"half")
        model = Zoo()
        optimizer = adamw(model)
        with Publisher.attach(optimizer, model, config) as publisher:
            train(model, optimizer)
            assert publisher.publish().result(WAIT) is not None
            assert_identical(publisher, model, store_of(config), 1)


_HYPER = {"lr": 1.0, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}


@pytest.mark.parametrize(
    ("change", "request_after", "message"),
    [
        ({"sources": ["digest"]}, None, "one source and one step count per catalog tensor"),
        ({"sources": ["inversion", "inversion"]}, None, "bias has no fp32 master"),
        ({"sources": ["copy", "inversion"]}, None, "bias has source copy"),
        ({"state": "0" * 32}, None, "same spool folder"),
        (
            {"catalog": Catalog.of([TensorSpec("x", "F32", (1,)), TensorSpec("y", "F32", (1,))]).data},
            None,
            "x is not",
        ),
        ({}, {"kind": "step", "groups": [{**_HYPER, "tensors": [2], "steps": [1]}]}, "names tensor 2"),
        ({}, {"kind": "step", "groups": [{**_HYPER, "tensors": [0], "steps": [1]}]}, "names tensor 0"),
        ({}, _OPEN, "says it once"),
    ],
)
def test_requests_that_do_not_fit_the_shared_state_end_the_connection(
    tmp_path: Path, change: dict[str, Any], request_after: dict[str, Any] | None, message: str
) -> None:
    """A layer whose weight is found by inversion, and whose bias is shared without moments."""
    config = write_config(tmp_path)
    model = torch.nn.Linear(3, 2)
    with sidecar_thread(config):
        shared = share_optimizer_state(torch.optim.AdamW([model.weight]), model, tmp_path / "spool")
        catalog = Catalog.of([TensorSpec("bias", "BF16", (2,)), TensorSpec("weight", "BF16", (2, 3))])
        sources = ["digest", "inversion"]
        opening = {
            **_OPEN,
            "state": shared.file.id,
            "catalog": catalog.data,
            "sources": sources,
            "steps": [0, 0],
        }
        data = _frame({**opening, **change})
        if request_after is not None:
            data += _frame({**request_after, "seq": 2})
        with shared.file.held(1):
            answer = _answer(tmp_path / "spool" / SOCKET, data)
        assert answer["error"]["kind"] == "spool_invalid"
        assert message in answer["error"]["message"] + answer["error"]["hint"]


def test_weights_that_are_held_for_another_request_are_not_read(tmp_path: Path) -> None:
    """The trainer has gone on since, and holds still for what it asked for then."""
    config = write_config(tmp_path)
    model = torch.nn.Linear(3, 2)
    with sidecar_thread(config):
        shared = share_optimizer_state(torch.optim.AdamW(model.parameters()), model, tmp_path / "spool")
        catalog = Catalog.of([TensorSpec("bias", "BF16", (2,)), TensorSpec("weight", "BF16", (2, 3))])
        opening = {
            **_OPEN,
            "state": shared.file.id,
            "catalog": catalog.data,
            "sources": ["inversion", "inversion"],
            "steps": [0, 0],
        }
        step = {"kind": "step", "seq": 2, "groups": [{**_HYPER, "tensors": [0, 1], "steps": [1, 1]}]}
        requests = b"".join(map(_frame, [opening, step, {"kind": "close", "seq": 3}]))
        with shared.file.held(1):
            answers = _answers(tmp_path / "spool" / SOCKET, requests)
    [answer] = [answer for answer in answers if answer.get("seq") == 2]
    assert answer["error"]["kind"] == "capture_lost"


def _answer(path: Path, data: bytes) -> dict[str, Any]:
    """The last answer to `data` before the other side hangs up."""
    return _answers(path, data)[-1]


def _answers(path: Path, data: bytes) -> list[dict[str, Any]]:
    """All of them."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(WAIT)
        peer.connect(str(path))
        peer.sendall(data)
        received = b""
        while part := peer.recv(1 << 16):
            received += part
    answers: list[dict[str, Any]] = []
    while received:
        (length,) = struct.unpack_from("<I", received)
        answers.append(msgpack.unpackb(received[4 : 4 + length]))
        received = received[4 + length :]
    return answers
