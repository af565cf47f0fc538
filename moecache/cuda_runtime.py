"""cuda-python's runtime, one device of it: calls with errors as ours, and the functions a link calls, by address.

cuda-python is imported only when something here is called, so that importing the package touches no driver.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from .errors import TransferError

__all__ = ["SIGNATURES", "Runtime", "function_addresses"]

# Of cudaError_t and cudaMemoryType.
SUCCESS, INVALID_VALUE, UNLOADING, ALREADY_REGISTERED, NOT_REGISTERED = 0, 1, 4, 712, 713
MEMORY_HOST = 1

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


class Runtime:
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
