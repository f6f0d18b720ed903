"""Settings of the whole suite."""

import importlib.util
import os

import torch

# What looks into SGLang needs it in its own process: `make test` runs those tests in SGLang's environment.
collect_ignore = [] if importlib.util.find_spec("sglang") else ["sglang_trace"]

# Workers share two cores; threads that wait for each other cost more than they bring. Children inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
torch.set_num_threads(1)
