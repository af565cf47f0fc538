"""What a CUDA device adds: page-locked host memory, a copy stream, events, and the engine's function table.

cuda-python is imported only when something here is called, so that importing the package touches no driver.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from ._engine import CudaLink
from .errors import CapacityError, CaptureError, ClosedError, TransferError

if TYPE_CHECKING:
    from ._engine import Sources
    from .bank import ExpertBank

__all__ = ["CudaCopies", "PageLock", "copies_for", "function_addresses", "numbered", "page_lock", "refuse_capture"]

logger = logging.getLogger("moecache")

PAGE = 4096
PIECE_NBYTES = 256 << 20
DEPTH = 8  # chunks under way at most; the engine's window of two chunks is reached first
STAGED_CHUNK = 2 << 20
LIMIT_VARIABLE = "MOECACHE_PAGE_LOCK"
PATIENCE_S = 2.0  # what takes longer is said

# Of cudaError_t, cudaMemoryType, and the flags of events, streams and registrations.
SUCCESS, INVALID_VALUE, UNLOADING, ALREADY_REGISTERED, NOT_REGISTERED = 0, 1, 4, 712, 713
MEMORY_HOST = 1
EVENT_WITHOUT_TIMING, STREAM_NON_BLOCKING, REGISTER_PORTABLE = 2, 1, 1
# Where cuda-python is told to take 0 for a stream of each thread, torch's 0 is still the one stream of them all.
STREAM_LEGACY = 1

# A capsule's name is the C signature of the function in it: a version that changed one is refused, not called.
# Versions 12.8 to 13.5 agree on these.
SIGNATURES = {
    "memcpy_async": (
        "cudaMemcpyAsync",
        "cudaError_t (void *, void const *, size_t, enum cudaMemcpyKind, cudaStream_t)",
    ),
    "event_record": ("cudaEventRecord", "cudaError_t (cudaEvent_t, cudaStream_t)"),
    "event_query": ("cudaEventQuery", "cudaError_t (cudaEvent_t)"),
    "stream_wait_event": ("cudaStreamWaitEvent", "cudaError_t (cudaStream_t, cudaEvent_t, unsigned int)"),
    "set_device": ("cudaSetDevice", "cudaError_t (int)"),
    "exchange_capture_mode": (
        "cudaThreadExchangeStreamCaptureMode",
        "cudaError_t (enum cudaStreamCaptureMode *)",
    ),
}


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


def _import(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            "a CUDA device needs cuda-python: pip install 'moecache[cuda13]' or 'moecache[cuda12]', "
            "whichever the driver supports"
        ) from error


def function_addresses(module: ModuleType | None = None) -> dict[str, int]:
    """Addresses of the runtime functions `CudaLink` calls, by the names of its arguments.

    Parameters
    ----------
    module
        A Cython module with these functions in ``__pyx_capi__``; by default ``cuda.bindings.cyruntime``.

    Raises
    ------
    ImportError
        cuda-python is missing, or one of its functions is, or has another signature.
    """
    module = module or _import("cuda.bindings.cyruntime")
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    name_of = ctypes.pythonapi.PyCapsule_GetName
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    addresses = {}
    for argument, (function, signature) in SIGNATURES.items():
        capsule = module.__pyx_capi__.get(function)
        found = None if capsule is None else name_of(capsule).decode()
        if found != signature:
            raise ImportError(
                f"{module.__name__}.{function} is {found!r}, expected {signature!r}: use cuda-python 13, or 12.8 and later"
            )
        addresses[argument] = pointer(capsule, signature.encode())
    return addresses


class PageLock:
    """Host memory locked in pieces, so that copies from it are asynchronous and fast.

    Memory is locked whole pages at a time, piece after piece, until all is locked or the system refuses one. What is
    locked by then stays so (half a bank that copies fast is better than none); the rest stays pageable, which is slower
    and just as correct, and is counted and said once. A piece that is refused for what it is (a read-only mapping, pages
    that somebody else locked) does not stop the others. An exception on the way unlocks everything.

    Parameters
    ----------
    ranges
        (address, bytes) of the memory. No copy may run across the ranges' borders.
    register, unregister
        ``register(address, nbytes)`` and ``unregister(address)`` return the runtime's error code, 0: done.
    clear_error
        Takes the runtime's last error away, so that a refusal is not reported by whatever is called next.
    is_locked
        Whether the page at an address is locked already. Ranges locked at both ends (pinned by torch, say) are used as
        they are and left to who locked them.
    limit_nbytes
        Lock no more than this. The variable ``MOECACHE_PAGE_LOCK`` (bytes, 0: nothing) goes before it.

    Attributes
    ----------
    locked_nbytes, pageable_nbytes : int
    locked : uint64[n, 2]
        Ascending [start, stop) of locked memory; no single copy may run across a border.

    Raises
    ------
    ValueError
        The variable holds no number of bytes.
    """

    def __init__(
        self,
        ranges: Iterable[tuple[int, int]],
        register: Callable[[int, int], int],
        unregister: Callable[[int], int],
        clear_error: Callable[[], object],
        *,
        is_locked: Callable[[int], bool] = lambda address: False,
        piece_nbytes: int = PIECE_NBYTES,
        limit_nbytes: int | None = None,
    ) -> None:
        self._register = register
        self._unregister = unregister
        self._clear_error = clear_error
        self._pieces: list[int] = []
        self._users = 1
        self._counting = threading.Lock()
        limit = _limit(limit_nbytes)
        self.pageable_nbytes = 0
        self._refusals: dict[int, int] = {}
        foreign: list[tuple[int, int]] = []
        own: list[tuple[int, int]] = []
        for address, nbytes in ranges:
            if nbytes:
                both = is_locked(address) and is_locked(address + nbytes - 1)
                (foreign if both else own).append((address, address + nbytes))
        intervals = _joined(foreign, touching=False)
        self.locked_nbytes = sum(stop - start for start, stop in intervals)
        self._limit = limit if limit < 0 else limit + self.locked_nbytes
        spans = _joined((start // PAGE * PAGE, -(-stop // PAGE) * PAGE) for start, stop in own)
        pieces = [
            (address, min(address + piece_nbytes, stop))
            for start, stop in spans
            for address in range(start, stop, piece_nbytes)
        ]
        try:
            with _Progress(sum(stop - start for start, stop in pieces)) as progress:
                for address, end in pieces:
                    if self._lock(address, end - address):
                        intervals.append((address, end))
                    progress.advance(end - address)
        except BaseException:
            self.close()
            raise
        self.locked: NDArray[np.uint64] = np.array(sorted(intervals), np.uint64).reshape(-1, 2)
        if self._refusals:
            self._say()

    def _lock(self, address: int, nbytes: int) -> bool:
        stopped = any(code not in (INVALID_VALUE, ALREADY_REGISTERED) for code in self._refusals)
        if not stopped and not 0 <= self._limit < self.locked_nbytes + nbytes:
            self._pieces.append(address)  # before, lest an interrupt leaves it locked and unknown
            code = self._register(address, nbytes)
            if code == SUCCESS:
                self.locked_nbytes += nbytes
                return True
            self._pieces.pop()
            self._clear_error()
            self._refusals[code] = self._refusals.get(code, 0) + 1
        self.pageable_nbytes += nbytes
        return False

    def _say(self) -> None:
        where = " (WSL limits it to a part of memory)" if "microsoft" in platform.release().lower() else ""
        logger.warning(
            "the system locked %.2f GiB of the experts' memory and refused the rest, %.2f GiB "
            "(cudaHostRegister: error %s)%s. Copies from there are slower; "
            "MOECACHE_PAGE_LOCK=<bytes> limits what is locked",
            self.locked_nbytes / 2**30,
            self.pageable_nbytes / 2**30,
            ", ".join(map(str, sorted(self._refusals))),
            where,
        )

    def share(self) -> bool:
        """Take part in the lock: it holds until every user has closed it. False when it holds no more."""
        with self._counting:
            if self._users:
                self._users += 1
            return self._users > 0

    def close(self) -> None:
        """Let go; the last user unlocks everything. More calls than users do nothing."""
        with self._counting:
            if self._users == 0:
                return
            self._users -= 1
            if self._users:
                return
        failed = []
        while self._pieces:
            code = self._unregister(self._pieces.pop())
            if code not in (SUCCESS, UNLOADING, NOT_REGISTERED):
                self._clear_error()
                failed.append(code)
        if failed:
            logger.warning(
                "%d pieces of host memory could not be unlocked (cudaHostUnregister: error %d)", len(failed), failed[0]
            )


class _Progress:
    """Says that memory is being locked once that has taken a while: a bar on a terminal, one line of the log elsewhere."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self._done, self._said = nbytes, 0, False
        self._began = time.monotonic()
        # disable=None: no bar where stderr is no terminal
        self._bar: Any = tqdm(
            total=nbytes,
            desc="locking host memory",
            unit="B",
            unit_scale=True,
            disable=None,
            delay=PATIENCE_S,
            leave=False,
        )

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        self._bar.update(nbytes)
        spent = time.monotonic() - self._began
        if spent < PATIENCE_S or self._said or self._done == self._nbytes:
            return
        self._said = True
        if self._bar.disable:
            logger.warning(
                "locking host memory for fast copies: %.1f of %.1f GiB after %.0f s, about %.0f s to go. "
                "%s=<bytes> limits it, an interrupt gives it all back",
                self._done / 2**30,
                self._nbytes / 2**30,
                spent,
                spent / self._done * (self._nbytes - self._done),
                LIMIT_VARIABLE,
            )

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def _limit(limit_nbytes: int | None) -> int:
    text = os.environ.get(LIMIT_VARIABLE)
    if text is None:
        return -1 if limit_nbytes is None else limit_nbytes
    if not text.strip().isdigit():
        raise ValueError(f"{LIMIT_VARIABLE}={text!r} is no number of bytes: expected digits, 0 to lock nothing")
    return int(text)


def _joined(spans: Iterable[tuple[int, int]], touching: bool = True) -> list[tuple[int, int]]:
    """[start, stop) in ascending order, those that overlap (or touch) as one."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and (start < joined[-1][1] or (touching and start == joined[-1][1])):
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


class _Runtime:
    """cuda-python's runtime, one device of it, with errors as ours."""

    def __init__(self, device: int) -> None:
        self._module = _import("cuda.bindings.runtime")
        self.device = device

    def code(self, function: str, *arguments: int) -> int:
        """The error code of a call. Where there is no driver, cuda-python 12.8 raises instead."""
        try:
            return int(getattr(self._module, function)(*arguments)[0])
        except RuntimeError:
            return UNLOADING

    def call(self, function: str, *arguments: int) -> Any:
        try:
            code, *result = getattr(self._module, function)(*arguments)
        except RuntimeError as error:
            raise TransferError(f"{function}: {error}") from error
        if int(code) != SUCCESS:
            self._module.cudaGetLastError()
            raise TransferError(f"{function} on CUDA device {self.device}: {code.name} ({int(code)})")
        return result[0] if result else None

    def is_locked(self, address: int) -> bool:
        code, attributes = self._module.cudaPointerGetAttributes(address)
        if int(code) != SUCCESS:
            self._module.cudaGetLastError()
            return False
        return int(attributes.type) == MEMORY_HOST

    def lock(self, ranges: Iterable[tuple[int, int]], **options: Any) -> PageLock:
        return PageLock(
            ranges,
            lambda address, nbytes: self.code("cudaHostRegister", address, nbytes, REGISTER_PORTABLE),
            lambda address: self.code("cudaHostUnregister", address),
            lambda: self.code("cudaGetLastError"),
            is_locked=self.is_locked,
            **{"piece_nbytes": PIECE_NBYTES, **options},
        )

    @contextmanager
    def current(self) -> Iterator[None]:
        """The device as the current one, and calls that break no graph which another thread captures, for a block.

        torch puts back what was current before, and makes no context where there was none.
        """
        exchange = self._module.cudaThreadExchangeStreamCaptureMode
        with torch.cuda.device(self.device):
            code, before = exchange(self._module.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed)
            try:
                yield
            finally:
                if int(code) == SUCCESS:
                    exchange(before)


class _Handles:
    """What one engine holds of a device. A weak reference's finalizer gives it back, so it must not know its owner."""

    def __init__(self, runtime: _Runtime) -> None:
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
        Room that file reads and pageable memory go through, 0: none is needed.

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
        lock: Callable[[_Runtime], PageLock] | None = None,
        files: bool = False,
        depth: int = DEPTH,
    ) -> None:
        addresses: Any = function_addresses()
        runtime = _Runtime(device)
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
        """Address of the room, and who owns it if not the runtime."""
        try:
            handles.staging = int(handles.runtime.call("cudaHostAlloc", nbytes, REGISTER_PORTABLE))
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

    def _tell(self, call: Callable[[NDArray[np.int32], int], object], slots: NDArray[np.int32]) -> None:
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
        self._tell(self.link.before_reading, slots)

    def mark_readers(self, slots: NDArray[np.int32]) -> None:
        """Let none of these slots be overwritten before what torch's current stream has been given by now is done.

        Raises
        ------
        CaptureError, ClosedError
        """
        self._tell(self.link.mark_readers, slots)

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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_locking = threading.Lock()


def page_lock(sources: Sources, runtime: _Runtime, bank: ExpertBank | None = None) -> PageLock:
    """The lock on the memory of some sources; that of a bank is shared by all caches over it, also across a resize."""
    with _locking:
        held = None if bank is None else bank.page_lock
        if held is not None and held.share():
            return held
        began = time.perf_counter()
        in_memory = sources.segment_file < 0
        addresses, sizes = sources.segment_source[in_memory], sources.segment_nbytes[in_memory]
        made = runtime.lock(zip(addresses.tolist(), sizes.tolist(), strict=True))
        if bank is not None:
            bank.page_lock = made
        if made.locked_nbytes:
            took = time.perf_counter() - began
            logger.info("%.2f GiB of host memory locked in %.1f s", made.locked_nbytes / 2**30, took)
        return made


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
        lock=lambda runtime: page_lock(sources, runtime, bank),
        files=bool((sources.segment_file >= 0).any()),
    )
