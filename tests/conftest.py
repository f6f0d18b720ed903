"""Settings of the whole suite."""

import importlib.util
import os
import sys
from pathlib import Path

import hypothesis
import torch

# How long an example takes says how busy the machine is, and nothing about the code.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")

# Workers share two cores; threads that wait for each other cost more than they bring. Children inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
torch.set_num_threads(1)

# What looks into SGLang or Megatron-Core needs it in its own process: `make test` runs those tests in environments that
# have it.
collect_ignore = [
    tests
    for module, tests in (("sglang", "sglang_trace"), ("megatron", "megatron"))
    if importlib.util.find_spec(module) is None
]
if "sglang_trace" not in collect_ignore:
    # There, SGLang's modules can be imported as in the servers of deltasync.demo.sglang_server.
    os.environ.update(SGLANG_USE_CPU_ENGINE="1", TORCHDYNAMO_DISABLE="1", CUDA_VISIBLE_DEVICES="")
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "deltasync" / "demo" / "sglang_cpu"))
    importlib.import_module("sitecustomize")
