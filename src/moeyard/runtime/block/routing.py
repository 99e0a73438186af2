"""Where each row lies when rows are grouped by expert, and what a set of kernels must offer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

Activation = Callable[[torch.Tensor], torch.Tensor]


class Routing(NamedTuple):
    """The rows of T tokens with K choices each, grouped by expert; a pair (token, choice) is number token * K + choice.

    A choice outside 0..E-1 is no choice: its row comes after all experts' rows, no expert computes it, it adds nothing. `pair` may end
    with the experts' rows: then there are no rows but theirs.
    """

    row: torch.Tensor  # int32 [T, K]: the row of each pair
    pair: torch.Tensor  # int32 [T * K] or fewer: the pair of each row
    ends: torch.Tensor  # int32 [E]: where each expert's rows end


class Scale(NamedTuple):
    """A factor per row, kept in the order of pairs: row i is multiplied by weights[pair[i]]."""

    weights: torch.Tensor  # [T, K]
    pair: torch.Tensor  # int32 [T * K]


class Back(NamedTuple):
    """What the activation's backward pass finds out in one go."""

    product: torch.Tensor  # gradient of the gate/up product
    inner: torch.Tensor  # the activation again, times the scale
    scale: torch.Tensor | None  # gradient of the scale's weights


class Few(Protocol):
    """Matmuls that gather their rows while loading. matrix: [E, in, out], in whatever strides."""

    def gate_up(
        self, x: torch.Tensor, routing: Routing, matrix: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(gate/up product, inner rows by SwiGLU) of every row."""
        ...

    def times(
        self, x: torch.Tensor, routing: Routing, matrix: torch.Tensor, *, gathered: bool
    ) -> torch.Tensor:
        """Every row times its expert's matrix; gathered: x has a row for each token instead."""
        ...


class Parts(Protocol):
    """What lies around the grouped matmuls. Plain torch has all of it; Triton does it in one kernel each."""

    def route(self, index_TK: torch.Tensor, num_experts: int, refuse: str | None = None) -> Routing:
        """refuse: what the device says if a choice is none."""
        ...

    def few(self, x_TD: torch.Tensor, rows: int, num_experts: int) -> Few | None:
        """Matmuls for so few rows an expert, if there are any."""
        ...

    def spread(self, x_TD: torch.Tensor, routing: Routing) -> torch.Tensor:
        """A copy of its token for every row."""
        ...

    def outer(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        routing: Routing,
        counts: Sequence[int] | None,
        *,
        gathered: tuple[bool, bool],
    ) -> torch.Tensor:
        """[E, left's width, right's width]: sums over an expert's rows; gathered: that side has a row for each token. In little memory
        rather than little time."""
        ...

    def gather_sum(
        self,
        rows: torch.Tensor,
        routing: Routing,
        weights_TK: torch.Tensor | None,
        dtype: torch.dtype | None = None,
        *,
        whole: bool = False,
    ) -> torch.Tensor:
        """Each token's rows summed with its weights, or plainly. Wider than 16 bits inside, never as [T, K, D]; given out in
        `dtype`, or the rows'. whole: the host knows that every choice is one."""
        ...

    def activate(self, product: torch.Tensor, activation: Activation | None) -> torch.Tensor:
        """The inner rows from the gate/up product; None is SwiGLU."""
        ...

    def activate_back(
        self,
        product: torch.Tensor,
        d_inner: torch.Tensor,
        activation: Activation | None,
        scale: Scale | None,
        ends: torch.Tensor,
        *,
        over: bool,
    ) -> Back:
        """From the gradient of the unscaled inner rows, which is overwritten; `over`: the product may be, too."""
        ...

    def add_bias(self, rows: torch.Tensor, bias: torch.Tensor, ends: torch.Tensor) -> None:
        """rows += its expert's bias, in place."""
        ...

    def bias_dot(self, rows: torch.Tensor, bias: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """float [rows]: each row times its expert's bias."""
        ...

    def clear_tail(self, rows: torch.Tensor, ends: torch.Tensor) -> None:
        """Zero what no expert wrote: rows from ends[-1] on."""
        ...
