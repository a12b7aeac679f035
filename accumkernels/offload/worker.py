"""A thread that runs jobs in order, while the threads that run the model go on."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from typing import Protocol


class Job(Protocol):
    """What the worker runs."""

    def run(self) -> None:
        """Run it."""

    def drop(self) -> None:
        """Let go of everything, without having run or after a failure."""


class _Jobs:
    """What the thread and its owner share; the thread keeps nothing else alive."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: deque[Job] = deque()
        self.running = False
        self.stopped = False
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None
        self.process = os.getpid()

    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def drop(self) -> None:
        while self.waiting:
            self.waiting.popleft().drop()

    def run(self) -> None:
        """Run jobs until stopped: the thread's whole life."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or self.stopped)
                if self.stopped:
                    return
                job = self.waiting.popleft()
                self.running = True
            error: BaseException | None = None
            try:
                job.run()
            except BaseException as raised:
                error = raised.with_traceback(None)  # whose frames would keep gradients
            job.drop()
            del job  # before anybody is told that nothing runs
            with self.changed:
                self.running = False
                if error is not None:
                    self.error = error
                    self.drop()
                self.changed.notify_all()


class Worker:
    """Runs jobs in a daemon thread, which ends with `stop`, with its owner, and with the process.

    Args:
        owner: Held weakly.
    """

    def __init__(self, owner: object) -> None:
        self._jobs = _Jobs()
        self._finalizer = weakref.finalize(owner, _stop, self._jobs)

    @property
    def error(self) -> BaseException | None:
        """What a job raised; the others were dropped then."""
        return self._jobs.error

    def put(self, job: Job) -> None:
        """Run a job after those before it."""
        with self._jobs.changed:
            self._jobs.waiting.append(job)
            self._jobs.changed.notify_all()
        if self._jobs.thread is None or self._jobs.process != os.getpid():  # a fork has no threads
            self._jobs.process = os.getpid()
            self._jobs.thread = threading.Thread(target=self._jobs.run, name="accumkernels-offload", daemon=True)
            self._jobs.thread.start()

    def wait(self) -> None:
        """Wait until all jobs have run. An interrupt leaves them to the thread."""
        with self._jobs.changed:
            self._jobs.changed.wait_for(self._jobs.is_idle)

    def cancel(self) -> None:
        """Drop the jobs that have not begun, wait for the one that runs, and forget an error."""
        with self._jobs.changed:
            self._jobs.drop()
        self.wait()
        self._jobs.error = None

    def stop(self) -> None:
        """End the thread, after the job that it runs."""
        self._finalizer()


def _stop(jobs: _Jobs) -> None:
    with jobs.changed:
        jobs.stopped = True
        jobs.drop()
        jobs.changed.notify_all()
    thread = jobs.thread
    if thread is not None and thread is not threading.current_thread() and jobs.process == os.getpid():
        thread.join()  # or the end of the process would interrupt it inside an op
