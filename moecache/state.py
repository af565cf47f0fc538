"""What a cache, its requests and their leases share: the runtime in use, how a resize replaces it, the files."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

from .errors import ClosedError, LeaseError, TransferError
from .persistence import CacheFiles
from .runtime import Runtime

if TYPE_CHECKING:
    from ._core import BatchState, RequestState

__all__ = ["SLICE_S", "CacheState"]

SLICE_S = 0.05  # how late a wait looks again, should it miss an event


class CacheState:
    """The state of one cache. A resize replaces its runtime; whoever holds the old one is led to the new one.

    Parameters
    ----------
    runtime : Runtime
    files : CacheFiles
    padding_id : int
        The id that stands for no expert, besides -1.
    timeout : float
        Seconds after which a wait is an error.

    Attributes
    ----------
    runtime : Runtime
        As it was last looked up; :meth:`current` follows to the one in use.
    closed : bool
    """

    def __init__(self, runtime: Runtime, files: CacheFiles, padding_id: int, timeout: float) -> None:
        self.runtime, self.files = runtime, files
        self.padding_id, self.timeout = padding_id, timeout
        self.closed = False
        self._process = os.getpid()
        self._resizing = threading.Lock()
        self._resizer = 0  # the thread that holds it

    def current(self) -> Runtime:
        """The runtime in use."""
        while (successor := self.runtime.core.successor) is not None:
            self.runtime = successor
        return self.runtime

    def check_open(self) -> None:
        """
        Raises
        ------
        ClosedError
        """
        if self.closed:
            raise ClosedError("this cache is closed; make a new one")

    def check_process(self) -> None:
        """
        Raises
        ------
        ClosedError
            This is a forked child, which has the parent's counts but none of its threads.
        """
        if os.getpid() != self._process:
            raise ClosedError("the cache belongs to the parent process; make a new one in the child")

    def follow(self, since: float) -> None:
        """For a call that the core refused: go to the core that took its place, or wait until a resize is over.

        Parameters
        ----------
        since : float
            When the call began, as :func:`time.monotonic` says it.

        Raises
        ------
        LeaseError
            A resize takes longer than the timeout.
        ClosedError
        """
        core = self.runtime.core
        if self.current().core is not core or core.closed:
            return
        self.check_process()
        seen = core.open_steps.event
        if core.frozen:
            core.open_steps.wait_event(seen, SLICE_S)
        elif core.slots.worn:
            self.replace(None)
        if time.monotonic() - since > self.timeout:
            raise LeaseError(f"a resize has held this call up for more than {self.timeout:g} s (timeout)")

    def replace(self, slots: tuple[int, ...] | None) -> None:
        """Build a runtime of so many slots of each shape group in place of the one in use; None: as many as there are.

        Raises
        ------
        CapacityError, LeaseError, TransferError, ClosedError
            See :meth:`moecache.ExpertCache.resize`.
        """
        self._check_not_resizing("resize()")
        with self._resizing:
            self._resizer = threading.get_ident()
            try:
                self._swap(self.current().pool.slots if slots is None else slots)
            finally:
                self._resizer = 0

    def mark_readers(self, routed_by: RequestState | BatchState) -> None:
        """Before the leases that a request or a batch still has end: kernels already issued may read their slots."""
        runtime = self.runtime
        if runtime.copies is not None and not self.closed:
            pinned = runtime.core.open_steps.pinned_by(routed_by)
            if len(pinned):
                runtime.copies.mark_readers(pinned)

    def hold_copies(self) -> Any:
        """Keep copies from starting until the object that is returned is ended (``end()``) or collected.

        Raises
        ------
        TransferError, LeaseError
            See :meth:`moecache.ExpertCache.paused`.
        """
        self._check_not_resizing("paused()")
        with self._resizing:
            return self.current().engine.hold(self.timeout)

    def _check_not_resizing(self, what: str) -> None:
        # As from a signal handler: the lock would never come.
        if self._resizer == threading.get_ident():
            raise LeaseError(f"{what} inside a resize() of the same thread; let that end first")

    def _swap(self, slots: tuple[int, ...]) -> None:
        runtime = self.current()
        core = runtime.core
        if slots == runtime.pool.slots and not core.slots.worn:
            return
        if core.open_steps.here():
            raise LeaseError("resize() while a lease is open: leave the `with request.route(...)` block first")
        began = time.monotonic()
        try:
            core.freeze()
            while True:
                seen, running = core.open_steps.event, core.open_steps.count()
                if not running:
                    break
                if time.monotonic() - began > self.timeout:
                    raise LeaseError(
                        f"{running} leases of other threads did not end within {self.timeout:g} s (timeout)"
                    )
                core.open_steps.wait_event(seen, SLICE_S)
            self.check_open()
            runtime.engine.drain(self.timeout)
            self.runtime = runtime.replaced(slots)
        except OSError as error:
            if isinstance(error, TransferError):
                raise
            raise TransferError(error.errno, f"the cache keeps its size: {error.strerror}", error.filename) from error
        finally:
            core.thaw()
            if core.closed:
                runtime.drop_slots()

    def close(self) -> None:
        """End open requests, stop the I/O threads, give the pool back, finish the files. A second call tries the files again."""
        if self.closed:
            self.files.close()
            return
        self.files.ending()
        self.closed = True
        try:
            while True:
                # A resize that takes place between the look and the call leaves another runtime to be closed.
                runtime = self.current()
                runtime.close()
                if runtime.core.successor is None:
                    break
        finally:
            self.files.close()
