"""The CUDA streams that compute gradients, and those that read them."""

from __future__ import annotations

import torch


def _raw(device: torch.device) -> int:
    """Return the current stream's handle, in a twentieth of the time of `torch.cuda.current_stream`, per gradient."""
    return torch._C._cuda_getCurrentRawStream(device.index)


class Streams:
    """The streams that computed some tensors; a reader on another stream waits for all of them.

    Attributes:
        seen: By device and handle; empty on CPUs.
    """

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], torch.cuda.Stream] = {}

    def see(self, device: torch.device) -> None:
        """Note a CUDA device's current stream before the tensor that it computes is passed on."""
        key = (device.index, _raw(device))
        if key not in self.seen:
            self.seen[key] = torch.cuda.current_stream(device)

    def join(self) -> None:
        """Make the current streams wait for those noted, and note them too."""
        for stream in list(self.seen.values()):
            torch.cuda.current_stream(stream.device).wait_stream(stream)
            self.see(stream.device)

    def forget(self) -> None:
        """Forget the streams, because their tensors were read."""
        self.seen.clear()


class StreamOrder:
    """Orders the streams that write something on CUDA devices in one backward, each after the one before it.

    Attributes:
        writers: By index of the device, the handle and the stream that wrote last; empty between backwards.
    """

    def __init__(self) -> None:
        self.writers: dict[int, tuple[int, torch.cuda.Stream]] = {}

    def take(self, device: torch.device) -> None:
        """Make the current stream of a device write next; does nothing for other devices."""
        if device.type != "cuda":
            return
        raw = _raw(device)
        last = self.writers.get(device.index)
        if last is None or last[0] != raw:
            stream = torch.cuda.current_stream(device)
            if last is not None:
                stream.wait_stream(last[1])
            self.writers[device.index] = (raw, stream)

    def end(self) -> None:
        """Make the current streams of all devices wait for the last writers."""
        for _, stream in list(self.writers.values()):
            self.take(stream.device)
        self.writers.clear()
