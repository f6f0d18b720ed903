"""How DeepSpeed spreads a policy over ranks: each configuration as its users write it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from tests.trainers.layouts import DECAY, LR

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP16: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 8}}
CPU: dict[str, Any] = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}


@dataclass(frozen=True)
class Layout:
    """`kind`: how the adapter names it. `config`: of DeepSpeed, without the parts that all have (`settings`).

    `policy`: which. `prepare`: changes it in place. `optimizer`: of that, as deepspeed.initialize gets it;
    None: `config` says which. `inference_dtype`: of what is published.
    `accumulate`: batches per step. `sources`: of changes in what is trained. `untrained`: is published too.
    `offloads`: between steps the device is lent to others.
    """

    kind: str
    config: dict[str, Any]
    policy: str = "odd"
    optimizer: Callable[[nn.Module], Optimizer | None] = lambda model: AdamW(groups(model), lr=LR)
    prepare: Callable[[nn.Module], object] = lambda model: None
    construct: Callable[[dict[str, Any]], AbstractContextManager[object]] = lambda settings: nullcontext()
    inference_dtype: str = "bfloat16"
    accumulate: int = 2
    publisher: dict[str, Any] = field(default_factory=dict)
    sources: frozenset[str] = frozenset({"copy"})
    untrained: bool = True
    offloads: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """The whole configuration of DeepSpeed."""
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulate,
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **self.config,
        }


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameters with weight decay, and without."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if dimensions(p) > 1], "weight_decay": DECAY},
        {"params": [p for p in trained if dimensions(p) <= 1], "weight_decay": 0.0},
    ]


def dimensions(parameter: nn.Parameter) -> int:
    """ZeRO-3 leaves parameters empty."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def adamw(model: nn.Module) -> Optimizer:
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)


def cpu_adam(model: nn.Module, **options: Any) -> Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer: Optimizer = DeepSpeedCPUAdam(groups(model), lr=LR, **options)
    return optimizer


def leaves(model: nn.Module) -> None:
    """ZeRO-3 gathers each of these in one piece."""
    from deepspeed.utils import set_z3_leaf_modules
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    assert set_z3_leaf_modules(model, [Qwen3MLP])


def freeze(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name or "embed" in name:
            parameter.requires_grad = False


def partitioned(settings: dict[str, Any]) -> AbstractContextManager[object]:
    """Parameters are cut among the ranks as they are made."""
    import deepspeed

    context: AbstractContextManager[object] = deepspeed.zero.Init(config_dict_or_path=settings)
    return context


def zero3(persistent: int = 0, **options: Any) -> dict[str, Any]:
    """Sub groups of a few tensors; parameters of up to `persistent` elements stay whole on all ranks between steps."""
    return zero(
        3,
        sub_group_size=20_000,
        stage3_param_persistence_threshold=persistent,
        stage3_gather_16bit_weights_on_model_save=True,
        **options,
    )


def zero(stage: int, **options: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **options}}


SAME_DTYPE = {"data_types": {"grad_accum_dtype": "bf16"}}
FP32_GRADS = {"data_types": {"grad_accum_dtype": "fp32"}}

LAYOUTS = {
    "ZeRO-1": Layout("DeepSpeed ZeRO-1 (AdamW)", BF16 | SAME_DTYPE | zero(1)),
    "ZeRO-2": Layout("DeepSpeed ZeRO-2 (AdamW)", BF16 | zero(2), "even"),
    "BF16_Optimizer": Layout("DeepSpeed BF16_Optimizer (AdamW)", BF16 | FP32_GRADS | zero(1)),
    "ZeRO-1, DeepSpeedCPUAdam": Layout(
        "DeepSpeed ZeRO-1 (DeepSpeedCPUAdam)", BF16 | SAME_DTYPE | zero(1), optimizer=cpu_adam
    ),
    "ZeRO-2, offloaded": Layout(
        "DeepSpeed ZeRO-2 (DeepSpeedCPUAdam)", BF16 | zero(2, **CPU), optimizer=cpu_adam
    ),
    "BF16_Optimizer, DeepSpeedCPUAdam": Layout(
        "DeepSpeed BF16_Optimizer (DeepSpeedCPUAdam)",
        BF16 | FP32_GRADS | zero(1),
        optimizer=cpu_adam,
    ),
    "ZeRO-1, offloaded, torch's AdamW": Layout(
        "DeepSpeed ZeRO-1 (AdamW)", BF16 | SAME_DTYPE | zero(1, **CPU), accumulate=1
    ),
    "ZeRO-2, round robin": Layout(
        "DeepSpeed ZeRO-2 (AdamW)", BF16 | zero(2, round_robin_gradients=True, overlap_comm=True)
    ),
    "ZeRO-1, fp16": Layout(
        "DeepSpeed ZeRO-1 (AdamW)", FP16 | zero(1), inference_dtype="float16", accumulate=1
    ),
    "ZeRO-2, fp32": Layout("DeepSpeed ZeRO-2 (AdamW)", zero(2)),
    "ZeRO-2, frozen and unused": Layout(
        "DeepSpeed ZeRO-2 (AdamW)",
        BF16 | zero(2),
        "spare",
        prepare=freeze,
        optimizer=adamw,
    ),
    "ZeRO-2, LoRA": Layout(
        "DeepSpeed ZeRO-2 (AdamW), PEFT adapter 'default' alone",
        BF16 | zero(2),
        "lora",
        optimizer=adamw,
        publisher={"lora": "adapter"},
        untrained=False,
    ),
    "ZeRO-1, 16-bit masters": Layout(
        "DeepSpeed ZeRO-1 (DeepSpeedCPUAdam)",
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
        | SAME_DTYPE
        | zero(1, **CPU),
        optimizer=lambda model: cpu_adam(model, fp32_optimizer_states=False),
    ),
    "ZeRO-2, offloaded between steps": Layout(
        "DeepSpeed ZeRO-2 (AdamW)", BF16 | zero(2), "even", offloads=True, accumulate=1
    ),
    "ZeRO-1, snapshot": Layout(
        "DeepSpeed ZeRO-1 (AdamW)",
        BF16 | SAME_DTYPE | zero(1),
        publisher={"detect": "snapshot"},
        sources=frozenset({"snapshot"}),
    ),
    "ZeRO-3": Layout("DeepSpeed ZeRO-3 (AdamW)", BF16 | zero3()),
    "ZeRO-3, zero.Init, persistent": Layout(
        "DeepSpeed ZeRO-3 (DeepSpeedCPUAdam)",
        BF16 | zero3(persistent=1000),
        optimizer=cpu_adam,
        construct=partitioned,
    ),
    "ZeRO-3, offloaded": Layout(
        "DeepSpeed ZeRO-3 (DeepSpeedCPUAdam)",
        BF16 | zero3(persistent=1000, **CPU, offload_param={"device": "cpu", "pin_memory": False}),
        "even",
        optimizer=cpu_adam,
        prepare=leaves,
    ),
    "ZeRO-3, offloaded, torch's AdamW": Layout("DeepSpeed ZeRO-3 (AdamW)", BF16 | zero3(**CPU), accumulate=1),
    "ZeRO-3, fp16": Layout(
        "DeepSpeed ZeRO-3 (AdamW)", FP16 | zero3(), inference_dtype="float16", accumulate=1
    ),
    "ZeRO-3, fp32": Layout("DeepSpeed ZeRO-3 (AdamW)", zero3(persistent=10_000), accumulate=1),
    "ZeRO-3, frozen and unused": Layout(
        "DeepSpeed ZeRO-3 (AdamW)",
        BF16 | zero3(persistent=100),
        "spare",
        prepare=freeze,
        optimizer=lambda model: AdamW([p for p in model.parameters() if p.requires_grad], lr=LR),
    ),
    "ZeRO-3, torch_autocast": Layout(
        "DeepSpeed ZeRO-3 (AdamW)", {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}} | zero3()
    ),
    "ZeRO-3, LoRA": Layout(
        "DeepSpeed ZeRO-3 (AdamW), PEFT adapter 'default' alone",
        BF16 | zero3(persistent=500),
        "lora",
        optimizer=adamw,
        publisher={"lora": "adapter"},
        untrained=False,
    ),
    "ZeRO-3, offloaded between steps": Layout(
        "DeepSpeed ZeRO-3 (AdamW)", BF16 | zero3(), "even", offloads=True, accumulate=1
    ),
    "ZeRO-3, snapshot": Layout(
        "DeepSpeed ZeRO-3 (AdamW)",
        BF16 | zero3(),
        publisher={"detect": "snapshot"},
        sources=frozenset({"snapshot"}),
    ),
}
