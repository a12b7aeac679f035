"""`torch.sim`, which `torch.get_device_module("sim")` returns: what torch.cuda has, and torch itself asks for."""

from __future__ import annotations

from typing import Any

import torch

_accelerator = torch.accelerator
_initialized = True  # torch.utils.checkpoint looks at it
Stream = torch.Stream
Event = torch.Event


def _index(device: Any) -> int:
    if device is None:
        return current_device()
    device = torch.device("sim", device) if isinstance(device, int) else torch.device(device)
    return current_device() if device.index is None else device.index


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    pass


def device_count() -> int:
    return torch._C._accelerator_hooks_device_count()


def current_device() -> int:
    return _accelerator.current_device_index()


def set_device(device: Any) -> None:
    _accelerator.set_device_index(_index(device))


def get_device_name(device: Any = None) -> str:
    return "simulated device"


class device(_accelerator.device_index):
    """Makes a device the current one, as `torch.cuda.device`."""

    def __init__(self, device: Any):
        super().__init__(_index(device))


def current_stream(device: Any = None) -> torch.Stream:
    return _accelerator.current_stream(_index(device))


def default_stream(device: Any = None) -> torch.Stream:
    return torch.Stream(
        stream_id=0, device_index=_index(device), device_type=torch._C._autograd.DeviceType.PrivateUse1.value
    )


def set_stream(stream: torch.Stream) -> None:
    _accelerator.set_stream(stream)


def stream(stream: torch.Stream) -> torch.Stream:
    return stream  # streams are context managers


def synchronize(device: Any = None) -> None:
    _accelerator.synchronize(_index(device))


def is_current_stream_capturing() -> bool:
    return torch.ops.sim.capturing()


# Random numbers.


def _generator(device: Any = "sim") -> torch.Generator:
    return default_generators[_index(device)]


class _Generators:
    def __getitem__(self, index: int) -> torch.Generator:
        return torch.ops.sim.default_generator(index)

    def __len__(self) -> int:
        return device_count()


default_generators = _Generators()


def get_rng_state(device: Any = "sim") -> torch.Tensor:
    return _generator(device).get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state(state: torch.Tensor, device: Any = "sim") -> None:
    _generator(device).set_state(state)


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    _generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _generator(index).manual_seed(seed)


def initial_seed() -> int:
    return _generator().initial_seed()


# Memory.


def memory_allocated(device: Any = None) -> int:
    return _accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: Any = None) -> int:
    return _accelerator.max_memory_allocated(_index(device))


def memory_reserved(device: Any = None) -> int:
    return _accelerator.memory_reserved(_index(device))


def max_memory_reserved(device: Any = None) -> int:
    return _accelerator.max_memory_reserved(_index(device))


def memory_stats(device: Any = None) -> dict[str, Any]:
    return _accelerator.memory_stats(_index(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    _accelerator.reset_peak_memory_stats(_index(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return _accelerator.get_memory_info(_index(device))


def empty_cache() -> None:
    _accelerator.empty_cache()


# Autocast.


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True
