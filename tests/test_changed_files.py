"""Files that change under a running cache: an error before their bytes are used."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from numbered_experts import (
    EXPERTS,
    LAYERS,
    LAYOUT,
    all_right,
    checkpoint,
    is_right_or_refused,
    rewrite,
    route,
    value,
)

from moecache import CacheOptions, ExpertBank, ExpertCache
from moecache._engine import Engine, FaultyLink, FileLink, Sources
from moecache.errors import CheckpointError, TransferError


@pytest.fixture(params=["direct", "cached"])
def disk_link(request: pytest.FixtureRequest) -> FileLink:
    return FileLink(direct=request.param == "direct")


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
