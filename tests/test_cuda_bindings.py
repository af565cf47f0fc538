"""What is taken from cuda-python: addresses, signatures, and errors where it is missing or differs."""

import contextlib
import re
import types
from pathlib import Path

import numpy as np
import pytest
from cuda_world import DEVICE, WAIT, one
from fake_cuda import FakeCuda

from moecache import cuda
from moecache._engine import CudaLink, Engine, Sources
from moecache.cuda_runtime import SIGNATURES, function_addresses
from moecache.errors import TransferError

pytestmark = pytest.mark.timeout(60)


def bindings() -> types.ModuleType:
    module: types.ModuleType = pytest.importorskip(
        "cuda.bindings.cyruntime", reason="cuda-bindings is not installed (pip install cuda-bindings)"
    )
    return module


def has_driver() -> bool:
    try:
        return int(pytest.importorskip("cuda.bindings.runtime").cudaGetDeviceCount()[0]) == 0
    except RuntimeError:  # cuda-python 12.8
        return False


@pytest.mark.failure("134")
def test_the_table_is_filled_from_cuda_python_and_can_be_called() -> None:
    bindings()
    addresses = function_addresses()
    assert set(addresses) == set(SIGNATURES)
    assert all(addresses.values())
    if has_driver():
        pytest.skip("there is a driver here")
    runtime = pytest.importorskip("cuda.bindings.runtime")
    try:
        expected = int(runtime.cudaSetDevice(0)[0])  # also the bindings' own set-up
    except RuntimeError as error:
        pytest.skip(f"without a driver this cuda-python raises from its functions: {error}")
    events = np.arange(1, 5, dtype=np.uint64)
    link = CudaLink(**addresses, device=0, stream=0, events=events, read_event=events, copy_event=events)  # type: ignore[arg-type]
    sources = Sources(*(np.array(column) for column in ([0, 1], [-1], [4096], [100], [0], [0])))  # type: ignore[arg-type]
    engine = Engine(sources, np.zeros(1, np.uint64), np.array([100]), np.zeros(4, np.int32), link=link)
    with contextlib.suppress(TransferError):  # the thread may have found out before
        engine.submit(fetch=np.array([[0, 0, 1]], np.int32))
    with pytest.raises(TransferError, match=rf"CUDA error {expected}\b"):
        engine.wait_all(one(0), one(1), WAIT)
    engine.close()


def test_the_signatures_are_those_the_link_calls() -> None:
    """Types of the same passing convention, in the same places, in the capsules' names and in the link's C record."""
    text = (Path(cuda.__file__).parent / "_transfer" / "cuda_link.pxi").read_text()
    fields = dict(re.findall(r"^    int \(\*(\w+)\)\(([^)]*)\) noexcept nogil$", text, re.M))

    def kind(c_type: str) -> str:
        if "*" in c_type or c_type.strip() in ("cudaStream_t", "cudaEvent_t"):
            return "pointer"
        return {"unsigned int": "int", "size_t": "size_t"}.get(c_type.strip(), "int")

    for argument, (function, signature) in SIGNATURES.items():
        result, parameters = re.fullmatch(r"(\w+) \((.*)\)", signature).groups()  # type: ignore[union-attr]
        assert result == "cudaError_t", function
        assert [kind(p) for p in parameters.split(",")] == [kind(p) for p in fields[argument].split(",")], function


def test_the_mock_runtime_returns_what_cuda_python_does() -> None:
    """Every function we call from Python is there and returns a code and as many results, also without a driver."""
    bindings()
    runtime = pytest.importorskip("cuda.bindings.runtime")
    if has_driver():
        pytest.skip("there is a driver here: the arguments below are not real")
    arguments = {
        "cudaThreadExchangeStreamCaptureMode": (runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed,),
        "cudaSetDevice": (0,),
        "cudaStreamCreateWithFlags": (1,),
        "cudaEventCreateWithFlags": (2,),
        "cudaHostRegister": (4096, 4096, 1),
        "cudaHostAlloc": (4096, 1),
        "cudaGetDeviceCount": (),
        "cudaGetLastError": (),
    }
    results = {
        "cudaStreamCreateWithFlags": 1,
        "cudaEventCreateWithFlags": 1,
        "cudaHostAlloc": 1,
        "cudaGetDeviceCount": 1,
        "cudaPointerGetAttributes": 1,
        "cudaThreadExchangeStreamCaptureMode": 1,
    }
    text = "".join(
        Path(cuda.__file__).with_name(f"{name}.py").read_text() for name in ("cuda", "cuda_runtime", "page_lock")
    )
    used = set(re.findall(r'"(cuda[A-Z]\w+)"', text)) | set(re.findall(r"\._module\.(cuda\w+)", text))
    used -= {name for name, _ in SIGNATURES.values()} - {"cudaSetDevice", "cudaThreadExchangeStreamCaptureMode"}
    used.discard("cudaStreamCaptureMode")  # the enumeration
    assert used >= set(arguments)
    assert used <= {name[1:] for name in dir(FakeCuda) if name.startswith("_cuda")}
    for function in sorted(used):
        try:
            code, *found = getattr(runtime, function)(*arguments.get(function, (4096,)))
        except RuntimeError:  # cuda-python 12.8
            continue
        assert isinstance(int(code), int)
        assert code.name.startswith("cuda")
        assert len(found) == results.get(function, 0), function


def test_no_driver_is_one_clear_error() -> None:
    bindings()
    if has_driver():
        pytest.skip("there is a driver here")
    with pytest.raises(TransferError, match="cudaGetDeviceCount"):
        cuda.CudaCopies(0, 4)


def test_a_function_of_another_signature_is_refused() -> None:
    capi = dict(bindings().__pyx_capi__)
    capi["cudaEventQuery"] = capi["cudaEventRecord"]
    with pytest.raises(ImportError, match="cudaEventQuery"):
        function_addresses(types.SimpleNamespace(__pyx_capi__=capi, __name__="stub"))  # type: ignore[arg-type]
    del capi["cudaEventQuery"]
    with pytest.raises(ImportError, match="cudaEventQuery is None"):
        function_addresses(types.SimpleNamespace(__pyx_capi__=capi, __name__="stub"))  # type: ignore[arg-type]


@pytest.mark.failure("134")
@pytest.mark.parametrize("module", ["cuda.bindings.cyruntime", "cuda.bindings.runtime"])
def test_without_cuda_python_the_error_says_what_to_install(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(ImportError, match=r"moecache\[cuda13\]"):
        cuda.CudaCopies(DEVICE, 3)
