"""Streams drawn anew for each stage of a loop, and ordered as torch demands of its users."""

from __future__ import annotations

import contextlib
import random

import torch

from tests.simulated_device.training import on


class Stages:
    """Draws a stream for each stage, which waits for the stage before and is waited for by the next."""

    def __init__(self, seed, devices):
        self.random = random.Random(seed)
        self.devices = devices
        self.streams = {d: [torch.Stream(d) for _ in range(3)] for d in devices}

    def __call__(self, stage):
        return self.drawn()

    def drawn(self):
        """All devices', in one context."""
        stack = contextlib.ExitStack()
        for device in self.devices:
            if self.random.random() < 0.8:
                stack.enter_context(on(self.random.choice(self.streams[device])))
        return stack


class Chain(Stages):
    """The same with one event from stage to stage, and no detour by the default stream."""

    def __init__(self, seed, devices):
        super().__init__(seed, devices)
        self.last = {device: torch.accelerator.current_stream(device) for device in devices}

    def drawn(self):
        stack = contextlib.ExitStack()
        for device in self.devices:
            stream = self.random.choice(self.streams[device])
            stream.wait_stream(self.last[device])
            stack.enter_context(stream)
            self.last[device] = stream
        return stack

    def end(self):
        """Return to the default streams."""
        for device in self.devices:
            torch.accelerator.current_stream(device).wait_stream(self.last[device])
