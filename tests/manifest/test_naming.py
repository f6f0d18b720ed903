"""Canonical names are those of the checkpoint, whatever wraps the modules."""

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.nn.parallel import DataParallel

from manifest.naming import canonical_tensors


class Block(nn.Module):
    """With a layer that merely is called as wrappers call theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 3)
        self._checkpoint_wrapped_module = nn.Linear(3, 2)


def test_activation_checkpointing_leaves_no_trace_in_names() -> None:
    plain = nn.Sequential(Block(), nn.Sequential(Block()))
    wanted = canonical_tensors(plain)
    assert list(wanted) == list(plain.state_dict())
    nested = plain[1]
    assert isinstance(nested, nn.Sequential)
    nested[0] = checkpoint_wrapper(offload_wrapper(nested[0]))
    plain[0] = checkpoint_wrapper(DataParallel(plain[0]))
    found = canonical_tensors(checkpoint_wrapper(plain))
    assert list(found) == list(wanted)
    assert all(found[name] is tensor for name, tensor in wanted.items())
