"""Wrong arguments of ops are named before anything is written."""

import pytest
import torch

from tests.support.backends import VALIDATING, place, scalar


def on(tensor, device):
    """A copy with the same strides, dense or not."""
    base = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return place(base, device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def accumulate(backend, **changes):
    """Call the op with some arguments changed; none of it may be written."""
    device = backend.device
    arguments = {
        "buffer": torch.zeros(64),
        "state": torch.zeros(4, dtype=torch.float64),
        "grads": [torch.ones(3), torch.ones(4)],
        "segments": [0, 1],
        "overwrite": [False, False],
        "layout": torch.tensor([[0, 3], [32, 4]]),
        "layout_host": torch.tensor([[0, 3], [32, 4]]),
        "flags": torch.zeros(2, dtype=torch.int32),
        **changes,
    }
    for name, value in arguments.items():
        if name != "layout_host" and isinstance(value, torch.Tensor):
            arguments[name] = value.to(device)
        elif name == "grads":
            arguments[name] = [on(grad, device) for grad in value]
    try:
        backend.module.accumulate_(**arguments)
    finally:
        assert not arguments["buffer"].any()
        assert not arguments["state"].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"buffer": torch.zeros(64, dtype=torch.float16)}, "buffer is torch.float16, expected torch.float32"),
        ({"state": torch.zeros(3, dtype=torch.float64)}, "state has 3 elements, expected at least 4"),
        ({"state": torch.zeros(4)}, "state is torch.float32, expected torch.float64"),
        ({"grads": [torch.ones(3), torch.ones(5)]}, r"grads\[1\] has 5 elements, expected 4"),
        ({"grads": [torch.ones(3), torch.ones(4, dtype=torch.int32)]}, r"grads\[1\] is torch.int32, expected"),
        ({"grads": [torch.ones(3), torch.ones(8)[::2]]}, r"grads\[1\] is not dense"),
        ({"grads": [torch.ones(3), torch.ones(1).expand(4)]}, r"grads\[1\] is not dense"),
        ({"grads": [torch.ones(3)]}, "segments has 2 elements, expected 1|overwrite has 2 elements, expected 1"),
        ({"overwrite": [False] * 3}, "overwrite has 3 elements, expected 2"),
        ({"overwrite": []}, "overwrite has 0 elements, expected 2"),
        ({"segments": [0]}, "segments has 1 elements, expected 2"),
        (
            {"segments": [], "grads": [torch.ones(3), torch.ones(4)] * 2, "overwrite": [False]},
            r"segments\[2\] is 2, expected 0 to 1",
        ),
        ({"grads": [torch.ones(3), torch.ones(2, 2).t()], "contiguous": True}, r"grads\[1\] is not contiguous"),
        ({"segments": [0, 2]}, r"segments\[1\] is 2, expected 0 to 1"),
        ({"segments": [-1, 1]}, r"segments\[0\] is -1, expected 0 to 1"),
        ({"segments": [1, 1], "grads": [torch.ones(4)] * 2}, r"segments\[1\] repeats segment 1"),
        ({"layout_host": torch.tensor([[0, 3], [61, 4]])}, r"layout_host\[1\] is \(61, 4\), outside the buffer"),
        ({"layout_host": torch.tensor([[-1, 3], [32, 4]])}, r"layout_host\[0\] is \(-1, 3\), outside the buffer"),
        ({"layout_host": torch.tensor([0, 3])}, "layout_host has another shape"),
        ({"flags": torch.zeros(1, dtype=torch.int32)}, "flags has 1 elements, expected at least 2"),
        ({"flags": torch.zeros(2)}, "flags is torch.float32, expected torch.int32"),
        ({"loss_scale": torch.ones(1, dtype=torch.float64)}, "loss_scale is torch.float64, expected torch.float32"),
        ({"weight_tensor": torch.ones(2, dtype=torch.float64)}, "weight_tensor has 2 elements, expected 1"),
        ({"drop": torch.ones(1)}, "drop is torch.float32, expected torch.float64"),
        ({"sq_norm": torch.ones(1, dtype=torch.float64)}, "sq_norm has 1 elements, expected at least 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
@pytest.mark.parametrize("backend", VALIDATING)
def test_accumulate(backend, changes, message):
    """The op, the argument with its index, what was expected and what was found; nothing was written."""
    with pytest.raises(RuntimeError, match="accumulate_: (" + message + ")"):
        accumulate(backend, **changes)


@pytest.mark.parametrize("backend", VALIDATING)
def test_other_ops(backend):
    """Lists of unequal length, sizes that differ, orders of norm that there are not."""
    there = backend.device
    with pytest.raises(RuntimeError, match=r"scaled_copy_: inputs has 1 elements, expected 2 as outputs"):
        backend.module.scaled_copy_([torch.ones(3, device=there)] * 2, [torch.ones(3, device=there)])
    with pytest.raises(RuntimeError, match=r"scaled_copy_: inputs\[0\] has 4 elements, expected 3"):
        backend.module.scaled_copy_([torch.ones(3, device=there)], [torch.ones(4, device=there)])
    with pytest.raises(RuntimeError, match="norm_: ord is 1, expected 2 or inf"):
        backend.module.norm_(scalar(0.0).to(there), [torch.ones(3, device=there)], ord=1.0)
    with pytest.raises(RuntimeError, match=r"norm_: tensors\[0\] is torch.int64"):
        backend.module.norm_(scalar(0.0).to(there), [torch.ones(3, dtype=torch.int64, device=there)])
    flags = torch.zeros(1, dtype=torch.int32, device=there)
    with pytest.raises(RuntimeError, match=r"check_finite_: segments\[0\] is 1, expected 0 to 0"):
        backend.module.check_finite_([torch.ones(3, device=there)], [1], scalar(0.0).to(there), flags)
