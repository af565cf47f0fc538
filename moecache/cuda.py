"""What a CUDA device adds to an engine: a link with its copy stream, events and page-locked memory, given back whole."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ._engine import CudaLink
from .cuda_runtime import Runtime, function_addresses
from .errors import CapacityError, CaptureError, ClosedError, TransferError
from .page_lock import PAGE, PageLock, lock_sources

if TYPE_CHECKING:
    from ._engine import Sources
    from .bank import ExpertBank

__all__ = ["CudaCopies", "copies_for", "numbered", "refuse_capture"]

logger = logging.getLogger("moecache")

DEPTH = 8  # chunks under way at most; the engine's window of two chunks is reached first
STAGED_CHUNK = 2 << 20

# Flags of events, streams and allocations.
EVENT_WITHOUT_TIMING, STREAM_NON_BLOCKING, ALLOC_PORTABLE = 2, 1, 1
# Where cuda-python is set to take 0 for a stream of each thread, torch's 0 is still the one stream of them all.
STREAM_LEGACY = 1


def numbered(device: torch.device | str) -> torch.device:
    """A device with its number: ``"cuda"`` is the device that is current now, and stays it.

    Raises
    ------
    CapacityError
        There is no such CUDA device among those ``CUDA_VISIBLE_DEVICES`` leaves.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise CapacityError(
            f"no slots can be made on {device}: torch {torch.__version__} sees {count} CUDA devices"
            + ("" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})")
        )
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def refuse_capture(what: str) -> None:
    """Raise if the current stream captures a graph; what was captured so far is unharmed.

    Raises
    ------
    CaptureError
    """
    if torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            f"{what} while the current stream captures a CUDA graph: which experts a step needs is known on the host "
            "only, so a replay would compute with whatever lies in the slots by then. Capture the parts between the MoE "
            "layers, or call this one eagerly"
        )


class _Handles:
    """What one engine holds of a device. A weak reference's finalizer gives it back, so it must not know its owner."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.process = os.getpid()
        self.stream = 0
        self.events: list[int] = []
        self.readers: list[int] = []
        self.staging = 0
        self.lock: PageLock | None = None
        self.closed = False

    def make(self, depth: int, slots: int) -> None:
        self.stream = int(self.runtime.call("cudaStreamCreateWithFlags", STREAM_NON_BLOCKING))
        for _ in range(depth + 2 * slots):
            self.events.append(int(self.runtime.call("cudaEventCreateWithFlags", EVENT_WITHOUT_TIMING)))
        self.readers = self.events[depth : depth + slots]

    def close(self) -> None:
        # A forked child has no driver to give anything back to. At exit, or after an error that ended the context,
        # calls fail, and nothing is left to do about it.
        if self.closed or self.process != os.getpid():
            return
        self.closed = True
        call = self.runtime.code
        with suppress(RuntimeError), ExitStack() as stack:
            with suppress(RuntimeError):
                stack.enter_context(self.runtime.current())
            if self.stream:
                call("cudaStreamSynchronize", self.stream)
            # torch may give the slots' memory away next, to a stream that does not know of their readers.
            for event in self.readers:
                call("cudaEventSynchronize", event)
            if self.lock is not None:
                self.lock.close()
            if self.staging:
                call("cudaFreeHost", self.staging)
            for event in self.events:
                call("cudaEventDestroy", event)
            if self.stream:
                call("cudaStreamDestroy", self.stream)
            call("cudaGetLastError")


class _Owner:
    """Lives as long as the link, and so as long as a thread may copy over it."""

    __slots__ = ("__weakref__",)


class CudaCopies:
    """Everything one engine needs on one device: a link, its stream and events, locked memory.

    It is given back by `close`, or when the link has no users any more, or at exit: never while the engine copies.

    Parameters
    ----------
    device
        Number of the device.
    slots
        Slots of the engine.
    lock
        Called once the device is up, for the locked memory experts are copied from.
    files
        Whether experts lie in files.
    depth
        Chunks that may be outstanding.

    Attributes
    ----------
    link : CudaLink
    lock : PageLock or None
    staging_nbytes : int
        Staging buffer that file reads and pageable memory go through, 0: none is needed.

    Raises
    ------
    ImportError
        cuda-python is missing or does not fit.
    TransferError
        The runtime refuses (no driver, no such device).
    """

    def __init__(
        self,
        device: int,
        slots: int,
        *,
        lock: Callable[[Runtime], PageLock] | None = None,
        files: bool = False,
        depth: int = DEPTH,
    ) -> None:
        addresses: Any = function_addresses()
        runtime = Runtime(device)
        handles = _Handles(runtime)
        self.device = torch.device("cuda", device)
        self.staging_nbytes = 0
        staging, pageable = 0, None
        # Also the bindings' own set-up, which takes the GIL: the I/O thread must not be the first to call them.
        runtime.call("cudaGetDeviceCount")
        refuse_capture("a cache was made or resized")
        try:
            with runtime.current():
                runtime.call("cudaSetDevice", device)
                handles.make(depth, slots)
                handles.lock = None if lock is None else lock(runtime)
                if files or (handles.lock is not None and handles.lock.pageable_nbytes):
                    self.staging_nbytes = depth * (STAGED_CHUNK + 2 * PAGE)
                    staging, pageable = self._stage(handles, self.staging_nbytes, files)
        except BaseException:
            handles.close()
            raise
        self.lock = handles.lock
        self._process = handles.process
        owner = _Owner()
        # Before the engine is made: finalizers run last in first out, and the engine's thread must end first.
        self._finalizer = weakref.finalize(owner, handles.close)
        self.link = CudaLink(
            **addresses,
            device=device,
            stream=handles.stream,
            events=np.array(handles.events[:depth], np.uint64),
            read_event=np.array(handles.readers, np.uint64),
            copy_event=np.array(handles.events[depth + slots :], np.uint64),
            locked=None if self.lock is None else self.lock.locked,
            staging=staging,
            staging_nbytes=self.staging_nbytes if staging else 0,
            owner=(owner, pageable),
        )
        # Memory from torch's allocator may still be used by kernels issued before it was given back: they count as readers.
        self.mark_readers(np.arange(slots, dtype=np.int32))

    def _stage(self, handles: _Handles, nbytes: int, files: bool) -> tuple[int, NDArray[np.uint8] | None]:
        """Address of the staging buffer, and who owns it if not the runtime."""
        try:
            handles.staging = int(handles.runtime.call("cudaHostAlloc", nbytes, ALLOC_PORTABLE))
        except TransferError as error:
            if not files:
                return 0, None  # the driver copies pageable memory by itself
            logger.warning(
                "no page-locked memory for reading files (%s): they go through pageable memory, slower", error
            )
            pageable = np.empty(nbytes + PAGE, np.uint8)
            return -(-pageable.ctypes.data // PAGE) * PAGE, pageable
        return handles.staging, None

    def check(self, what: str) -> None:
        """Raise if nothing may be asked of the device now.

        Raises
        ------
        ClosedError
            This is a forked child: a CUDA context does not survive that.
        CaptureError
            The current stream captures a graph.
        """
        if os.getpid() != self._process:
            raise ClosedError(
                f"{what} in a forked child, and the cache belongs to its parent; make a new one after a spawn"
            )
        refuse_capture(what)

    def _on_stream(self, call: Callable[[NDArray[np.int32], int], object], slots: NDArray[np.int32]) -> None:
        self.check("experts were asked for")
        slots = np.ascontiguousarray(slots, np.int32)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        if stream or torch.cuda.current_device() == self.device.index:
            call(slots, stream or STREAM_LEGACY)
            return
        with torch.cuda.device(self.device):  # the default stream is that of the current device
            call(slots, STREAM_LEGACY)

    def before_reading(self, slots: NDArray[np.int32]) -> None:
        """Let what torch's current stream is given from now on wait, on the device, for the copies into these slots.

        Raises
        ------
        CaptureError, ClosedError
        """
        self._on_stream(self.link.before_reading, slots)

    def mark_readers(self, slots: NDArray[np.int32]) -> None:
        """Let none of these slots be overwritten before what torch's current stream has been given by now is done.

        Raises
        ------
        CaptureError, ClosedError
        """
        self._on_stream(self.link.mark_readers, slots)

    def close(self) -> None:
        """Give everything back. A second call does nothing.

        Raises
        ------
        ClosedError
            The engine that uses the link is still open.
        """
        if self.link.in_use and os.getpid() == self._process:
            raise ClosedError("close the engine before what it copies with")
        self._finalizer()

    def __enter__(self) -> CudaCopies:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def copies_for(sources: Sources, device: torch.device, slots: int, bank: ExpertBank | None = None) -> CudaCopies:
    """What an engine needs to feed a pool on a CUDA device: host memory locked, file reads staged.

    Parameters
    ----------
    sources
        Where the bytes lie.
    device
    slots
        Slots of the engine.
    bank
        Whose sources they are, if other engines may copy from it too.
    """
    return CudaCopies(
        numbered(device).index,
        slots,
        lock=lambda runtime: lock_sources(sources, runtime, bank),
        files=bool((sources.segment_file >= 0).any()),
    )
