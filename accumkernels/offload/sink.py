"""Takes the gradients of a backward to host memory, and adds them there once the backward has ended."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..buffers.flat import FlatBuffer, Segment
from ..capture.inbox import Bucket, Captured, MicroBatch, Sink
from ..devices import captures, current_stream
from ..ops.reference import flat
from .host import Slot, Slots, event


class HostBucket:
    """A bucket whose gradients are on the host, or will be.

    Attributes:
        parts: The gradients, by flat buffer, as views of slots. Nobody may read them before `wait`.
    """

    def __init__(self, slots: Slots) -> None:
        self.parts: list[tuple[FlatBuffer, Captured]] = []
        self.copied: list[torch.Event] = []
        self.used: list[Slot] = []
        self._slots = slots

    def wait(self) -> None:
        """Wait until the copies have ended; the thread sleeps, and other threads run."""
        while self.copied:
            self.copied[-1].synchronize()
            self.copied.pop()

    def free(self) -> None:
        """Let the next micro-batch have the slots; only once, since they are its from then on."""
        self.parts = []
        used, self.used = self.used, []
        copied, self.copied = self.copied, []  # left where nobody has waited: the gradients are not wanted
        self._slots.free(used, copied)


class _Alive(NamedTuple):
    """Tensors on a device that a copy stream reads, and what they were made of."""

    tensors: list[Tensor]
    streams: list[torch.Stream]  # that made them, where their memory is used again
    copied: torch.Event


class _Addition(NamedTuple):
    """The worker's job: to add one micro-batch."""

    buckets: list[HostBucket]
    add: Callable[[Sequence[HostBucket]], None]

    def run(self) -> None:
        with torch.no_grad():
            self.add(self.buckets)

    def drop(self) -> None:
        """Let go of all gradients: they were added, or are not wanted any more."""
        for bucket in self.buckets:
            bucket.free()


class Offload(Sink):
    """Gradients on their way to host memory: the sink of backwards whose sums are there.

    Buckets are copied while backward runs; nothing is added before it has ended, so that a backward that fails leaves
    the sums as they were. The host waits for nothing but slots that the micro-batch before has not left yet.

    On each device a copy stream waits for the stream that made a bucket, copies it and records an event. Whoever made
    the bucket before that waits for its event, on the device, before the gradients are let go: at most two buckets and
    one gradient are alive. (`Tensor.record_stream` would be safe, too, but bounds nothing: the host runs ahead of the
    device, and so would the memory that waits for copies.)

    Args:
        slots: Where gradients are copied to.
        owner: The worker ends with it.
    """

    def __init__(self, slots: Slots, owner: object) -> None:
        self._slots = slots
        self._worker = Worker(owner)
        self._copiers: dict[torch.device, torch.Stream] = {}
        self._alive: dict[torch.device, _Alive] = {}
        self._buckets: list[HostBucket] = []  # of the micro-batch that runs
        self._sources: Callable[[], Sequence[torch.Stream]] = tuple

    def begin(self, sources: Callable[[], Sequence[torch.Stream]]) -> None:
        """Tell which streams have computed the current micro-batch's gradients."""
        self._sources = sources

    # ---- as a sink: see `Sink`

    def add(self, bucket: Bucket, micro_batch: MicroBatch) -> None:
        """Copy gradients to the host, without waiting for the device.

        Raises:
            RuntimeError: A gradient is sparse or has the wrong size, or the current stream is captured.
        """
        host = HostBucket(self._slots)
        self._buckets.append(host)
        devices: dict[torch.device, tuple[list[Tensor], list[Tensor], list[Tensor]]] = {}
        for buffer, (indices, grads) in bucket:
            # Order them on their device. A copy between layouts would go through a temporary that is read too early.
            ordered = buffer.in_memory_order(indices, grads)
            for position, (index, grad) in enumerate(zip(indices, ordered, strict=True)):
                if grad.device.type == "cpu":
                    continue
                segment = buffer.segments[index]
                there = self._take(host, segment, grad)
                outputs, inputs, made_of = devices.setdefault(grad.device, ([], [], []))
                outputs.append(there)
                inputs.append(flat(grad))
                made_of.append(grads[position])
                ordered[position] = there.as_strided(segment.shape, segment.stride)
            host.parts.append((buffer, Captured(list(indices), ordered)))
        for device, (outputs, inputs, made_of) in devices.items():
            self._copy(host, device, outputs, inputs, made_of)

    def _take(self, host: HostBucket, segment: Segment, grad: Tensor) -> Tensor:
        """Host memory for a gradient, 1-d: its slot, once nobody uses that; or memory of its own.

        It gets that if it is the second of its parameter in this micro-batch, or wider than the parameter.
        """
        slot, size = self._slots[segment.param], grad.nbytes
        with self._slots.changed:
            if slot.holder is self._buckets or size > slot.memory.numel():
                return self._slots.pinned(size).view(grad.dtype)
            self._slots.changed.wait_for(lambda: slot.holder is None)
            host.used.append(slot)  # first: a slot that nobody frees would be waited for forever
            slot.holder = self._buckets
        return slot.memory[:size].view(grad.dtype)

    def _copy(
        self,
        host: HostBucket,
        device: torch.device,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        made_of: Sequence[Tensor] = (),
    ) -> None:
        """Copy gradients of one device on its copy stream, and let go of those before."""
        current = current_stream(device)
        if captures(current, device):
            raise RuntimeError(
                "cpu_offload: gradients cannot be taken to host memory inside the capture of a graph, whose replays "
                "would have nobody to add them: capture the forward alone, or leave cpu_offload out"
            )
        if device not in self._copiers:
            self._copiers[device] = torch.Stream(device)
        copier = self._copiers[device]
        copier.wait_stream(current)
        copied = event(device)
        with copier:
            for output, input in zip(outputs, inputs, strict=True):
                output.copy_(input, non_blocking=True)
            copied.record()
        host.copied.append(copied)
        made_by = [stream for stream in self._sources() if stream.device == device]
        self._let_go(device)
        self._alive[device] = _Alive([*inputs, *made_of], [current, *made_by], copied)

    def _let_go(self, device: torch.device) -> None:
        """Let go of the older bucket's gradients, whose memory is used again after their copy."""
        alive = self._alive.pop(device, None)
        if alive is not None:
            for stream in alive.streams:
                with stream:
                    alive.copied.wait()

    # ---- a micro-batch that has ended

    def submit(self, micro_batch: MicroBatch, add: Callable[[Sequence[HostBucket], MicroBatch], None]) -> None:
        """Hand the micro-batch whose buckets were copied to the worker.

        Args:
            micro_batch: The micro-batch; scalars of it that are on a device travel as gradients do.
            add: Adds buckets, each after its `wait`; runs in the worker's thread.
        """
        scalars = HostBucket(self._slots)
        values: dict[str, Any] = {k: v for k, v in micro_batch._asdict().items() if isinstance(v, Tensor)}
        values = {name: self._scalar(scalars, value) for name, value in values.items()}
        moved = micro_batch._replace(**values)
        for device in list(self._alive):
            self._let_go(device)
        buckets, self._buckets = self._buckets, []

        def run(arrived: Sequence[HostBucket]) -> None:
            scalars.wait()
            add(arrived, moved)

        self._worker.put(_Addition(buckets, run))

    def _scalar(self, host: HostBucket, value: Tensor) -> Tensor:
        if value.device.type == "cpu":
            return value.clone()
        value = value.detach().reshape(1)
        there = self._slots.pinned(value.nbytes).view(value.dtype)
        self._copy(host, value.device, [there], [value])
        return there.reshape(())

    def discard(self) -> None:
        """Drop the micro-batch that runs: nothing of it was added."""
        for device in list(self._alive):
            self._let_go(device)
        buckets, self._buckets = self._buckets, []
        for bucket in buckets:
            bucket.free()

    # ---- before sums are read or dropped

    @property
    def failed(self) -> bool:
        """Whether the worker raised, so that the sums may hold a part of a micro-batch."""
        return self._worker.error is not None

    def wait(self) -> None:
        """Wait until all that was submitted is in the sums. An interrupt loses nothing.

        Raises:
            RuntimeError: the worker raised, and says what; the window is lost.
        """
        self._worker.wait()
        error = self._worker.error
        if error is not None:
            raise RuntimeError(
                f"cpu_offload: adding gradients in host memory failed: {type(error).__name__}: {error}. The window is "
                "broken: drop it by acc.zero_()"
            ) from error

    def drop(self) -> None:
        """Drop what was submitted and not added, and an error with it."""
        self.discard()
        self._worker.cancel()

    def remove(self) -> None:
        """End the worker."""
        self.drop()
        self._worker.stop()


# ---- A thread that runs jobs in order, while the threads that run the model go on


class Worker:
    """Runs jobs in a daemon thread, which ends with `stop`, with its owner, and with the process.

    Args:
        owner: Held weakly, by the thread too.

    Attributes:
        error: What a job raised; the others were dropped then.
    """

    def __init__(self, owner: object) -> None:
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._waiting: deque[_Addition] = deque()
        self._running = self._stopped = False
        self._thread: threading.Thread | None = None
        weakref.finalize(owner, self.stop)

    def put(self, job: _Addition) -> None:
        """Run a job after those before it."""
        with self._changed:
            self._waiting.append(job)
            self._changed.notify_all()
        if self._thread is None or not self._thread.is_alive():  # a fork has no threads
            self._thread = threading.Thread(target=self._run, name="accumkernels-offload", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until all jobs have run. An interrupt leaves them to the thread."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._running)

    def cancel(self) -> None:
        """Drop the jobs that have not begun, wait for the one that runs, and forget an error."""
        with self._changed:
            self._drop()
        self.wait()
        self.error = None

    def stop(self) -> None:
        """End the thread, after the job that it runs."""
        with self._changed:
            self._stopped = True
            self._drop()
            self._changed.notify_all()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()  # or the end of the process would interrupt it inside an op

    def _drop(self) -> None:
        while self._waiting:
            self._waiting.popleft().drop()

    def _run(self) -> None:
        """Run jobs until stopped: the thread's whole life."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopped)
                if self._stopped:
                    return
                job = self._waiting.popleft()
                self._running = True
            error: BaseException | None = None
            try:
                job.run()
            except BaseException as raised:
                error = raised.with_traceback(None)  # whose frames would keep gradients
            job.drop()
            del job  # before anybody is told that nothing runs
            with self._changed:
                self._running = False
                if error is not None:
                    self.error = error
                    self._drop()
                self._changed.notify_all()
