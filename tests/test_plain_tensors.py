"""What a bank takes for the tensor of an expert: elements of whole bytes in a storage, views, ties; all else is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numbered_experts import (
    EXPERTS,
    LAYERS,
    layer_tensors,
    route,
    value,
)

from moecache import ExpertBank, ExpertCache
from moecache.errors import CheckpointError, RoutingError


def shrunk() -> torch.Tensor:
    tensor = torch.ones(4, 64)
    tensor.untyped_storage().resize_(100)
    return tensor


class Wrapped(torch.Tensor):
    pass


STRANGE: dict[str, tuple[Callable[[], Any], str]] = {
    "quint4x2": (lambda: torch.quantize_per_channel(
        torch.ones(4, 8), torch.ones(4), torch.zeros(4), 0, torch.quint4x2), r"torch\.quint4x2 is not elements of whole"),
    "quint8": (lambda: torch.quantize_per_tensor(torch.ones(4, 8), 1.0, 0, torch.quint8), r"torch\.quint8 is not"),
    "qint8": (lambda: torch.quantize_per_tensor(torch.ones(4, 8), 1.0, 0, torch.qint8), r"torch\.qint8 is not"),
    "qint32": (lambda: torch.quantize_per_tensor(torch.ones(4, 8), 1.0, 0, torch.qint32), r"torch\.qint32 is not"),
    "int4": (lambda: torch.empty(4, 8, dtype=torch.int4), r"torch\.int4 is not elements of whole bytes"),
    "uint1": (lambda: torch.empty(4, 8, dtype=torch.uint1), r"torch\.uint1 is not"),
    "uint7": (lambda: torch.empty(4, 8, dtype=torch.uint7), r"torch\.uint7 is not"),
    "sparse": (lambda: torch.eye(4).to_sparse(), "no plain storage"),
    "csr": (lambda: torch.eye(4).to_sparse_csr(), "no plain storage"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor .*no plain storage"),
    "subclass": (lambda: Wrapped(torch.ones(4, 8)), "a Wrapped of layout"),
    "meta": (lambda: torch.empty(4, 8, device="meta"), "on the meta device"),
    "shrunk": (shrunk, r"storage holds 100 bytes, and shape \(4, 64\) of torch\.float32 needs 1024"),
    "array": (lambda: np.ones((4, 8)), "found"),
}  # fmt: skip


@pytest.mark.failure("B7", "111")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("listed", [False, True])
def test_what_is_not_elements_of_whole_bytes_in_a_storage_is_refused_by_name(kind: str, listed: bool) -> None:
    make, message = STRANGE[kind]
    if not hasattr(torch, kind) and kind.startswith(("int", "uint")):
        pytest.skip(f"this torch has no {kind}")
    what = make()
    if kind == "array" and not listed:
        what = [what]
    with pytest.raises(CheckpointError, match=rf"layers\.0\.w.*{message}"):
        ExpertBank.from_tensors([{"w": [what] if listed else what}])


def test_a_tensor_under_a_transform_is_refused() -> None:
    def adopt(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(CheckpointError, match="no plain storage"):
            ExpertBank.from_tensors([{"w": x}])
        return x

    torch.vmap(adopt)(torch.ones(2, 3, 4))


@pytest.mark.failure("B7", "27", "36")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(1, 8).expand(EXPERTS, 8),
        lambda: torch.randn(EXPERTS, 8, 3).transpose(1, 2),
        lambda: torch.randn(EXPERTS, 9)[:, 1:],
        lambda: torch.randn(2 * EXPERTS, 5)[::2],
        lambda: torch.randn(EXPERTS, 3, dtype=torch.complex64).conj(),
        lambda: torch.randn(EXPERTS, 3, dtype=torch.complex64).conj().imag,
        lambda: torch.randn(EXPERTS, 4097)[:, :4095].to(torch.float8_e4m3fn),
        lambda: torch.arange(EXPERTS * 3).view(EXPERTS, 3).to(torch.uint8),
        lambda: torch.arange(EXPERTS).to(torch.uint16),
        lambda: torch.nn.Parameter(torch.randn(EXPERTS, 2)),
        lambda: torch.randn(EXPERTS * 6)[5:].as_strided((EXPERTS, 3), (2, 1)),  # rows overlap
    ],
)
def test_views_arrive_with_the_bytes_that_torch_reads_in_them(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    expected = [row.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for row in tensor]
    with ExpertBank.from_tensors([{"w": tensor}]) as bank, ExpertCache(bank, 2, prefetch=False) as cache:
        for expert in range(EXPERTS):
            assert torch.equal(route(cache, 0, expert).reshape(-1).view(torch.uint8), expected[expert])
            assert torch.equal(bank.expert(0, expert)["w"].reshape(-1).view(torch.uint8), expected[expert])


@pytest.mark.failure("H35")
def test_tied_experts_are_right_and_their_bytes_counted_once_where_they_lie(caplog: pytest.LogCaptureFixture) -> None:
    shared = torch.randn(EXPERTS, 16)
    with caplog.at_level(logging.WARNING, "moecache"):
        bank = ExpertBank.from_tensors([{"w": shared}, {"w": shared}, {"w": [shared[0]] * EXPERTS}])
    assert bank.nbytes == 3 * EXPERTS * 64
    assert bank.stored_nbytes == EXPERTS * 64
    assert f"{2 * EXPERTS * 64:,} bytes of experts lie at the same place" in caplog.text
    with ExpertCache(bank, 6, prefetch=False) as cache:
        for expert in range(EXPERTS):
            for layer in (0, 1):
                assert torch.equal(route(cache, layer, expert), shared[expert])
            assert torch.equal(route(cache, 2, expert), shared[0])
        assert cache.stats().resident_bytes == 6 * 64
    caplog.clear()
    assert ExpertBank.from_tensors([{"w": shared}]).stored_nbytes == EXPERTS * 64
    assert not caplog.text


@pytest.mark.failure("H35")
@pytest.mark.parametrize("layer", [1.5, 1.0, "1", None, -1, LAYERS, torch.tensor(1.0)])
def test_a_layer_that_is_none_is_refused(layer: Any) -> None:
    bank = ExpertBank.from_tensors(layer_tensors())
    for use in (lambda: bank.expert(layer, 0), lambda: bank.layer(layer), lambda: bank.expert_nbytes(layer)):
        with pytest.raises(RoutingError, match="layer"):
            use()
    with pytest.raises(RoutingError, match="expert"):
        bank.expert(0, layer if layer != LAYERS else EXPERTS)
    assert bank.expert(np.int64(1), torch.tensor(2))["w"].eq(value(1, 2)).all()
