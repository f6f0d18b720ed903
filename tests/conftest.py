"""Settings of the whole suite."""

import os

import torch

# Workers share two cores; threads that wait for each other cost more than they bring. Children inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
torch.set_num_threads(1)
