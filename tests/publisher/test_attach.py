"""What attach refuses, and how publishers of one stream treat each other."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from chunkstore.errors import ConfigError, StoreUnsuitable
from chunkstore.memory import MemoryStore
from chunkstore.store import Buffer
from manifest.errors import Fenced
from manifest.log import VersionLog, open_stream
from publisher.errors import MappingMismatch, OptimizerRefused, PublisherStopped
from publisher.mapping import map_model
from publisher.publisher import Publisher
from tests.publisher.zoo import Zoo, adamw, assert_identical, attach, fresh_store, make, train


def test_a_wrong_permutation_is_caught_by_the_files(tmp_path: Path) -> None:
    """A wrong mapping moves data and digest together; only the files the run started from can tell."""
    model, checkpoint = make(tmp_path)
    with torch.no_grad():
        model.inner.weight.copy_(model.inner.weight[torch.randperm(700)])
    with pytest.raises(MappingMismatch, match=r"1 of \d+ tensors differ.*inner\.weight"):
        attach(model, adamw(model), fresh_store(), base_checkpoint=str(checkpoint))


def test_a_store_without_put_if_absent_is_refused_before_anything_is_stored() -> None:
    class Overwriting(MemoryStore):
        def put_if_absent(self, key: str, data: Buffer) -> bool:
            created = self.head(key) is None
            self.put(key, data)
            return created

    model, store = Zoo(), Overwriting()
    with pytest.raises(StoreUnsuitable, match="put-if-absent does not hold"):
        attach(model, adamw(model), store)
    assert list(store.list_after("")) == []


def test_a_tensor_and_its_transpose_are_not_one() -> None:
    """They have one address and, if square, one shape; as aliases, one would be written in the other's order."""
    weight = torch.randn(8, 8)
    named = {"a": weight, "b": weight.t(), "c": weight.view(8, 8)}
    catalog = map_model(named, None, "BF16")
    assert [spec.name for spec in catalog.tensors] == ["a", "b"]
    assert catalog.aliases == {"c": "a"}


def test_names_and_shapes_that_do_not_match_are_all_named(tmp_path: Path) -> None:
    model, checkpoint = make(tmp_path)
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["extra"] = torch.ones(3)
    tensors["scale"] = torch.ones(2, dtype=torch.bfloat16)
    del tensors["inner.bias"]
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(MappingMismatch) as caught:
        attach(model, adamw(model), fresh_store(), base_checkpoint=str(checkpoint))
    for part in (
        "inner.bias is in the model but not",
        "extra is in the files",
        "scale is () in the model, (2,)",
    ):
        assert part in str(caught.value)


def test_missing_checkpoint(tmp_path: Path) -> None:
    model = Zoo()
    with pytest.raises(MappingMismatch, match="holds no"):
        attach(model, adamw(model), fresh_store(), base_checkpoint=str(tmp_path))


def test_pure_bf16_is_refused_by_name() -> None:
    """FIELD_REPORTS: AReaL#1292: AdamW on bf16 parameters is refused, with the parameter's name."""
    model = Zoo().bfloat16()
    with pytest.raises(OptimizerRefused, match=r"embed\.weight is torch\.bfloat16.*detect: snapshot"):
        attach(model, adamw(model), fresh_store())


@pytest.mark.parametrize(
    "given", [None, {"actor": "adamw"}, [object()], []], ids=["None", "dict", "list", "empty"]
)
def test_what_is_no_optimizer_is_refused_by_name(given: object) -> None:
    with pytest.raises(OptimizerRefused, match=r"(NoneType|str|object|nothing) is given as the optimizer"):
        Publisher.attach(given, Zoo(), {"store": {"url": "memory://unused"}, "inference_dtype": "bfloat16"})


def test_other_optimizers_are_refused_by_name() -> None:
    model = Zoo()
    with pytest.raises(OptimizerRefused, match=r"SGD.*detect: snapshot"):
        attach(model, torch.optim.SGD(model.parameters(), lr=0.1), fresh_store())


def test_a_decay_that_destroys_the_weights_is_refused() -> None:
    model = Zoo()
    with pytest.raises(OptimizerRefused, match="lr·weight_decay"):
        attach(model, adamw(model, lr=0.5, weight_decay=2.0), fresh_store())


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(OptimizerRefused, match="never be a change"):
        attach(Zoo(), adamw(Zoo()), fresh_store())


def test_a_parameter_in_two_optimizers_is_refused() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(OptimizerRefused, match="two optimizers"):
        attach(model, [adamw(model), adamw(model)], fresh_store())


@pytest.mark.parametrize("change", [{"base_checkpoint": "/x"}, {"detekt": "auto"}, {"upload_threads": 0}])
def test_config_errors_name_the_key(change: dict[str, object]) -> None:
    model = nn.Linear(3, 3)
    config = {"store": {"url": "memory://x"}, "inference_dtype": "bfloat16", **change}
    with pytest.raises(ConfigError, match=next(iter(change))):
        Publisher.attach(adamw(model), model, config)


def test_a_restart_continues_the_chain_with_what_differs() -> None:
    """FIELD_REPORTS: marin#1829: a trainer restarted at step 0 gets the next version, never an old one."""
    model = Zoo()
    optimizer = adamw(model, lr=1e-4)
    store = fresh_store()
    attach(model, optimizer, store).close()
    train(model, optimizer)  # a step that no publisher saw
    with torch.no_grad():
        model.frozen.weight[5] += 1
    with attach(model, optimizer, store) as publisher:
        assert publisher.version == 1  # the takeover: same weights, next epoch
        commit = publisher.publish(train_step=0).result()
        assert commit is not None
        assert commit.version == 2
        assert commit.manifest.epoch == 2
        sent = {publisher.catalog.tensors[s.tensor].name for c in commit.manifest.chunks for s in c.sections}
        assert "frozen.weight" in sent
        assert "frozen.bias" not in sent
        assert_identical(publisher, model, store, 2)
        train(model, optimizer)
        assert publisher.publish().result() is not None
        assert_identical(publisher, model, store, 3)


def test_a_restart_names_the_tensors_that_alone_differ(caplog: pytest.LogCaptureFixture) -> None:
    """With `base_checkpoint` long past, this is all that tells of a layout whose map is wrong."""
    model, store = Zoo(), fresh_store()
    attach(model, adamw(model), store).close()
    attach(model, adamw(model), store).close()
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    with torch.no_grad():
        model.inner.weight.copy_(model.inner.weight[torch.randperm(700)])
    attach(model, adamw(model), store).close()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "tensors differ from version 2: inner.weight. If training resumes" in warning


def test_a_predecessor_is_fenced_and_says_by_whom() -> None:
    model = Zoo()
    optimizer = adamw(model)
    store = fresh_store()
    old = attach(model, optimizer, store)
    new = attach(model, optimizer, store)
    train(model, optimizer)
    with pytest.raises(Fenced, match=r"epoch 1\) lost version 1 .*epoch 2"):
        old.publish().result()
    with pytest.raises(Fenced):
        old.publish()
    with pytest.raises(PublisherStopped):
        old.publish()
    assert new.publish().result() is not None
    assert_identical(new, model, store, 2)
    new.close()
    assert VersionLog(store, open_stream(store)).newest() is not None


def test_another_model_cannot_take_a_stream_over() -> None:
    store = fresh_store()
    first = nn.Linear(3, 3)
    attach(first, adamw(first), store).close()
    second = nn.Linear(4, 3)
    with pytest.raises(MappingMismatch, match="holds another model"):
        attach(second, adamw(second), store)
    assert not VersionLog(store, open_stream(store)).exists(1)


def test_publishing_after_close_is_refused() -> None:
    model = nn.Linear(3, 3)
    publisher = attach(model, adamw(model), fresh_store())
    publisher.close()
    with pytest.raises(PublisherStopped):
        publisher.publish()
