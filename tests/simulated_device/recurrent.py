"""The LSTM cell, which torch asks an accelerator to have as one op and the CPU has not."""

from __future__ import annotations

import torch
from torch import Tensor

library = torch.library.Library("aten", "IMPL")


def lstm_cell(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(hy, cy, workspace), the workspace being the activated gates."""
    gates = input_gates + hidden_gates
    if input_bias is not None and hidden_bias is not None:
        gates = gates + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, ...]:
    """(gradient of the gates, of cx, of a bias)."""
    i, f, g, o = workspace.chunk(4, 1)
    tanh = cy.tanh()
    grad_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    total = grad_hy * o * (1 - tanh * tanh)
    if grad_cy is not None:
        total = total + grad_cy
    parts = [total * g * i * (1 - i), total * cx * f * (1 - f), total * i * (1 - g * g), grad_hy * tanh * o * (1 - o)]
    gates = torch.cat(parts, 1)
    return gates, total * f, gates.sum(0) if has_bias else None


def register() -> None:
    """For the simulated device."""
    library.impl("_thnn_fused_lstm_cell", lstm_cell, "PrivateUse1")
    library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward, "PrivateUse1")
