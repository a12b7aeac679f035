"""What a user's loop calls runs without a graph, and leaves grad mode as it was."""

from __future__ import annotations

import pytest
import torch

from accumkernels.hooks import profiled


@pytest.mark.parametrize("enabled", [True, False])
def test_no_graph_inside_and_the_same_mode_afterwards(enabled):
    """Also where the call raises."""

    @profiled
    def square(x):
        assert not torch.is_grad_enabled()
        if x.isnan():
            raise ValueError("nan")
        return x * x

    with torch.set_grad_enabled(enabled):
        assert not square(torch.ones((), requires_grad=True)).requires_grad
        assert torch.is_grad_enabled() is enabled
        with pytest.raises(ValueError, match="nan"):
            square(torch.tensor(torch.nan))
        assert torch.is_grad_enabled() is enabled
