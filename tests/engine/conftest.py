"""The back-ends that the conformance tests run over."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
from harness import BACKENDS, Backend


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    if request.param == "cuda":
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        pytest.importorskip("cuda.bindings", reason="cuda-python is not installed")
    with ExitStack() as stack:
        yield Backend(request.param, lambda: Path(tempfile.mkdtemp(dir=tmp_path)), stack)
