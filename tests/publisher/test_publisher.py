"""Whole versions from a live model and real AdamW, rebuilt from the store and compared bit for bit."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DataParallel, DistributedDataParallel

from chunkstore.errors import StoreUnavailable, StoreUnsuitable
from manifest.errors import CommitUnknown
from manifest.history import find_plan
from manifest.log import VersionLog, open_stream
from publisher.errors import PublisherStopped
from tests.publisher.zoo import Zoo, adamw, assert_identical, attach, fresh_store, make, published, train
from tests.support.faults import FaultStore

KERNELS = {"single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@pytest.mark.parametrize("kernel", list(KERNELS))
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("lr", [1e-6, 1e-5, 1e-4, 1e-3])
def test_twenty_steps_bit_identical(tmp_path: Path, kernel: str, weight_decay: float, lr: float) -> None:
    """bf16, fp16 and fp32 on the wire, tied weights, a frozen and an unused parameter, 0-dim, empty, buffers.

    FIELD_REPORTS: prime-rl#3524, AReaL#1439: a router is published in fp32, its own dtype, bit for bit.
    """
    model, checkpoint = make(tmp_path / "base")
    optimizer = adamw(model, lr, weight_decay, **KERNELS[kernel])
    store = fresh_store()
    with attach(model, optimizer, store, base_checkpoint=str(checkpoint)) as publisher:
        assert {t.name: t.dtype for t in publisher.catalog.tensors}["router.weight"] == "F32"
        assert_identical(publisher, model, store, 0)
        for step in range(1, 21):
            train(model, optimizer, step)
            commit = publisher.publish(step).result()
            assert commit is not None
            assert len(repr(commit)) < 200, "people print it"
            assert commit.version == publisher.version == step
            if step % 5 == 0:
                assert_identical(publisher, model, store, step)
            if lr <= 1e-5:
                assert commit.manifest.stats.unproved_blocks == 0


def test_several_steps_per_version() -> None:
    model = Zoo()
    optimizer = adamw(model)
    store = fresh_store()
    with attach(model, optimizer, store) as publisher:
        for version, steps in enumerate((3, 1, 5), start=1):
            for i in range(steps):
                train(model, optimizer, 10 * version + i)
            commit = publisher.publish().result()
            assert commit is not None
            assert commit.manifest.optimizer_steps == steps
            assert_identical(publisher, model, store, version)


def test_changes_are_stored_as_differences_for_any_number_of_steps() -> None:
    """Every sparse change is proved, so its old value is known; whole blocks stay dense."""
    model = Zoo()
    optimizer = adamw(model, lr=1e-5)
    store = fresh_store()
    with attach(model, optimizer, store) as publisher:
        for steps in (1, 4):
            for i in range(steps):
                train(model, optimizer, i)
            commit = publisher.publish().result()
            assert commit is not None
            used = commit.manifest.stats.bytes_by_encoding
            assert used["delta"] > 0
            sections = [s for chunk in commit.manifest.chunks for s in chunk.sections if not s.whole]
            assert sum(s.changed for s in sections) > 0
        assert_identical(publisher, model, store, 2)


def test_no_change_is_no_version() -> None:
    """FIELD_REPORTS: trl#5937: nothing changed, so no version exists."""
    model = Zoo()
    store = fresh_store()
    with attach(model, adamw(model), store) as publisher:
        publisher.check_copies()  # nobody else has any
        assert publisher.publish().result() is None
        assert not VersionLog(store, open_stream(store)).exists(1)
        assert publisher.version == 0


def test_a_tied_head_is_published_once_under_both_names() -> None:
    """FIELD_REPORTS: prime-rl#2823, sglang#15890."""
    model = Zoo()
    with attach(model, adamw(model), fresh_store()) as publisher:
        assert publisher.catalog.aliases == {"head.weight": "embed.weight"}
        assert "head.weight" not in publisher.catalog.ids


def test_a_failed_upload_leaves_its_changes_to_the_next_version() -> None:
    """FIELD_REPORTS: prime-rl#3386, slime#2104, trl#5937, prime-rl#3037: no manifest, no version, nothing forgotten."""
    model = Zoo()
    optimizer = adamw(model, lr=1e-4)
    inner, failing = fresh_store(), [False]

    def fault(operation: str, key: str) -> Exception | None:
        return StoreUnavailable("injected") if failing[0] and key.startswith("chunks/") else None

    with attach(model, optimizer, FaultStore(inner, before=fault)) as publisher:
        failing[0] = True
        train(model, optimizer, 1)
        with pytest.raises(StoreUnavailable):
            publisher.publish().result()
        train(model, optimizer, 2)
        with pytest.raises(StoreUnavailable):
            publisher.publish().result()
        failing[0] = False
        commit = publisher.publish().result()
        assert commit is not None
        assert commit.version == 1
        assert commit.manifest.optimizer_steps == 2
        assert_identical(publisher, model, inner, 1)


def test_an_unknown_commit_is_held_until_it_is_known() -> None:
    model = Zoo()
    optimizer = adamw(model)
    inner, dark = fresh_store(), [False]

    def fault(operation: str, key: str) -> Exception | None:
        return StoreUnavailable("injected") if dark[0] and key.startswith("versions/") else None

    def unreadable(operation: str, key: str) -> Exception | None:
        return fault(operation, key) if operation == "get" else None

    with attach(model, optimizer, FaultStore(inner, after=fault, before=unreadable)) as publisher:
        dark[0] = True
        train(model, optimizer, 1)
        with pytest.raises(CommitUnknown):
            publisher.publish().result()
        train(model, optimizer, 2)
        with pytest.raises(CommitUnknown):
            publisher.publish()
        dark[0] = False
        commit = publisher.publish().result()
        assert commit is not None
        assert commit.version == 2
        assert commit.manifest.optimizer_steps == 1
        assert_identical(publisher, model, inner, 2)


def test_an_edit_between_the_step_and_publish_is_published() -> None:
    """An EMA swap, a clamp, a reload after the hook; frozen weights and buffers outside the optimizer."""
    model = Zoo()
    optimizer = adamw(model, lr=1e-6)
    store = fresh_store()
    with attach(model, optimizer, store) as publisher:
        train(model, optimizer)
        with torch.no_grad():
            model.inner.weight[3].clamp_(-0.01, 0.01)
            model.embed.weight.data = model.embed.weight * 2
            model.frozen.bias.add_(1)
        commit = publisher.publish().result()
        assert commit is not None
        assert commit.manifest.stats.unproved_blocks > 0
        assert_identical(publisher, model, store, 1)


def test_an_anchor_on_demand_rebuilds_the_version_alone() -> None:
    """FIELD_REPORTS: trl#5932: an anchor alone rebuilds every tensor of the catalog."""
    model = Zoo()
    optimizer = adamw(model)
    store = fresh_store()
    with attach(model, optimizer, store) as publisher:
        train(model, optimizer)
        commit = publisher.publish(anchor=True).result()
        assert commit is not None
        assert commit.manifest.kind == "delta"
        for info in list(store.list_after("chunks/00000000000000000000/")):
            store.delete(info.key)  # without version 0, only the new anchor is left to start from
        assert_identical(publisher, model, store, 1)
        publisher.publish(anchor=True).result()
        assert publisher.version == 1


def test_snapshot_accepts_any_optimizer() -> None:
    model = Zoo().bfloat16()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    store = fresh_store()
    with attach(model, optimizer, store, detect="snapshot") as publisher:
        for step in range(1, 4):
            train(model, optimizer, step)
            commit = publisher.publish().result()
            assert commit is not None
            assert_identical(publisher, model, store, step)
            assert set(commit.manifest.stats.sources) == {"snapshot", "digest"}


def test_wrapped_models_publish_canonical_names(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo",
        store=FileStore(str(tmp_path / "pg"), 1),
        rank=0,
        world_size=1,
    )
    try:
        plain, checkpoint = make(tmp_path / "base")
        wraps: tuple[Callable[[Any], Any], ...] = (
            DistributedDataParallel,
            DataParallel,
            torch.compile,
        )
        for wrap in wraps:
            model = copy.deepcopy(plain)
            wrapped = wrap(model)
            optimizer = adamw(wrapped)
            store = fresh_store()
            with attach(wrapped, optimizer, store, base_checkpoint=str(checkpoint)) as publisher:
                train(model, optimizer)
                publisher.check_copies()  # of the only rank
                assert publisher.publish().result() is not None
                assert_identical(publisher, wrapped, store, 1)
    finally:
        torch.distributed.destroy_process_group()


def test_a_module_that_is_merely_called_module_keeps_its_name() -> None:
    model = nn.ModuleDict({"module": nn.Linear(4, 4)})
    with attach(model, adamw(model), fresh_store()) as publisher:
        assert [t.name for t in publisher.catalog.tensors] == ["module.bias", "module.weight"]


def test_several_optimizers_over_one_model() -> None:
    model = Zoo()
    matrices: list[nn.Parameter] = [p for p in model.parameters() if p.requires_grad and p.ndim == 2]
    rest = [p for p in model.parameters() if p.requires_grad and p.ndim != 2]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(matrices, lr=1e-5),
        torch.optim.Adam(rest, lr=1e-4),
    ]
    store = fresh_store()
    with attach(model, optimizers, store) as publisher:
        for step in range(1, 4):
            train(model, optimizers[0], step)
            optimizers[1].step()
            assert publisher.publish().result() is not None
            assert_identical(publisher, model, store, step)


def test_a_tensor_larger_than_a_window() -> None:
    model = nn.Linear(3000, 3000)
    optimizer = adamw(model, lr=1e-6)
    store = fresh_store()
    with attach(model, optimizer, store) as publisher:
        optimizer.zero_grad()
        model(torch.randn(4, 3000)).square().mean().backward()
        optimizer.step()
        commit = publisher.publish().result()
        assert commit is not None
        assert commit.manifest.stats.changed < 0.2 * 9e6
        assert_identical(publisher, model, store, 1)
    assert published(store, 0).keys() == {"weight", "bias"}


def test_a_lost_reply_and_a_refused_read_are_unknown_not_failed() -> None:
    """The put landed, its reply was lost, then a gateway answers nonsense once: one's own manifest is no rival's."""
    model, inner = Zoo(), fresh_store()
    optimizer = adamw(model)
    faults: dict[str, Exception] = {}

    def before(operation: str, key: str) -> Exception | None:
        return faults.pop("read", None) if operation == "get" and key.startswith("versions/") else None

    def after(operation: str, key: str) -> Exception | None:
        return (
            faults.pop("put", None) if operation == "put_if_absent" and key.startswith("versions/") else None
        )

    with attach(model, optimizer, FaultStore(inner, before=before, after=after)) as publisher:
        train(model, optimizer, 1)
        faults |= {"put": StoreUnavailable("lost"), "read": StoreUnsuitable("421 from a proxy")}
        commit = publisher.publish().result()
        assert commit is not None
        assert not faults
        assert_identical(publisher, model, inner, commit.version)


def test_an_anchor_on_demand_stands_in_for_a_damaged_version_0() -> None:
    model, store = Zoo(), fresh_store()
    with attach(model, adamw(model), store) as publisher:
        commit = publisher.publish(anchor=True).result()
        assert commit is not None
        assert commit.version == 0
        log = VersionLog(store, open_stream(store))
        assert log.alternates() == [0]
        for chunk in commit.manifest.chunks:
            store.delete(chunk.key)
        (step,) = find_plan(log, None, 0, {commit.manifest.hash}).steps
        assert step.kind == "anchor"


def test_ctrl_c_between_sealing_and_upload_is_no_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    model, store = Zoo(), fresh_store()
    optimizer = adamw(model)

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with attach(model, optimizer, store) as publisher:
        train(model, optimizer)
        with monkeypatch.context() as patch:
            patch.setattr("publisher.tracking._sources", interrupt)
            with pytest.raises(KeyboardInterrupt):
                publisher.publish()
        commit = publisher.publish().result()
        assert commit is not None
        assert_identical(publisher, model, store, commit.version)


def test_tensors_that_are_not_contiguous() -> None:
    model = nn.Linear(500, 300)
    model.weight.data = torch.randn(500, 300).t()
    optimizer = adamw(model, lr=1e-5)
    store = fresh_store()
    with attach(model, optimizer, store) as publisher:
        for version in (1, 2):
            optimizer.zero_grad()
            model(torch.randn(4, 500)).square().mean().backward()
            optimizer.step()
            commit = publisher.publish().result()
            assert commit is not None
            assert commit.manifest.stats.unproved_blocks == 0
            assert_identical(publisher, model, store, version)


def test_a_forked_child_cannot_publish_and_does_not_hang() -> None:
    model = nn.Linear(3, 3)
    optimizer = adamw(model)
    with attach(model, optimizer, fresh_store()) as publisher:
        child = os.fork()
        if child == 0:  # whatever happens, the child must not run the rest of the suite
            code = 1
            try:
                model.weight.grad = torch.ones(3, 3)
                optimizer.step()
                publisher.publish()
            except PublisherStopped:
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
