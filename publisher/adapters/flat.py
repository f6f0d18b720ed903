"""Parameters that lie one after the other in a flat buffer, of which a rank steps its own part in fp32."""

from dataclasses import dataclass

import torch

from publisher.adapters.base import Piece, View


@dataclass(frozen=True, slots=True)
class Flat:
    """`own`: this rank's part of a buffer of parameters. `master`: what an optimizer steps in its place, element by
    element, and copies to it only after the step. Both flat, of one size.
    """

    own: torch.Tensor
    master: torch.Tensor

    def piece(self, name: str, start: int, at: int, numel: int) -> Piece:
        """`numel` elements from `at` on, which are those of tensor `name` from `start` on."""
        view = View(at, (numel,), (1,))
        return Piece(
            name, view.of(self.own), start, key=id(self.master), view=view, master=view.of(self.master)
        )
