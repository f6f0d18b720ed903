"""The ground that the other tests stand on: real servers, and oracles that tell weights apart."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.sglang import oracle
from tests.sglang.conftest import SGLANG_PYTHON, Served
from tests.sglang.oracle import PROMPTS, TOKENS, Stream
from tests.support.tiny_models import save_qwen3, save_qwen3_moe


@pytest.fixture(params=["dense", "moe"])
def served(request: pytest.FixtureRequest) -> Served:
    value: Served = request.getfixturevalue(request.param)
    return value


MAKERS: dict[str, Callable[..., Path]] = {
    "Qwen3ForCausalLM": save_qwen3,
    "Qwen3MoeForCausalLM": save_qwen3_moe,
}


def another_like(checkpoint: Path, folder: Path) -> Path:
    """A checkpoint of the same architecture with other weights."""
    architecture = json.loads((checkpoint / "config.json").read_text())["architectures"][0]
    return MAKERS[architecture](folder, seed=99)


def test_oracles_follow_the_weights(served: Served, tmp_path: Path) -> None:
    """A → B → A: both are equal bit for bit where the weights are, and differ everywhere where they differ."""
    server, checkpoint = served
    other = another_like(checkpoint, tmp_path / "other")
    sums, logs = oracle.checksums(server), oracle.logprobs(server)
    assert logs == oracle.logprobs(server)  # reproducible at all

    oracle.load_from_disk(server, other, version="7")
    assert oracle.info(server, "/model_info")["weight_version"] == "7"
    other_sums, other_logs = oracle.checksums(server), oracle.logprobs(server)
    assert len(sums) == len(other_sums) == server.options.tp_size
    for rank, other_rank in zip(sums, other_sums, strict=True):
        assert rank.keys() == other_rank.keys()
        assert [name for name in rank if rank[name] == other_rank[name]] == []
    assert all(a != b for a, b in zip(logs, other_logs, strict=True))

    oracle.load_from_disk(server, checkpoint)
    assert oracle.checksums(server) == sums
    assert oracle.logprobs(server) == logs


def test_servers_compute_what_transformers_computes(served: Served) -> None:
    """So what SGLang does without its compiled kernels is the model, and not something that merely reproduces."""
    model = AutoModelForCausalLM.from_pretrained(served.checkpoint, dtype=torch.float32)
    for prompt, found in zip(PROMPTS, oracle.logprobs(served.server), strict=True):
        ids = torch.tensor([[*prompt, *found.ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].log_softmax(-1)
        expected = logits.gather(-1, ids[0, 1:, None])[:, 0]
        got = torch.tensor(found.prompt + found.completion)
        assert len(got) == len(prompt) + TOKENS - 1
        # bf16 against fp32; a single token may be far off where the router's choice is close.
        assert (got - expected).abs().median() < 0.05
        assert math.isfinite(float(got.sum()))


def test_a_stream_tells_when_tokens_came_and_of_which_version(served: Served) -> None:
    oracle.load_from_disk(served.server, served.checkpoint, version="3")
    with Stream(served.server, tokens=TOKENS) as stream:
        stream.wait_for(1)
        assert stream.running or len(stream.ids) == TOKENS
    assert tuple(stream.ids) == oracle.logprobs(served.server)[0].ids
    assert len(stream.times) == TOKENS
    assert stream.times == sorted(stream.times)
    assert stream.meta["finish_reason"]["type"] == "length"
    assert stream.meta["weight_versions"] == [{"version": "3", "start": 0, "end": TOKENS}]


def test_the_plugin_is_registered_and_no_process_failed_to_load_it(served: Served) -> None:
    """SGLang only logs when a plugin does not load."""
    show = "from importlib.metadata import entry_points as e; print([p.value for p in e(group='sglang.srt.plugins')])"
    registered = subprocess.run([SGLANG_PYTHON, "-c", show], capture_output=True, text=True, check=True)
    assert registered.stdout.strip() == "['subscriber.sglang.plugin:register']"
    assert "plugin" not in "\n".join(
        line for line in served.server.log.read_text().splitlines() if "Failed" in line
    )


def test_the_plugin_can_be_imported_without_sglang() -> None:
    show = "import subscriber.sglang.plugin, sys; print('sglang' in sys.modules)"
    imported = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    assert imported.stdout.strip() == "False"
