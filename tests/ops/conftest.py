"""What the tests of ops run with."""

import pytest
import torch


@pytest.fixture(autouse=True)
def two_threads():
    """Kernels split long tensors over threads; tests that run side by side have one each otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
