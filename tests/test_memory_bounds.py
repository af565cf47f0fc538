"""How much memory there is, under every limit that applies, and what "auto" makes of it."""

from __future__ import annotations

import logging
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from moecache import CacheOptions, ExpertBank, ExpertCache, capacity, memory
from moecache.bank import ParamSpec
from moecache.capacity import free_memory, nbytes_of, slots_for
from moecache.errors import CapacityError
from moecache.memory import Bound, available_memory, bounds, untouched_nbytes

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MIB = 1 << 20
EXPERT = {"w": ParamSpec((1 << 16,), torch.uint8)}


@pytest.fixture(autouse=True)
def a_round_headroom(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sixteenth, whatever is left in practice: the numbers below are easy to follow then."""
    monkeypatch.setattr(capacity, "_HEADROOM", 1 / 16)


def small_bank() -> ExpertBank:
    return ExpertBank.from_tensors([{"w": torch.zeros(8, 4096, dtype=torch.uint8)} for _ in range(2)])


# Control groups


def group(root: Path, path: str, limit: str, used: int, version: int = 2, **stat: int) -> None:
    folder = root / ("" if version == 2 else "memory") / path.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in {"anon": 5, **stat}.items()))


def seen(tmp_path: Path, proc: str) -> list[tuple[int, int, int]]:
    (tmp_path / "self").write_text(proc)
    found = memory._cgroups(str(tmp_path / "fs"), str(tmp_path / "self"))
    return [(bound.limit, bound.used, bound.mapped) for bound in found]


@pytest.mark.failure("91")
def test_a_group_of_version_two(tmp_path: Path) -> None:
    group(tmp_path / "fs", "/box", str(2**30), 700, inactive_file=200, active_file=100, file_mapped=90)
    assert seen(tmp_path, "0::/box\n") == [(2**30, 400, 90)]


@pytest.mark.failure("91")
def test_nested_groups_are_all_seen(tmp_path: Path) -> None:
    group(tmp_path / "fs", "/a", "5000", 900, inactive_file=100)
    group(tmp_path / "fs", "/a/b", "max", 500)
    group(tmp_path / "fs", "/a/b/c", "9000", 50, active_file=60)
    assert seen(tmp_path, "0::/a/b/c\n") == [(9000, 0, 0), (5000, 800, 0)]


@pytest.mark.failure("91")
def test_groups_of_version_one_and_limits_above_that_a_container_does_not_show(tmp_path: Path) -> None:
    stat = {"total_inactive_file": 10, "total_active_file": 20, "total_mapped_file": 100}
    group(tmp_path / "fs", "/docker/xyz", "4096000", 1000, 1, **stat)
    proc = "12:cpu,cpuacct:/docker/xyz\n5:memory:/docker/xyz\n1:name=systemd:/docker/xyz\n"
    assert seen(tmp_path, proc) == [(4096000, 970, 30)]
    assert seen(tmp_path, "7:hugetlb,memory:/docker/xyz\n") == [(4096000, 970, 30)]
    group(tmp_path / "fs", "/docker/xyz", "9223372036854771712", 1000, 1, hierarchical_memory_limit=2000, **stat)
    assert seen(tmp_path, proc) == [(2000, 970, 30)]
    group(tmp_path / "fs", "/docker/xyz", "9223372036854771712", 1000, 1, **stat)
    assert seen(tmp_path, proc) == []


@pytest.mark.failure("91")
def test_the_limit_that_slows_down_counts_as_one(tmp_path: Path) -> None:
    group(tmp_path / "fs", "/box", "max", 700)
    (tmp_path / "fs" / "box" / "memory.high").write_text("900\n")
    assert seen(tmp_path, "0::/box\n") == [(900, 700, 0)]


def test_files_in_memory_are_not_taken_back(tmp_path: Path) -> None:
    # tmpfs and shared memory are in "file", and in no list of files.
    group(tmp_path / "fs", "/box", "5000", 4000, file=3900, shmem=3900, inactive_file=0, active_file=0)
    assert seen(tmp_path, "0::/box\n") == [(5000, 4000, 0)]


@pytest.mark.failure("91")
def test_a_container_that_sees_only_its_own_root(tmp_path: Path) -> None:
    # The path in /proc is the host's; the mount shows the container's own group at its root.
    group(tmp_path / "fs", "/", "3000", 100)
    assert seen(tmp_path, "0::/kubepods/pod1/abc\n") == [(3000, 100, 0)]
    assert seen(tmp_path, "0::/../../abc\n") == [(3000, 100, 0)]


def test_groups_that_cannot_be_read_are_passed_over(tmp_path: Path) -> None:
    assert memory._cgroups(str(tmp_path / "fs"), str(tmp_path / "nowhere")) == []
    assert seen(tmp_path, "") == seen(tmp_path, "0::/box\n") == []
    group(tmp_path / "fs", "/box", "5000", 700)
    (tmp_path / "fs" / "box" / "memory.stat").unlink()
    assert seen(tmp_path, "0::/box\n") == [(5000, 700, 0)]
    (tmp_path / "fs" / "box" / "memory.max").write_text("")
    assert seen(tmp_path, "0::/box\n") == []


# The process's own limits, the machine, a device


@pytest.mark.failure("G27")
@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_limits_of_the_process_refuse_before_allocating(limit: str) -> None:
    script = f"""
import resource, torch, moecache
from moecache.memory import available_memory, bounds
bank = moecache.ExpertBank.from_tensors([{{"w": torch.empty(64, 1 << 23, dtype=torch.uint8)}}])   # 512 MiB, untouched
cpu = torch.device("cpu")
used = next((b.used for b in bounds(cpu) if "{limit}" in b.name), None)
field = "VmSize" if "{limit}" == "RLIMIT_AS" else "VmData"
used = next(int(l.split()[1]) << 10 for l in open("/proc/self/status") if l.startswith(field))
resource.setrlimit(resource.{limit}, (used + (256 << 20), -1))
assert available_memory(cpu) <= 256 << 20
try:
    moecache.ExpertCache(bank, 1.0)
except moecache.errors.CapacityError as error:
    print("refused", error)
small = moecache.ExpertCache(bank, 8)       # 64 MiB, and the stacks of its I/O threads
print("made", small.capacity)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "refused a cache of 64 experts needs" in done.stdout
    assert "made 8" in done.stdout


def test_the_machine_without_statistics(tmp_path: Path) -> None:
    bound = memory._machine(str(tmp_path / "nowhere"))
    assert bound.limit == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert bound.used == bound.mapped == 0


def test_a_device_offers_what_torch_holds_and_nobody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1600))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300)
    assert available_memory(GPU) == 300
    assert free_memory(GPU).nbytes == 200  # a sixteenth of 1,600 less


@pytest.mark.parametrize(("found", "expected"), [
    ([Bound("a", 10_000, 0)], 10_000),
    ([Bound("a", 10_000, 0), Bound("b", 5000, 1000)], 4000),
    ([Bound("a", 9000, 0), Bound("b", 5000, 4999, 400)], 1),
    ([Bound("a", 5000, 6000)], 0),
])  # fmt: skip
def test_the_tightest_limit_counts(found: list[Bound], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "bounds", lambda device: found)
    assert available_memory(CPU) == expected


def test_this_machine_has_memory() -> None:
    assert 0 < available_memory(CPU) <= memory._machine().limit
    assert bounds(CPU)[0].name == "the machine"


# Memory that takes its pages when it is first used


def test_pages_that_were_never_used_are_still_to_come(tmp_path: Path) -> None:
    fresh = mmap.mmap(-1, 8 * MIB)
    fresh.madvise(mmap.MADV_NOHUGEPAGE)
    view = np.frombuffer(fresh, np.uint8)
    address = view.ctypes.data
    assert untouched_nbytes([(address, 8 * MIB)]) == 8 * MIB
    view[: 3 * MIB] = 1
    assert untouched_nbytes([(address, 8 * MIB)]) == 5 * MIB
    assert untouched_nbytes([(address + 4 * MIB, MIB), (address, 8 * MIB), (address, 0)]) == 5 * MIB
    assert untouched_nbytes([(address, 8 * MIB)], str(tmp_path / "nowhere")) == 0


# Auto


def with_bounds(monkeypatch: pytest.MonkeyPatch, *found: Bound) -> None:
    for module in (memory, capacity):
        monkeypatch.setattr(module, "bounds", lambda device: list(found))


@pytest.mark.failure("91", "100")
def test_auto_leaves_what_is_mapped_headroom_and_the_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    with_bounds(
        monkeypatch, Bound("the machine", 1600 * MIB, 0), Bound("the memory cgroup /x", 160 * MIB, 40 * MIB, 30 * MIB)
    )
    assert free_memory(CPU).nbytes == 80 * MIB
    assert free_memory(CPU, reserve=20 * MIB).nbytes == 60 * MIB
    assert free_memory(CPU, reserve=200 * MIB).nbytes == 0
    assert slots_for("auto", [EXPERT], [10_000], CPU, 2) == (80 * 16,)
    assert "the memory cgroup /x" in free_memory(CPU).account


def test_auto_on_a_roomy_machine_takes_all_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    with_bounds(monkeypatch, Bound("the machine", 1600 * MIB, 0))
    assert slots_for("auto", [EXPERT], [100], CPU, 2) == (100,)


@pytest.mark.failure("91")
def test_a_limit_below_the_need_of_a_token_says_where_the_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with_bounds(monkeypatch, Bound("the memory cgroup /x", 160 * MIB, 120 * MIB, 30 * MIB))
    with pytest.raises(
        CapacityError, match=r"one token needs 8 at once.* /x limits memory to 167,772,160 bytes: .*leaves 0"
    ):
        slots_for("auto", [EXPERT], [100], CPU, 8)


def test_a_cache_in_place_of_another_may_use_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with_bounds(monkeypatch, Bound("the machine", 160 * MIB, 100 * MIB))
    assert free_memory(CPU, held=40 * MIB).nbytes == 50 * MIB  # both fit beside each other
    assert free_memory(CPU, held=90 * MIB).nbytes == 90 * MIB  # no memory to grow, and none needed to stay
    assert free_memory(CPU, held=90 * MIB, reserve=60 * MIB).nbytes == 80 * MIB


@pytest.mark.failure("100")
def test_auto_again_keeps_the_size(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with small_bank() as bank, caplog.at_level(logging.INFO, "moecache"):
        nbytes = 16 * 4096
        with_bounds(monkeypatch, Bound("the machine", 16 * nbytes, 14 * nbytes + nbytes // 2))
        with ExpertCache(bank, "auto", options=CacheOptions(reserve=0)) as cache:
            assert cache.capacity == 8
            assert "capacity 'auto' is 8 of 16 experts. the machine limits memory" in caplog.text
            with_bounds(monkeypatch, Bound("the machine", 16 * nbytes, 15 * nbytes))
            cache.resize("auto")
            assert cache.capacity == 8


def test_a_bank_mapped_from_a_file_and_its_cache_share_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "experts").write_bytes(bytes(16 * MIB))
    weights = torch.from_file(str(tmp_path / "experts"), size=16 * MIB, dtype=torch.uint8).view(16, MIB)
    with_bounds(monkeypatch, Bound("the machine", 32 * MIB, 2 * MIB))
    with ExpertBank.from_tensors([{"w": weights}]) as bank:
        with ExpertCache(bank, "auto") as cache:
            assert cache.capacity == 12  # 32 - 2 - 2 of headroom - 16 that the bank will take
        weights.sum()
        with ExpertCache(bank, "auto") as cache:
            assert cache.capacity == 16


@pytest.mark.parametrize("size", ["2 GiB", "much", -1, True, 1.5, None, "1"])
def test_a_reserve_that_is_no_size(size: object) -> None:
    with pytest.raises(CapacityError, match="reserve"):
        nbytes_of(size)  # type: ignore[arg-type]
    assert nbytes_of("2MiB") == nbytes_of(2 * MIB) == 2 * MIB
