"""Who owns the bytes: what a cache reads stays there and stays what it was, or is an error before it is used."""

from __future__ import annotations

import copy
import gc
import logging
import mmap
import multiprocessing
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moecache import CacheOptions, ExpertBank, ExpertCache
from moecache._engine import Engine, FaultyLink, FileLink, HostLink, Sources, ThrottledLink
from moecache.errors import CheckpointError, ClosedError, CopyError, RoutingError, TransferError

EXPERTS, LAYERS = 8, 3
LAYOUT = {"w": "layers.{layer}.experts.{expert}.w"}


def value(layer: int, expert: int) -> float:
    return 100.0 * layer + expert + 1


def layer_tensors(width: int = 64) -> list[dict[str, torch.Tensor]]:
    each = [[torch.full((width,), value(layer, e)) for e in range(EXPERTS)] for layer in range(LAYERS)]
    return [{"w": torch.stack(rows)} for rows in each]


def route(cache: ExpertCache, layer: int, expert: int) -> torch.Tensor:
    """The expert's weights as a step sees them."""
    with cache.request() as request, request.route(layer, torch.tensor([[expert]])) as lease:
        ((_, slot, _),) = lease.ready()
        return lease.weights["w"][slot].clone()


def all_right(cache: ExpertCache) -> None:
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            assert route(cache, layer, expert).eq(value(layer, expert)).all()


def is_right_or_refused(cache: ExpertCache, layer: int, expert: int) -> bool:
    """Whether the step was refused, because of a file that has changed; one that was not has the right bytes."""
    try:
        weights = route(cache, layer, expert)
    except TransferError as error:
        if not isinstance(error.__cause__, CheckpointError):
            raise
        return True
    assert weights.eq(value(layer, expert)).all()
    return False


def checkpoint(folder: Path, shards: int = 1, width: int = 64, offset: float = 0.0) -> list[Path]:
    files = []
    for shard in range(shards):
        tensors = {
            f"layers.{layer}.experts.{expert}.w": torch.full((width,), value(layer, expert) + offset)
            for layer in range(LAYERS)
            for expert in range(EXPERTS)
            if layer % shards == shard
        }
        files.append(folder / f"model-{shard + 1:05d}-of-{shards:05d}.safetensors")
        save_file(tensors, files[-1])
        os.utime(files[-1], (1, 1))
    return files


def rewrite(file: Path, offset: float) -> None:
    """Other numbers at the same places of the same file."""
    before = load_file(file)
    save_file({name: tensor + offset for name, tensor in before.items()}, file.with_suffix(".new"))
    file.write_bytes(file.with_suffix(".new").read_bytes())
    file.with_suffix(".new").unlink()


@pytest.fixture(params=["direct", "cached"])
def disk_link(request: pytest.FixtureRequest) -> FileLink:
    return FileLink(direct=request.param == "direct")


# A cache keeps what it reads


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
    room = np.zeros((2, 256), np.uint8)
    engine = Engine(sources, np.array([room.ctypes.data]), np.array([256]), np.zeros(2, np.int32), owner=room)
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


# What a plain tensor is


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


# Files that change under a running cache


@pytest.mark.failure("B8", "128", "J39")
def test_a_file_rewritten_in_place_is_an_error_before_its_bytes_are_used(tmp_path: Path, disk_link: FileLink) -> None:
    files = checkpoint(tmp_path, shards=3)
    bank = ExpertBank.from_safetensors(tmp_path, LAYOUT)
    with ExpertCache(bank, 3, prefetch=False, options=CacheOptions(link=disk_link)) as cache:
        all_right(cache)
        rewrite(files[1], 1000)
        for expert in range(EXPERTS):
            assert route(cache, 0, expert).eq(value(0, expert)).all()
            with pytest.raises(TransferError) as caught:
                route(cache, 1, expert)
            said = str(caught.value)
            assert f"layer 1, expert {expert} of layers.1.experts" in said
            assert "model-00002-of-00003.safetensors: changed since its header was read: it was modified" in said
            assert isinstance(caught.value.__cause__, CheckpointError)
            assert caught.value.source == EXPERTS + expert
            assert len(said) < 1000
        for use in (
            lambda: bank.expert(1, 0), lambda: bank.layer(1), bank.check_unchanged, lambda: ExpertCache(bank, 3),
        ):  # fmt: skip
            with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: changed"):
                use()
        assert bank.expert(0, 3)["w"].eq(value(0, 3)).all()


@pytest.mark.failure("B8")
def test_a_file_rewritten_while_steps_read_it_is_never_used(tmp_path: Path, disk_link: FileLink) -> None:
    (file,) = checkpoint(tmp_path, width=4096)
    bank = ExpertBank.from_safetensors(tmp_path, LAYOUT)
    began, ended = threading.Event(), threading.Event()

    def write() -> None:
        began.wait()
        rewrite(file, 0.5)
        ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    failed = 0
    with ExpertCache(bank, 3, prefetch=True, options=CacheOptions(link=disk_link)) as cache:
        steps = 0
        while steps < 200 or not ended.is_set():
            layer, expert = steps % LAYERS, steps * 5 % EXPERTS
            steps += 1
            if steps == 20:
                began.set()
            failed += is_right_or_refused(cache, layer, expert)
    writer.join()
    assert failed


@pytest.mark.failure("B8", "128", "J39")
def test_a_file_cut_short_says_what_is_there_and_what_was_expected(tmp_path: Path, disk_link: FileLink) -> None:
    (file,) = checkpoint(tmp_path)
    bank = ExpertBank.from_safetensors(tmp_path, LAYOUT)
    size = file.stat().st_size
    with ExpertCache(bank, 3, prefetch=False, options=CacheOptions(link=disk_link)) as cache:
        os.truncate(file, 3000)
        with pytest.raises(TransferError, match=rf"it had {size} bytes, and has 3000"):
            route(cache, 2, 7)
    with pytest.raises(CheckpointError, match=rf"it had {size} bytes, and has 3000"):
        bank.expert(2, 7)
    with pytest.raises(CheckpointError, match=rf"truncated: holds 3000 bytes, and its tensors .* need {size}"):
        ExpertBank.from_safetensors(tmp_path, LAYOUT)


@pytest.mark.failure("B8")
def test_a_shard_replaced_by_another_is_never_mixed_with_it(tmp_path: Path, disk_link: FileLink) -> None:
    files = checkpoint(tmp_path, shards=3)
    (tmp_path / "new").mkdir()
    new = checkpoint(tmp_path / "new", shards=3, offset=1000)
    bank = ExpertBank.from_safetensors(tmp_path, LAYOUT)
    with ExpertCache(bank, 3, prefetch=False, options=CacheOptions(link=disk_link)) as cache:
        all_right(cache)
        for old, replacement in zip(files, new, strict=True):
            os.replace(replacement, old)
        for expert in range(EXPERTS):  # the old file, which the cache has open, or an error
            is_right_or_refused(cache, 1, expert)
        for use in (
            lambda: bank.expert(1, 0),
            lambda: bank.layer(1),
            bank.check_unchanged,
            lambda: ExpertCache(bank, 3),
        ):
            with pytest.raises(CheckpointError, match="it has been replaced by another file"):
                use()
    files[0].unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003\.safetensors: cannot be read any more"):
        bank.layer(0)


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


@pytest.mark.failure("123", "127")
def test_reads_through_the_page_cache_are_counted_and_a_file_system_that_wants_them_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint(tmp_path)
    bank = ExpertBank.from_safetensors(tmp_path, LAYOUT)
    for link in (FileLink(direct=False), FaultyLink(FileLink(), refuse_direct=True)):
        with ExpertCache(bank, 4, prefetch=False, options=CacheOptions(link=link)) as cache:
            all_right(cache)
            assert cache.stats().direct_reads == 0
            assert cache.stats().buffered_reads == LAYERS * EXPERTS
    # procfs is a file system that opens nothing past the page cache.
    engine = Engine(
        Sources(
            segment_start=np.array([0, 1]),
            segment_file=np.zeros(1, np.int32),
            segment_source=np.zeros(1, np.uint64),
            segment_nbytes=np.ones(1, np.int64),
            segment_region=np.zeros(1, np.int32),
            segment_offset=np.zeros(1, np.int64),
            files=("/proc/self/maps",),
        ),
        np.zeros(1, np.uint64),
        np.zeros(1, np.int64),
        np.zeros(1, np.int32),
    )
    engine.close()
    assert "refuses reads past the page cache (1 of 1 files)" in caplog.text


@pytest.mark.failure("105")
def test_no_more_experts_are_resident_than_there_are_slots() -> None:
    with ExpertBank.from_tensors(layer_tensors()) as bank, ExpertCache(bank, 5) as cache:
        for step in range(200):
            route(cache, step % LAYERS, step * 7 % EXPERTS)
            assert cache.stats().resident_experts == len(cache.resident()) <= cache.capacity == 5
            assert cache.pool.nbytes == 5 * 256
