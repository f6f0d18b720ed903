"""Imported where processes are forked from: what a first publish loads or compiles, each of them then has.

torch imports its compiler for the first optimizer, and numba loads kernels for the first step: two seconds together.
"""

import torch

from tests.publisher.zoo import Zoo, adamw, attach, fresh_store, train

torch.set_num_threads(1)
_model = Zoo()
_optimizer = adamw(_model)
with attach(_model, _optimizer, fresh_store()) as _publisher:
    train(_model, _optimizer)
    _publisher.publish().result()
