"""Device slots, sizes as people write them, and how much memory there is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference_core import SETTINGS

from moecache import pool
from moecache.bank import ParamSpec
from moecache.capacity import slots_for
from moecache.errors import CapacityError
from moecache.pool import Pool, slot_nbytes

CPU = torch.device("cpu")
SMALL = {"w": ParamSpec((4, 3), torch.float32), "b": ParamSpec((5,), torch.uint8)}
LARGE = {"w": ParamSpec((8, 8), torch.bfloat16)}


# The pool


def test_tensors_of_every_kind() -> None:
    made = Pool([SMALL, LARGE], [3, 2], CPU)
    assert [{name: tuple(t.shape) for name, t in kind.items()} for kind in made.tensors] == [
        {"w": (3, 4, 3), "b": (3, 5)},
        {"w": (2, 8, 8)},
    ]
    assert [t.dtype for kind in made.tensors for t in kind.values()] == [torch.float32, torch.uint8, torch.bfloat16]
    assert made.first_slot == (0, 3)
    assert made.nbytes == 3 * (64 + 64) + 2 * 128
    assert made.nbytes == sum(t.untyped_storage().nbytes() for kind in made.tensors for t in kind.values())


def test_one_slot_number_serves_all_regions() -> None:
    made = Pool([SMALL, LARGE], [3, 2], CPU)
    numbers, addresses, strides = made.regions()
    assert set(numbers) == {(0, "w"), (0, "b"), (1, "w")}
    for (kind, name), number in numbers.items():
        tensor = made.tensors[kind][name]
        for local in range(len(tensor)):
            slot = made.first_slot[kind] + local
            assert (int(addresses[number]) + slot * int(strides[number])) % 2**64 == tensor[local].data_ptr()


@pytest.mark.failure("C13")
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex128, torch.float8_e8m0fnu], ids=str
)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (33, 30), (2, 3, 5), (4097,), (16, 16)], ids=str)
def test_every_slot_is_contiguous_and_aligned_whatever_its_size(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    (tensors,) = Pool([{"w": ParamSpec(shape, dtype)}], [5], CPU).tensors
    slots = tensors["w"]
    assert slots.shape == (5, *shape)
    assert all(slots[n].is_contiguous() and slots[n].data_ptr() % 64 == 0 for n in range(5))
    # No gap where none is needed.
    assert slots.is_contiguous() == (ParamSpec(shape, dtype).nbytes % 64 == 0)


def test_a_pool_beyond_what_is_free_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "available_memory", lambda device: 500)
    monkeypatch.setattr(torch, "empty", None)
    with pytest.raises(CapacityError, match="needs 640 bytes and cpu has 500 free"):
        Pool([LARGE], [5], CPU)


# Sizes


@given(
    experts=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    data=st.data(),
    top_k=st.one_of(st.none(), st.integers(1, 4)),
)
@settings(SETTINGS, max_examples=60)
def test_a_number_of_experts_is_met_exactly(experts: list[int], data: st.DataObject, top_k: int | None) -> None:
    kinds = [SMALL, LARGE, SMALL][: len(experts)]
    wanted = data.draw(st.integers(1, sum(experts)))
    least = sum(min(top_k or 1, n) for n in experts)
    if wanted < least:
        with pytest.raises(CapacityError, match=f"ask for at least {least} experts"):
            slots_for(wanted, kinds, experts, CPU, top_k)
        return
    slots = slots_for(wanted, kinds, experts, CPU, top_k)
    assert sum(slots) == wanted
    assert all(min(top_k or 1, n) <= s <= n for s, n in zip(slots, experts, strict=True))
    # In proportion, to one, where that gives every kind what a token needs.
    exact = [wanted * n / sum(experts) for n in experts]
    if all(x >= min(top_k or 1, n) for x, n in zip(exact, experts, strict=True)):
        assert all(abs(s - x) < 1 for s, x in zip(slots, exact, strict=True))


@given(experts=st.lists(st.integers(1, 40), min_size=1, max_size=3), nbytes=st.integers(1, 20_000))
@settings(SETTINGS, max_examples=60)
def test_bytes_are_a_bound(experts: list[int], nbytes: int) -> None:
    kinds = [SMALL, LARGE, SMALL][: len(experts)]
    try:
        slots = slots_for(f"{nbytes}B", kinds, experts, CPU, None)
    except CapacityError:
        assume(False)
    assert sum(s * slot_nbytes(kind) for s, kind in zip(slots, kinds, strict=True)) <= nbytes
    assert all(1 <= s <= n for s, n in zip(slots, experts, strict=True))


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1KB", 1000), ("1kb", 1000), ("1KiB", 1024), ("1kib", 1024), ("2MB", 2 * 10**6), ("0.5GiB", 2**29), ("1.5KB", 1500), ("640B", 640),
        ("1TB", 10**12), ("1TiB", 2**40),
    ],
)  # fmt: skip
def test_units(text: str, nbytes: int) -> None:
    spec = {"w": ParamSpec((64,), torch.uint8)}
    assert slots_for(text, [spec], [10**9], CPU, None) == (min(nbytes // 64, 10**9),)


@pytest.mark.parametrize(
    "capacity",
    ["8 GB", " 8GB", "8GB ", "GB", "8", "8.GB", ".5GB", "1e3B", "8XB", "8Gi", "-8GB", "+8GB", "8GB8", "", "auto ", "Auto", "0GiB",
     "0B", "1B", True, False, np.bool_(True), None, [8], (8,), {}, b"8GB", 0, -1, 41, 2**70, 0.0, -0.1, 1.0001, float("nan"), float("inf"),
     -float("inf"), np.float64("nan"), 1e-12],
    ids=repr,
)  # fmt: skip
def test_sizes_that_are_refused(capacity: object) -> None:
    with pytest.raises(CapacityError):
        slots_for(capacity, [SMALL], [40], CPU, None)


def test_what_the_message_advises_works() -> None:
    for experts, top_k in [([40], 6), ([20, 20], 4), ([30, 10], 2)]:
        kinds = [SMALL, LARGE][: len(experts)]
        with pytest.raises(CapacityError, match=r"ask for at least (\d+) experts") as caught:
            slots_for(1, kinds, experts, CPU, top_k)
        advised = int(str(caught.value).split("ask for at least ")[1].split()[0])
        assert min(slots_for(advised, kinds, experts, CPU, top_k)) >= top_k
        nbytes = int(str(caught.value).split(" experts or ")[1].split()[0].replace(",", ""))
        assert min(slots_for(f"{nbytes}B", kinds, experts, CPU, top_k)) >= top_k


def test_top_k_beyond_a_layers_experts_asks_for_no_more_than_there_are() -> None:
    assert slots_for(5, [SMALL], [5], CPU, 8) == (5,)
