"""What a CUDA device adds: page-locked host memory, a copy stream, events, and the engine's function table.

cuda-python is imported only when something here is called, so that importing the package touches no driver.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from types import ModuleType, TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from moecache._engine import CudaLink, Sources
from moecache.errors import TransferError

__all__ = ["CudaCopies", "PageLock", "copies_for", "function_addresses"]

logger = logging.getLogger(__name__)

PAGE = 4096
PIECE_NBYTES = 256 << 20
STAGED_CHUNK = 2 << 20
SUCCESS, ERROR_UNLOADING, ERROR_ALREADY_REGISTERED = 0, 4, 712
EVENT_WITHOUT_TIMING, STREAM_NON_BLOCKING = 2, 1

# A capsule's name is the C signature of the function in it: a version that changed one is refused, not called.
SIGNATURES = {
    "memcpy_async": (
        "cudaMemcpyAsync",
        "cudaError_t (void *, void const *, size_t, enum cudaMemcpyKind, cudaStream_t)",
    ),
    "event_record": ("cudaEventRecord", "cudaError_t (cudaEvent_t, cudaStream_t)"),
    "event_query": ("cudaEventQuery", "cudaError_t (cudaEvent_t)"),
    "stream_wait_event": ("cudaStreamWaitEvent", "cudaError_t (cudaStream_t, cudaEvent_t, unsigned int)"),
    "set_device": ("cudaSetDevice", "cudaError_t (int)"),
}


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
                f"{module.__name__}.{function} is {found!r}, expected {signature!r}: use cuda-python 12 or 13"
            )
        addresses[argument] = pointer(capsule, signature.encode())
    return addresses


class PageLock:
    """Host memory locked in pieces, so that copies from it are asynchronous and fast.

    Memory is locked whole pages at a time, piece after piece, until all is locked or the system refuses one. What is
    locked by then stays so (half a bank that copies fast is better than none); the rest stays pageable, which is slower
    and just as correct, and is counted and said once. An exception on the way unlocks everything.

    Parameters
    ----------
    ranges
        (address, bytes) of the memory.
    register, unregister
        ``register(address, nbytes)`` and ``unregister(address)`` return the runtime's error code, 0: done.
    clear_error
        Takes the runtime's last error away, so that a refusal is not reported by whatever is called next.
    limit_nbytes
        Lock no more than this. The variable ``MOECACHE_PAGE_LOCK`` (bytes, 0: nothing) goes before it.

    Attributes
    ----------
    locked_nbytes, pageable_nbytes : int
    seams : uint64[n]
        Ascending addresses where one registration ends; no single copy may run across.
    """

    def __init__(
        self,
        ranges: Iterable[tuple[int, int]],
        register: Callable[[int, int], int],
        unregister: Callable[[int], int],
        clear_error: Callable[[], object],
        *,
        piece_nbytes: int = PIECE_NBYTES,
        limit_nbytes: int | None = None,
    ) -> None:
        self._unregister = unregister
        self._clear_error = clear_error
        self._pieces: list[int] = []
        limit = int(os.environ.get("MOECACHE_PAGE_LOCK", -1 if limit_nbytes is None else limit_nbytes))
        self.locked_nbytes = 0
        self.pageable_nbytes = 0
        seams: set[int] = set()
        refusal = 0
        try:
            for start, stop in _whole_pages(ranges):
                for address in range(start, stop, piece_nbytes):
                    nbytes = min(piece_nbytes, stop - address)
                    if refusal or 0 <= limit < self.locked_nbytes + nbytes:
                        self.pageable_nbytes += nbytes
                        continue
                    code = register(address, nbytes)
                    if code == SUCCESS:
                        self._pieces.append(address)
                    else:
                        clear_error()
                    if code in (SUCCESS, ERROR_ALREADY_REGISTERED):
                        self.locked_nbytes += nbytes
                        seams.update((address, address + nbytes))
                    else:
                        refusal = code
                        self.pageable_nbytes += nbytes
        except BaseException:
            self.close()
            raise
        self.seams: NDArray[np.uint64] = np.array(sorted(seams), np.uint64)
        if refusal:
            self._say(refusal)

    def _say(self, code: int) -> None:
        where = " (WSL limits it to a part of memory)" if "microsoft" in platform.release().lower() else ""
        logger.warning(
            "the system locked %.2f GiB of the experts' memory and refused the rest, %.2f GiB "
            "(cudaHostRegister: error %d)%s. Copies from there are slower; "
            "MOECACHE_PAGE_LOCK=<bytes> limits what is locked",
            self.locked_nbytes / 2**30,
            self.pageable_nbytes / 2**30,
            code,
            where,
        )

    def close(self) -> None:
        """Unlock everything; a second call does nothing."""
        failed = []
        while self._pieces:
            code = self._unregister(self._pieces.pop())
            if code not in (SUCCESS, ERROR_UNLOADING):
                self._clear_error()
                failed.append(code)
        if failed:
            logger.warning(
                "%d pieces of host memory could not be unlocked (cudaHostUnregister: error %d)", len(failed), failed[0]
            )


def _whole_pages(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pages the ranges touch, as ascending (start, stop), neighbours joined: a page is registered only once."""
    joined: list[tuple[int, int]] = []
    for address, nbytes in sorted(ranges):
        start, stop = address // PAGE * PAGE, -(-(address + nbytes) // PAGE) * PAGE
        if nbytes and joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        elif nbytes:
            joined.append((start, stop))
    return joined


class CudaCopies:
    """Everything one engine needs on one device: a link, its stream and events, locked memory.

    Parameters
    ----------
    device
        Number of the device.
    slots
        Slots of the engine.
    ranges
        (address, bytes) of the host memory experts are copied from.
    depth
        Chunks that may be outstanding.
    staging_nbytes
        Locked memory that file reads go through; 0 when no expert lies in a file.

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
        ranges: Sequence[tuple[int, int]] = (),
        depth: int = 16,
        staging_nbytes: int = 0,
    ) -> None:
        addresses = function_addresses()
        self._runtime = _import("cuda.bindings.runtime")
        self._events: list[int] = []
        self._stream: int | None = None
        self._staging: int | None = None
        self.lock: PageLock | None = None
        try:
            # Also the bindings' own set-up, which takes the GIL: the I/O thread must not be the first to call them.
            self._call("cudaSetDevice", device)
            self._stream = int(self._call("cudaStreamCreateWithFlags", STREAM_NON_BLOCKING))
            for _ in range(depth + slots):
                self._events.append(int(self._call("cudaEventCreateWithFlags", EVENT_WITHOUT_TIMING)))
            if staging_nbytes:
                self._staging = int(self._call("cudaHostAlloc", staging_nbytes, 0))
            self.lock = PageLock(ranges, self._register, self._unregister, self._runtime.cudaGetLastError)
        except BaseException:
            self.close()
            raise
        self.slot_event: NDArray[np.uint64] = np.array(self._events[depth:], np.uint64)
        self.link = CudaLink(
            memcpy_async=addresses["memcpy_async"],
            event_record=addresses["event_record"],
            event_query=addresses["event_query"],
            stream_wait_event=addresses["stream_wait_event"],
            set_device=addresses["set_device"],
            device=device,
            stream=self._stream,
            events=np.array(self._events[:depth], np.uint64),
            slot_event=self.slot_event,
            seams=self.lock.seams,
            staging=self._staging or 0,
            staging_nbytes=staging_nbytes,
        )

    def _call(self, function: str, *arguments: int) -> int:
        code, *result = getattr(self._runtime, function)(*arguments)
        if int(code) != SUCCESS:
            self._runtime.cudaGetLastError()
            raise TransferError(f"{function}: {code.name} ({int(code)})")
        return result[0] if result else 0

    def _register(self, address: int, nbytes: int) -> int:
        return int(self._runtime.cudaHostRegister(address, nbytes, 0)[0])

    def _unregister(self, address: int) -> int:
        return int(self._runtime.cudaHostUnregister(address)[0])

    def mark_readers(self, slots: NDArray[np.int32], stream: int) -> None:
        """Let none of these slots be overwritten before what this compute stream has been given by now is done."""
        self.link.mark_readers(slots, stream)

    def close(self) -> None:
        """Give everything back; the engine that uses the link must be closed before. A second call does nothing."""
        if self._stream is not None:
            self._runtime.cudaStreamSynchronize(self._stream)
        if self.lock is not None:
            self.lock.close()
        if self._staging is not None:
            self._runtime.cudaFreeHost(self._staging)
        while self._events:
            self._runtime.cudaEventDestroy(self._events.pop())
        if self._stream is not None:
            self._runtime.cudaStreamDestroy(self._stream)
        self._staging = self._stream = None

    def __enter__(self) -> CudaCopies:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def copies_for(sources: Sources, device: torch.device, slots: int, depth: int = 8) -> CudaCopies:
    """What an engine needs to feed a pool on a CUDA device: host memory locked, file reads staged."""
    in_memory = sources.segment_file < 0
    ranges = zip(sources.segment_source[in_memory].tolist(), sources.segment_nbytes[in_memory].tolist(), strict=True)
    staging = 0 if in_memory.all() else depth * (STAGED_CHUNK + 2 * PAGE)
    index = device.index if ":" in str(device) else torch.cuda.current_device()
    return CudaCopies(index, slots, ranges=list(ranges), depth=depth, staging_nbytes=staging)
