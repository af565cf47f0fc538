"""Who owns the bytes: what a cache reads stays there, and what holds addresses is not copied."""

from __future__ import annotations

import copy
import gc
import mmap
import multiprocessing
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numbered_experts import (
    EXPERTS,
    LAYERS,
    LAYOUT,
    all_right,
    checkpoint,
    layer_tensors,
    rewrite,
    route,
    value,
)

from moecache import ExpertBank, ExpertCache
from moecache._engine import Engine, FileLink, HostLink, ThrottledLink
from moecache.errors import CheckpointError, ClosedError, CopyError, TransferError


@pytest.mark.failure("B5", "22")
@pytest.mark.parametrize("width", [64, 300_000])
def test_a_bank_closed_under_its_cache_lives_until_the_cache_ends(width: int) -> None:
    tensors = layer_tensors(width)
    alive = [weakref.ref(layer["w"].untyped_storage()) for layer in tensors]
    addresses = [layer["w"].data_ptr() for layer in tensors]
    with ExpertBank.from_tensors(tensors) as bank:
        cache = ExpertCache(bank, 4, prefetch=False)
    del tensors
    gc.collect()
    spoil = [torch.full((EXPERTS, width), -1.0) for _ in range(6)]  # what freed memory would be given to
    assert not {t.data_ptr() for t in spoil} & set(addresses)
    all_right(cache)
    with pytest.raises(ClosedError):
        ExpertCache(bank, 4)
    with pytest.raises(ClosedError):
        bank.layer(0)
    cache.close()
    del alive, spoil


@pytest.mark.failure("B5", "94")
def test_memory_is_given_back_when_bank_and_cache_are_closed() -> None:
    array = np.ones((EXPERTS, 16), np.float32)
    alive = weakref.ref(array)
    bank = ExpertBank.from_tensors([{"w": torch.from_numpy(array)}])
    cache = ExpertCache(bank, 2, prefetch=False)
    del array
    bank.close()
    gc.collect()
    assert alive() is not None
    assert route(cache, 0, 3).eq(1).all()
    cache.close()
    gc.collect()
    assert alive() is None


@pytest.mark.failure("B5")
def test_a_closed_bank_on_disk_serves_the_caches_it_has(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    with ExpertBank.from_safetensors(tmp_path, LAYOUT) as bank:
        cache = ExpertCache(bank, 4, prefetch=False)
    with cache:
        all_right(cache)
        cache.resize(6)
        all_right(cache)
        cache.resize(3)
        all_right(cache)


@pytest.mark.failure("B5", "B7")
def test_the_storage_of_an_adopted_tensor_stays_where_it_is() -> None:
    tensors = layer_tensors()
    bank = ExpertBank.from_tensors(tensors)
    with ExpertCache(bank, 4, prefetch=False) as cache:
        for layer in tensors:
            with pytest.raises(RuntimeError, match="not resizable"):
                layer["w"].untyped_storage().resize_(0)
            layer["w"].data = torch.empty(0)
        all_right(cache)


@pytest.mark.failure("B5")
def test_a_tensor_that_moves_is_an_error_with_its_expert_and_no_other_bytes() -> None:
    tensors = layer_tensors()
    bank = ExpertBank.from_tensors(tensors)
    with ExpertCache(bank, 4, prefetch=False, timeout=20) as cache:
        assert route(cache, 1, 2).eq(value(1, 2)).all()
        tensors[1]["w"].share_memory_()
        for _ in range(2):
            with pytest.raises(TransferError, match=r"layer 1, expert 5 of layers\.1 .*has moved") as caught:
                route(cache, 1, 5)
            assert isinstance(caught.value.__cause__, CheckpointError)
            assert caught.value.source == EXPERTS + 5
            assert route(cache, 2, 5).eq(value(2, 5)).all()
        with pytest.raises(CheckpointError, match="has moved"):
            bank.expert(1, 0)
        with pytest.raises(CheckpointError, match="has moved"):
            bank.layer(1)


@pytest.mark.failure("B5")
def test_tensors_in_shared_memory_and_of_numpy_are_adopted() -> None:
    tensors = layer_tensors()
    tensors[0]["w"].share_memory_()
    tensors[1]["w"] = torch.from_numpy(tensors[1]["w"].numpy().copy())
    with ExpertBank.from_tensors(tensors) as bank, ExpertCache(bank, 4, prefetch=False) as cache:
        del tensors
        gc.collect()
        all_right(cache)


@pytest.mark.failure("B8", "128")
def test_a_mapped_file_that_changes_is_noticed_and_one_that_is_replaced_does_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "experts.bin"
    np.concatenate([layer["w"].numpy().ravel() for layer in layer_tensors()]).tofile(file)
    os.utime(file, (1, 1))
    mapped = torch.from_file(str(file), shared=False, size=LAYERS * EXPERTS * 64).view(LAYERS, EXPERTS, 64)
    bank = ExpertBank.from_tensors([{"w": layer} for layer in mapped])
    with ExpertCache(bank, 4, prefetch=False) as cache:
        all_right(cache)
        os.replace(file, tmp_path / "elsewhere")
        file.write_bytes(b"something else")
        bank.check_unchanged()
        assert bank.expert(1, 1)["w"].eq(value(1, 1)).all()
        os.replace(tmp_path / "elsewhere", file)
        with open(file, "r+b") as stream, mmap.mmap(stream.fileno(), 0) as view:
            view[:] = bytes(len(view))
        os.utime(file)
        for use in (
            bank.check_unchanged,
            lambda: bank.expert(0, 0),
            lambda: bank.layer(0),
            lambda: ExpertCache(bank, 4),
        ):
            with pytest.raises(CheckpointError, match=r"experts\.bin: changed"):
                use()


# Copies of objects that hold addresses


@pytest.mark.failure("B6")
@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_what_holds_addresses_is_not_copied(how: Callable[[Any], Any], tmp_path: Path) -> None:
    tensors = layer_tensors()
    bank = ExpertBank.from_tensors(tensors)
    sources = bank.sources({(0, "w"): 0})
    target = np.zeros((2, 256), np.uint8)
    engine = Engine(sources, np.array([target.ctypes.data]), np.array([256]), np.zeros(2, np.int32), owner=target)
    with engine:
        for what in (bank, sources, engine, HostLink(), FileLink(), ThrottledLink(HostLink(), 1e9)):
            with pytest.raises(CopyError, match="cannot be pickled") as caught:
                how(what)
            assert isinstance(caught.value, TypeError)
    checkpoint(tmp_path)
    on_disk = ExpertBank.from_safetensors(tmp_path, LAYOUT)
    on_disk.close()
    with pytest.raises(ClosedError):
        how(on_disk)


@pytest.mark.failure("B6")
@pytest.mark.parametrize("how", [lambda bank: pickle.loads(pickle.dumps(bank)), copy.copy, copy.deepcopy])
def test_a_bank_on_disk_is_copied_with_its_files(how: Callable[[ExpertBank], ExpertBank], tmp_path: Path) -> None:
    files = checkpoint(tmp_path, shards=2)
    bank = ExpertBank.from_safetensors(tmp_path, LAYOUT)
    again = how(bank)
    bank.close()
    with again, ExpertCache(again, 4, prefetch=False) as cache:
        all_right(cache)
    bank = ExpertBank.from_safetensors(tmp_path, LAYOUT)
    rewrite(files[1], 5)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: changed"):
        how(bank)


def sums_of_all(bank: ExpertBank, answer: Any) -> None:
    with ExpertCache(bank, 4, prefetch=False) as cache:
        answer.put([route(cache, layer, expert).sum().item() for layer in range(LAYERS) for expert in range(EXPERTS)])


@pytest.mark.failure("B6")
def test_a_bank_on_disk_reaches_another_process_and_one_in_memory_does_not(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=sums_of_all, args=(ExpertBank.from_safetensors(tmp_path, LAYOUT), answer))
    process.start()
    assert answer.get(timeout=120) == [64 * value(layer, e) for layer in range(LAYERS) for e in range(EXPERTS)]
    process.join()
    assert process.exitcode == 0
    with pytest.raises(CopyError, match="in memory"):
        context.Process(target=sums_of_all, args=(ExpertBank.from_tensors(layer_tensors()), answer)).start()


@pytest.fixture
def default_meta() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.failure("G25")
@pytest.mark.usefixtures("default_meta")
@pytest.mark.parametrize("location", ["disk", "ram"])
def test_a_default_device_is_not_where_experts_are_read_to(tmp_path: Path, location: Any) -> None:
    with torch.device("cpu"):
        checkpoint(tmp_path)
    bank = ExpertBank.from_safetensors(tmp_path, LAYOUT, location=location)
    assert bank.expert(1, 2)["w"].device.type == "cpu"
    assert bank.expert(1, 2)["w"][0].item() == value(1, 2)
    assert bank.layer(2)["w"][3, 0].item() == value(2, 3)


@pytest.mark.failure("105")
def test_no_more_experts_are_resident_than_there_are_slots() -> None:
    with ExpertBank.from_tensors(layer_tensors()) as bank, ExpertCache(bank, 5) as cache:
        for step in range(200):
            route(cache, step % LAYERS, step * 7 % EXPERTS)
            assert cache.stats().resident_experts == len(cache.resident()) <= cache.capacity == 5
            assert cache.pool.nbytes == 5 * 256
