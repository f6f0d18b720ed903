"""What publishing costs real trainers, against torch's own full save (DCP) at the same versions of the same run.

For each layout: how long the trainer is held per optimizer step and per publish, and bytes per version; and how long
`torch.distributed.checkpoint.save` of the model's weights holds it, and how many bytes that writes. Gloo on the CPU;
times are the slowest rank's medians.

    python -m benchmarks.trainers --parameters 20 --json trainers.json
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

import deltasync
from tests.trainers import layouts
from tests.trainers.layouts import LAYOUTS
from tests.trainers.policies import Policy

NAMES = (
    "DDP, the first rank",
    "DDP, every rank a share",
    "ZeroRedundancyOptimizer",
    "FSDP2, bf16 compute",
    "FSDP2, columns",
    "HSDP",
    "FSDP2 × TP",
)
_WIDTH, _LAYERS, _VOCABULARY = 512, 4, 4096


def build(parameters: int) -> Policy:
    """A Llama of about so many parameters."""
    torch.manual_seed(0)
    each = parameters / _LAYERS - 4 * _WIDTH**2
    middle = max(64, int((each - 2 * _VOCABULARY * _WIDTH / _LAYERS) / (3 * _WIDTH)) // 64 * 64)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=_WIDTH,
        intermediate_size=middle,
        num_hidden_layers=_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=_WIDTH // 8,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    return Policy(LlamaForCausalLM(config))


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call that all ranks begin together, and its result."""
    distributed.barrier()
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def rank_main(
    name: str, rank: int, world_size: int, folder: str, options: dict[str, int], results: Any
) -> None:
    torch.set_num_threads(1)
    layouts.LR = 1e-6
    layout = LAYOUTS[name]
    distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=world_size)
    torch.manual_seed(1 + rank // layout.same_data)
    model = layout.spread(build(options["parameters"]), world_size)
    optimizer = layout.optimizer(model)
    inner = getattr(optimizer, "optim", optimizer)
    publisher = None
    at = [0.0]
    times: dict[str, list[float]] = {key: [] for key in ("step", "hook", "publish", "commit", "dcp")}
    inner.register_step_post_hook(lambda *_: at.__setitem__(0, time.perf_counter()))
    if layout.everyone or rank == 0:
        config = {
            "store": {"url": f"{folder}/stream"},
            "inference_dtype": "bfloat16",
            **(layout.config or {}),
        }
        publisher = deltasync.Publisher.attach(optimizer, model, config, writer=layout.writer())
    inner.register_step_post_hook(lambda *_: times["hook"].append(time.perf_counter() - at[0]))
    sizes: list[int] = []
    changed: list[float] = []
    for version in range(options["versions"]):
        for _ in range(options["steps"]):
            begin = time.perf_counter()
            optimizer.zero_grad()
            model(torch.randint(0, _VOCABULARY, (4, 64))).backward()
            layouts.clip(model, 1.0)
            optimizer.step()
            times["step"].append(at[0] - begin)
        if publisher is not None:
            held, handle = timed(partial(publisher.publish, version))
            begin = time.perf_counter()
            commit = handle.result()
            times["publish"].append(held)
            times["commit"].append(held + time.perf_counter() - begin)
            assert commit is not None
            sizes.append(commit.manifest.nbytes + len(commit.manifest.data))
            changed.append(commit.manifest.stats.changed / commit.manifest.stats.elements)
        else:
            distributed.barrier()
        target = Path(folder, "dcp", str(version))
        weights = {"model": get_model_state_dict(model)}
        times["dcp"].append(timed(partial(state_dict_saver.save, weights, checkpoint_id=target))[0])
    elements = publisher.catalog.tensors if publisher is not None else ()
    if publisher is not None:
        publisher.close()
    distributed.barrier()
    own = {key: statistics.median(values) for key, values in times.items() if values}
    results[rank] = own | {
        "bytes": statistics.median(sizes) if sizes else 0,
        "changed": statistics.median(changed) if changed else 0,
        "bf16_bytes": sum(spec.nbytes for spec in elements),
        "dcp_bytes": sum(f.stat().st_size for f in Path(folder, "dcp", "0").rglob("*") if f.is_file()),
        "anchor_bytes": sum(
            f.stat().st_size for f in Path(folder, "stream", "chunks", f"{0:020d}").rglob("*") if f.is_file()
        ),
    }
    distributed.destroy_process_group()


def run(name: str, options: dict[str, int]) -> dict[str, float]:
    """One layout, all its ranks as processes; times are the slowest rank's."""
    world_size = LAYOUTS[name].world_size
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Manager() as manager:
        results = manager.dict()
        ranks = [
            context.Process(target=rank_main, args=(name, rank, world_size, folder, options, results))
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise SystemExit(f"{name}: a rank has failed")
        told = dict(results).values()
    keys = dict.fromkeys(key for one in told for key in one)
    return {key: max(one.get(key, 0) for one in told) for key in keys} | {"ranks": world_size}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=20.0, help="millions (default 20)")
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps per version")
    parser.add_argument("--only", choices=NAMES, action="append", help="some of the layouts")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    options = {"parameters": int(args.parameters * 1e6), "versions": args.versions, "steps": args.steps}
    results: dict[str, Any] = {"cpus": os.cpu_count(), **options}
    print(
        f"{'':26} {'own step':>9} {'held/step':>10} {'held/publish':>13} {'DCP save':>9} {'ratio':>6} "
        f"{'changed':>8} {'sent':>8} {'DCP':>9} {'ratio':>6} {'anchor/bf16':>12}"
    )
    for name in args.only or NAMES:
        r = results[name] = run(name, options)
        print(
            f"{name:26} {r['step'] * 1e3:7.0f}ms {r['hook'] * 1e3:8.1f}ms {r['publish'] * 1e3:11.1f}ms "
            f"{r['dcp'] * 1e3:7.0f}ms {r['dcp'] / (r['publish'] + args.steps * r['hook']):6.1f} "
            f"{r['changed']:8.2%} {r['bytes'] / 1e6:6.2f}MB {r['dcp_bytes'] / 1e6:7.1f}MB "
            f"{r['dcp_bytes'] / r['bytes']:6.0f} {r['anchor_bytes'] / r['bf16_bytes']:12.3f}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
