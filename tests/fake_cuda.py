"""A mock of cuda-python and of what is asked of ``torch.cuda``, over the mock runtime of threads in ``fake_cuda.c``.

The same capsules, names and return values as the real modules have, so that everything of ours runs unchanged; "device"
memory is host memory, and torch's current stream is one that executes on the caller.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from moecache.cuda_runtime import SIGNATURES

FUNCTIONS = (
    "memcpy_async",
    "event_record",
    "event_query",
    "stream_wait_event",
    "set_device",
    "exchange_capture_mode",
    "host_register",
    "host_unregister",
    "host_alloc",
    "stream_create",
    "event_create",
)


class CaptureMode(IntEnum):
    """cudaStreamCaptureMode."""

    cudaStreamCaptureModeGlobal = 0
    cudaStreamCaptureModeThreadLocal = 1
    cudaStreamCaptureModeRelaxed = 2


NOTHING = {"events": 0, "streams": 0, "registrations": 0, "allocations": 0}
"""What is held when all has been given back."""

COUNTS = ("events", "streams", "registrations", "violations", "locked", "pageable", "capture_broken", "allocations")


class Error(IntEnum):
    """Of cudaError_t, what the mock runtime returns."""

    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorCudartUnloading = 4
    cudaErrorInsufficientDriver = 35
    cudaErrorNoDevice = 100
    cudaErrorInvalidDevice = 101
    cudaErrorInvalidResourceHandle = 400
    cudaErrorNotReady = 600
    cudaErrorIllegalAddress = 700
    cudaErrorHostMemoryAlreadyRegistered = 712
    cudaErrorHostMemoryNotRegistered = 713
    cudaErrorDevicesUnavailable = 46
    cudaErrorNotPermitted = 800
    cudaErrorNotSupported = 801
    cudaErrorStreamCaptureUnsupported = 900


@functools.cache
def library() -> ctypes.CDLL:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("the mock CUDA runtime needs a C compiler")
    folder = Path(tempfile.mkdtemp(prefix="fake-cuda-"))
    try:
        built = folder / "fake_cuda.so"
        source = Path(__file__).with_name("fake_cuda.c")
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-pthread", "-o", built, source], check=True)
        found = ctypes.CDLL(str(built))
    finally:
        shutil.rmtree(folder)
    found.fake_count.restype = ctypes.c_int64
    return found


def capsule(function: Any, signature: str) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    name = signature.encode()
    made = new(ctypes.cast(function, ctypes.c_void_p), name, None)
    KEPT.append(name)  # a capsule keeps the pointer to its name, not the name
    return made


KEPT: list[bytes] = []


class FakeCuda:
    """The two modules of cuda-python, and switches for what may go wrong."""

    def __init__(self) -> None:
        self.c = library()
        capi = {name: capsule(getattr(self.c, f"fake_{key}"), text) for key, (name, text) in SIGNATURES.items()}
        self.cyruntime = types.SimpleNamespace(__pyx_capi__=capi, __name__="cuda.bindings.cyruntime")
        self.runtime = types.SimpleNamespace(
            cudaStreamCaptureMode=CaptureMode,
            **{name[1:]: getattr(self, name) for name in dir(self) if name.startswith("_cuda")},
        )
        self.capturing = False
        self.devices = 2

    # what cuda.bindings.runtime has

    def _plain(self, function: str, *arguments: Any) -> tuple[Any, ...]:
        return (Error(getattr(self.c, f"fake_{function}")(*arguments)),)

    def _made(self, function: str, *arguments: Any) -> tuple[Any, ...]:
        handle = ctypes.c_void_p()
        code = Error(getattr(self.c, f"fake_{function}")(ctypes.byref(handle), *arguments))
        return (code, None if code else handle.value)

    def _cudaGetDeviceCount(self) -> tuple[Any, ...]:
        return (Error.cudaSuccess, self.devices)

    def _cudaSetDevice(self, device: int) -> tuple[Any, ...]:
        return self._plain("set_device", device)

    def _cudaThreadExchangeStreamCaptureMode(self, mode: CaptureMode) -> tuple[Any, ...]:
        number = ctypes.c_int(mode.value)
        code = Error(self.c.fake_exchange_capture_mode(ctypes.byref(number)))
        return (code, None if code else CaptureMode(number.value))

    def _cudaGetLastError(self) -> tuple[Any, ...]:
        return self._plain("get_last_error")

    def _cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        return self._made("stream_create", flags)

    def _cudaStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        return self._plain("stream_synchronize", ctypes.c_void_p(stream))

    def _cudaStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        return self._plain("stream_destroy", ctypes.c_void_p(stream))

    def _cudaEventCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        return self._made("event_create", flags)

    def _cudaEventSynchronize(self, event: int) -> tuple[Any, ...]:
        return self._plain("event_synchronize", ctypes.c_void_p(event))

    def _cudaEventDestroy(self, event: int) -> tuple[Any, ...]:
        return self._plain("event_destroy", ctypes.c_void_p(event))

    def _cudaHostRegister(self, address: int, nbytes: int, flags: int) -> tuple[Any, ...]:
        return self._plain("host_register", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), flags)

    def _cudaHostUnregister(self, address: int) -> tuple[Any, ...]:
        return self._plain("host_unregister", ctypes.c_void_p(address))

    def _cudaHostAlloc(self, nbytes: int, flags: int) -> tuple[Any, ...]:
        return self._made("host_alloc", ctypes.c_size_t(nbytes))

    def _cudaFreeHost(self, address: int) -> tuple[Any, ...]:
        return self._plain("host_free", ctypes.c_void_p(address))

    def _cudaPointerGetAttributes(self, address: int) -> tuple[Any, ...]:
        kind = self.c.fake_is_locked(ctypes.c_void_p(address))
        return (Error.cudaSuccess, types.SimpleNamespace(type=kind))

    # what tests ask for

    def fail(self, function: str, code: int, after_calls: int = 0) -> None:
        """Let a function answer this code, from some call on; code 0: work again."""
        self.c.fake_fail(FUNCTIONS.index(function), code, after_calls)

    def counts(self) -> dict[str, int]:
        return {name: self.c.fake_count(i) for i, name in enumerate(COUNTS)}

    def held(self) -> dict[str, int]:
        """What has been made and not been given back."""
        counts = self.counts()
        return {name: counts[name] for name in ("events", "streams", "registrations", "allocations")}

    def stream(self, device: int = 1) -> int:
        """A compute stream that executes beside the caller."""
        with _Guard(self.c, device):
            return int(self._made("stream_create", 1)[1])

    def sum(self, stream: int, target: NDArray[np.uint8]) -> NDArray[np.uint64]:
        """A kernel that hashes some bytes; the result is there when the stream has come that far."""
        out = np.zeros(1, np.uint64)
        self.c.fake_sum(
            ctypes.c_void_p(stream),
            ctypes.c_void_p(target.ctypes.data),
            ctypes.c_size_t(target.nbytes),
            ctypes.c_void_p(out.ctypes.data),
        )
        return out

    def synchronize(self, stream: int) -> None:
        """Wait for all a stream has been given."""
        assert self._cudaStreamSynchronize(stream)[0] == 0

    def synchronize_unsafely(self, stream: int) -> None:
        """As code does that knows of no captures."""
        self._cudaStreamSynchronize(stream)

    def gate(self, closed: bool, stream: int = 0) -> None:
        """Hold what streams have been given, or let it go."""
        self.c.fake_gate(ctypes.c_void_p(stream), int(closed))

    def delay(self, microseconds: int) -> None:
        """Everything on every stream begins up to twice this late."""
        self.c.fake_delay(None, microseconds)

    def reset(self) -> None:
        self.c.fake_sticky(0)
        self.c.fake_capture(0)
        self.c.fake_limit(ctypes.c_size_t(2**64 - 1))
        for function in FUNCTIONS:
            self.fail(function, 0)
        self.gate(False)
        self.c.fake_put_device(0)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        package = types.ModuleType("cuda.bindings")
        monkeypatch.setitem(sys.modules, "cuda.bindings", package)
        monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", self.runtime)
        monkeypatch.setitem(sys.modules, "cuda.bindings.cyruntime", self.cyruntime)
        monkeypatch.setattr("moecache.cuda.numbered", torch.device)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.c.fake_current_device())
        monkeypatch.setattr(torch.cuda, "device", functools.partial(_Guard, self.c))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: types.SimpleNamespace(cuda_stream=0))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)


class _Guard:
    """torch.cuda.device: another current device for the length of a block."""

    def __init__(self, c: ctypes.CDLL, device: int | torch.device) -> None:
        self.c, self.device = c, device.index if isinstance(device, torch.device) else device

    def __enter__(self) -> None:
        self.before = self.c.fake_current_device()
        self.c.fake_put_device(self.device)

    def __exit__(self, *exception: object) -> None:
        self.c.fake_put_device(self.before)


def reference_sum(data: NDArray[np.uint8]) -> int:
    """What the kernel of `FakeCuda.sum` finds in these bytes."""
    total = 0
    for byte in data.tobytes():
        total = (total * 1099511628211 + byte + 1) % 2**64
    return total


@contextlib.contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """The mock runtime in place of the real modules, with nothing left over from the test before or for the one after."""
    fake = FakeCuda()
    fake.install(monkeypatch)
    fake.reset()
    yield fake
    fake.reset()
    gc.collect()
