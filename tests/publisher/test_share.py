"""Optimizer state in shared memory: training goes on bit for bit, and files that lie are refused."""

import copy
import fcntl
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_model
from torch import nn

import deltasync
from chunkstore.dtypes import WIDTH
from manifest.errors import LocalDiskError
from publisher.errors import MappingMismatch, OptimizerRefused, SpoolInvalid
from publisher.share import share_optimizer_state
from publisher.spool import HEADER, MappedState, Place, StateFile, remove_stale
from tests.publisher.zoo import Zoo, adamw, train

KERNELS: dict[str, dict[str, Any]] = {
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "amsgrad": {"amsgrad": True},
}


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("kernel", list(KERNELS))
@pytest.mark.parametrize("steps_before", [0, 2])
def test_training_is_bit_identical_to_an_unshared_run(tmp_path: Path, kernel: str, steps_before: int) -> None:
    torch.manual_seed(3)
    plain = Zoo()
    optimizer = adamw(plain, lr=1e-3, **KERNELS[kernel])
    for seed in range(steps_before):
        train(plain, optimizer, seed)
    shared = copy.deepcopy(plain)
    other = adamw(shared, lr=1e-3, **KERNELS[kernel])
    if steps_before:
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    share_optimizer_state(other, shared, tmp_path)
    for seed in range(10, 16):
        for model, its in ((plain, optimizer), (shared, other)):
            train(model, its, seed)
        tokens = torch.arange(64).reshape(4, 16)
        assert torch.equal(plain.eval().forward(tokens), shared.eval().forward(tokens))
        plain.train()
        shared.train()
    assert _same(plain.state_dict(), shared.state_dict())
    for p, q in zip(plain.parameters(), shared.parameters(), strict=True):
        if optimizer.state.get(p):  # torch makes none for a parameter without gradient, we do
            mine, theirs = optimizer.state[p], other.state[q]
            assert _same(mine, theirs)
            assert [mine[k].dtype for k in mine] == [theirs[k].dtype for k in mine]


def test_the_other_side_sees_every_step_without_a_copy(tmp_path: Path) -> None:
    model = Zoo()
    optimizer = adamw(model, amsgrad=True)
    parameters = dict(model.named_parameters())
    shared = share_optimizer_state(optimizer, model, tmp_path)
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert model.head.weight is model.embed.weight
    mapped = MappedState.open(tmp_path, shared.file.id)
    for seed in range(3):
        train(model, optimizer, seed)
        for name, parameter in model.named_parameters():
            assert torch.equal(mapped.tensors[name], parameter), name
            for key, moment in mapped.moments.get(name, {}).items():
                assert torch.equal(moment, optimizer.state[parameter][key]), (name, key)
    assert mapped.moments["inner.weight"].keys() == {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    assert torch.equal(mapped.tensors["head.weight"], model.embed.weight)
    assert not torch.equal(mapped.tensors["mean"], model.mean)  # buffers arrive at publish
    shared.refresh(model)
    assert torch.equal(mapped.tensors["mean"], model.mean)
    assert "cache" not in mapped.tensors


def test_state_may_be_shared_again(tmp_path: Path) -> None:
    model = Zoo()
    optimizer = adamw(model)
    share_optimizer_state(optimizer, model, tmp_path).file.remove()
    train(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    shared = share_optimizer_state(optimizer, model, tmp_path)
    assert _same(model.state_dict(), before)
    assert len(list(tmp_path.glob("*.state"))) == 1
    train(model, optimizer)
    mapped = MappedState.open(tmp_path, shared.file.id)
    assert torch.equal(mapped.tensors["inner.weight"], model.inner.weight)


def test_layouts_in_memory_are_kept(tmp_path: Path) -> None:
    """Strides, and views of one storage: what torch computes with may depend on them."""
    model = nn.Module()
    flat = torch.randn(7 * 11)
    model.transposed = nn.Parameter(torch.randn(5, 9).t())
    model.first = nn.Parameter(flat[:33].view(3, 11))
    model.second = nn.Parameter(flat[33:].view(4, 11))
    model.register_buffer("part", model.first.detach()[1])
    optimizer = torch.optim.AdamW(model.parameters())
    before = copy.deepcopy(model.state_dict())
    shared = share_optimizer_state(optimizer, model, tmp_path)
    assert _same(model.state_dict(), before)
    now = model.state_dict()
    assert now["transposed"].stride() == (1, 9)
    assert now["first"].untyped_storage().data_ptr() == now["second"].untyped_storage().data_ptr()
    assert now["part"].data_ptr() == now["first"][1].data_ptr()
    assert _same(MappedState.open(tmp_path, shared.file.id).tensors, before)


def test_shared_weights_are_saved_as_before(tmp_path: Path) -> None:
    model = Zoo()
    torch.save(model.state_dict(), tmp_path / "before.pt")
    share_optimizer_state(adamw(model), model, tmp_path / "spool")
    torch.save(model.state_dict(), tmp_path / "after.pt")
    sizes = [(tmp_path / f"{name}.pt").stat().st_size for name in ("before", "after")]
    assert abs(sizes[0] - sizes[1]) < 4096
    assert _same(torch.load(tmp_path / "after.pt", weights_only=True), model.state_dict())
    save_model(model, str(tmp_path / "after.safetensors"))  # which refuses tensors inside a larger storage


def test_a_reload_into_another_form_is_refused_by_name(tmp_path: Path) -> None:
    model = Zoo()
    shared = deltasync.share_optimizer_state(adamw(model), model, tmp_path)
    model.mean = torch.zeros(65)
    with pytest.raises(MappingMismatch, match=r"mean was torch\.float32 \(64,\)"):
        shared.refresh(model)
    del model.mean
    with pytest.raises(MappingMismatch, match="mean is no longer in the model"):
        shared.refresh(model)


def test_state_on_another_device_is_refused_before_anything_moves(tmp_path: Path) -> None:
    model = Zoo()
    model.router = nn.Linear(64, 8, bias=False, device="meta")
    before = model.embed.weight.data_ptr()
    with pytest.raises(OptimizerRefused, match=r"router\.weight .* on meta: only CPU memory"):
        share_optimizer_state(adamw(model), model, tmp_path)
    assert model.embed.weight.data_ptr() == before
    assert not list(tmp_path.iterdir())


def test_a_spool_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model = Zoo()
    with pytest.raises(LocalDiskError, match=r"cannot share \d+ bytes .*--shm-size"):
        share_optimizer_state(adamw(model), model, tmp_path / "file")


def test_only_the_memory_of_dead_trainers_is_removed(tmp_path: Path) -> None:
    live = StateFile.create(tmp_path, HEADER)
    dead = tmp_path / f"{'a' * 32}.state"
    dead.write_bytes(b"x")
    for suffix in (".layout", ".layout-new", ".new"):
        dead.with_suffix(suffix).write_bytes(b"x")
    other = tmp_path / "notes.state"
    other.write_bytes(b"not ours")
    remove_stale(tmp_path)
    assert set(tmp_path.iterdir()) == {live.path, other}
    live.remove()


def test_making_state_and_removing_stale_state_exclude_each_other(tmp_path: Path) -> None:
    """A file that is made but not yet locked must not be taken for a dead trainer's."""
    stale = tmp_path / f"{'a' * 32}.state"
    stale.write_bytes(b"x")
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with ThreadPoolExecutor(2) as threads:
        made = threads.submit(StateFile.create, tmp_path, HEADER)
        removed = threads.submit(remove_stale, tmp_path)
        for job in (made, removed):
            with pytest.raises(TimeoutError):
                job.result(0.05)
        assert list(tmp_path.iterdir()) == [stale]
        os.close(folder)
        file = made.result()
    assert list(tmp_path.iterdir()) == [file.path]
    file.remove()


def _state(folder: Path, change: Callable[[dict[str, Any]], None]) -> str:
    """A state with one tensor, whose layout `change` edits."""
    file = StateFile.create(folder, HEADER + 64)
    layout: dict[str, Any] = {
        "format": 1,
        "nbytes": HEADER + 64,
        "tensors": {"w": {"dtype": "F32", "shape": [4, 4], "stride": [4, 1], "offset": HEADER}},
        "moments": {},
    }
    change(layout)
    file.path.with_suffix(".layout").write_bytes(msgpack.packb(layout))
    return file.id


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("offset", HEADER - 4),
        ("offset", HEADER + 4),
        ("offset", HEADER + 2),
        ("offset", 1 << 47),
        ("offset", -HEADER),
        ("shape", [5, 4]),
        ("shape", [1 << 47, 1 << 47]),
        ("shape", [4]),
        ("shape", [-4, -4]),
        ("stride", [1 << 47, 1]),
        ("dtype", "F8"),
        ("dtype", None),
        ("extra", 1),
    ],
)
def test_a_tensor_outside_its_file_is_refused(tmp_path: Path, key: str, value: object) -> None:
    def change(layout: dict[str, Any]) -> None:
        layout["tensors"]["w"][key] = value

    with pytest.raises(SpoolInvalid):
        MappedState.open(tmp_path, _state(tmp_path, change))


def test_repeated_elements_cannot_claim_more_memory_than_the_file(tmp_path: Path) -> None:
    def change(layout: dict[str, Any]) -> None:
        layout["tensors"]["w"] |= {"shape": [1 << 40], "stride": [0]}

    with pytest.raises(SpoolInvalid, match="more than the file"):
        MappedState.open(tmp_path, _state(tmp_path, change))


def test_a_torn_layout_is_refused_at_every_length(tmp_path: Path) -> None:
    state = _state(tmp_path, lambda layout: None)
    path = tmp_path / f"{state}.layout"
    data = path.read_bytes()
    assert MappedState.open(tmp_path, state).tensors["w"].shape == (4, 4)
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(SpoolInvalid):
            MappedState.open(tmp_path, state)
    path.unlink()
    with pytest.raises(SpoolInvalid, match="same spool folder"):
        MappedState.open(tmp_path, state)


def test_a_file_of_another_size_is_refused_before_it_is_mapped(tmp_path: Path) -> None:
    """FIELD_REPORTS: vmlx-swift#217: a truncated file maps as zeros, or ends the process at the first read."""
    state = _state(tmp_path, lambda layout: None)
    (tmp_path / f"{state}.state").write_bytes(bytes(HEADER))
    with pytest.raises(SpoolInvalid, match=f"has {HEADER} bytes, its layout says {HEADER + 64}"):
        MappedState.open(tmp_path, state)


_SIZES = st.integers(0, 40)


@given(
    st.sampled_from(sorted(WIDTH)),
    st.lists(st.tuples(_SIZES, _SIZES), max_size=3),
    st.integers(0, HEADER + 600),
)
def test_a_place_without_problem_lies_inside_the_file(
    dtype: str, axes: list[tuple[int, int]], offset: int
) -> None:
    size = HEADER + 512
    place = Place(dtype=dtype, shape=[n for n, _ in axes], stride=[s for _, s in axes], offset=offset)
    touched = {0}
    for n, step in axes:
        touched = {at + i * step for at in touched for i in range(n)}
    first, last = (min(touched), max(touched)) if touched else (0, 0)
    inside = offset + first * WIDTH[dtype] >= HEADER and offset + (last + 1) * WIDTH[dtype] <= size
    if place.problem(size) is None:
        assert inside or not touched
        assert offset % WIDTH[dtype] == 0
