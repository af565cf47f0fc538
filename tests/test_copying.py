"""How host memory is copied: measured once, kept for the machine, and the same bytes whatever was chosen."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from moecache import copying
from moecache._engine import Engine, Sources, time_copies
from moecache.copying import _MEASUREMENT, CHUNK_NBYTES, SMALL_CHUNK_NBYTES, WAYS, Choice, cache_file, choose, settle


class Machine:
    """Stands in for the measurement: GB/s of each way, of large chunks and of small plain ones."""

    def __init__(self, plain: float, streaming: float, pages: float, small: float) -> None:
        self.rates, self.small, self.measured = (plain, streaming, pages), small, 0

    def __call__(self, nbytes: int, rounds: int) -> Sequence[float]:
        self.measured += 1
        if nbytes == SMALL_CHUNK_NBYTES:
            return [nbytes / self.small / 1e9, 1.0, 1.0]
        return [nbytes / rate / 1e9 for rate in self.rates]


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(copying.WAY_VARIABLE, raising=False)
    monkeypatch.delenv(copying.CHUNK_VARIABLE, raising=False)
    monkeypatch.setattr(copying, "_settled", [])
    return tmp_path / "cache" / "moecache" / "copies.json"


@pytest.mark.parametrize(("machine", "expected"), [
    (Machine(7, 11, 2, 7.5), Choice("streaming", CHUNK_NBYTES)),
    (Machine(6, 8, 10, 6), Choice("pages", CHUNK_NBYTES)),
    (Machine(10, 7, 2, 10.2), Choice("plain", CHUNK_NBYTES)),
    (Machine(7, 8, 2, 11), Choice("plain", SMALL_CHUNK_NBYTES)),
])  # fmt: skip
def test_the_fastest_way_is_chosen(machine: Machine, expected: Choice) -> None:
    assert choose(machine) == expected


def test_a_processor_with_one_way_only() -> None:
    assert choose(lambda nbytes, rounds: [1.0]) == Choice("plain", CHUNK_NBYTES)


def test_this_machine_is_measured_and_remembered(nothing_known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = settle(time_copies)
    assert made.way in WAYS
    assert made.chunk_nbytes in (CHUNK_NBYTES, SMALL_CHUNK_NBYTES)
    assert list(json.loads(nothing_known.read_text()).values()) == [list(made)]
    assert [path.name for path in nothing_known.parent.iterdir()] == ["copies.json"]
    monkeypatch.setattr(copying, "_settled", [])
    other = Machine(1, 1, 1, 100)
    assert settle(other) == settle(other) == made
    assert other.measured == 0


def test_another_processor_or_version_is_measured_anew(nothing_known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, machine in enumerate([Machine(7, 11, 2, 7), Machine(6, 8, 10, 6)]):
        monkeypatch.setattr(copying, "_processor", lambda number=number: f"processor {number}")
        monkeypatch.setattr(copying, "_settled", [])
        settle(machine)
    assert [way for way, _ in json.loads(nothing_known.read_text()).values()] == ["streaming", "pages"]


@pytest.mark.failure("G23", "I35b")
@pytest.mark.parametrize("text", [
    "", "{", "[1]", "null", '{"KEY": ["plain"]}', '{"KEY": ["fastest", 4096]}', '{"KEY": ["plain", 1e9]}', '{"KEY": ["plain", true]}',
    '{"KEY": ["plain", 1]}', '{"KEY": [["plain"], 4096]}', '{"KEY": 7}', "[" * 30_000, '{"KEY": ["plain", ' + "9" * 5000 + "]}", "\xff\xfe",
    '{"KEY": ["plain", 2097152]}' + " " * (1 << 17),
])  # fmt: skip
def test_a_damaged_file_is_measured_over(text: str, nothing_known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_processor", lambda: "P")

    nothing_known.parent.mkdir(parents=True)
    nothing_known.write_bytes(text.replace("KEY", f"P, measurement {_MEASUREMENT}").encode("latin-1"))
    machine = Machine(7, 11, 2, 7)
    assert settle(machine) == Choice("streaming", CHUNK_NBYTES)
    assert machine.measured
    assert json.loads(nothing_known.read_text()) == {f"P, measurement {_MEASUREMENT}": ["streaming", CHUNK_NBYTES]}


@pytest.mark.failure("G23")
@pytest.mark.parametrize("place", ["file", "missing", "relative"])
def test_no_folder_to_write_is_no_error(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file") if place != "relative" else "relative")
    if place == "missing":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", "/dev/null")
    if place == "relative":
        monkeypatch.setenv("HOME", str(tmp_path))
        assert cache_file() == tmp_path / ".cache" / "moecache" / "copies.json"
    assert settle(Machine(7, 11, 2, 7)).way == "streaming"
    assert not Path("relative").exists()


def test_the_file_is_the_users_own(nothing_known: Path) -> None:
    settle(Machine(7, 11, 2, 7))
    assert stat.S_IMODE(nothing_known.stat().st_mode) == 0o600


def test_variables_go_before_the_measurement(nothing_known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(7, 8, 2, 11)
    monkeypatch.setenv("MOECACHE_COPY", "pages")
    assert settle(machine) == Choice("pages", CHUNK_NBYTES)
    monkeypatch.setenv("MOECACHE_CHUNK", "65536")
    copying._settled.clear()
    machine.measured = 0
    assert settle(machine) == Choice("pages", 65536)
    assert machine.measured == 0
    monkeypatch.delenv("MOECACHE_COPY")
    assert settle(machine) == Choice("plain", 65536)


@pytest.mark.parametrize(("name", "value"), [
    ("MOECACHE_COPY", "fastest"), ("MOECACHE_COPY", "PLAIN"), ("MOECACHE_CHUNK", "2MiB"), ("MOECACHE_CHUNK", "0"),
    ("MOECACHE_CHUNK", "-4096"), ("MOECACHE_CHUNK", "9" * 400),
])  # fmt: skip
def test_a_variable_that_means_nothing_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}=.*expected") as caught:
        settle(Machine(7, 11, 2, 7))
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shift", [0, 1, 17])
def test_every_way_brings_the_same_bytes(way: str, shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOECACHE_COPY", way)
    nbytes, experts = (3 << 20) + 4099 + shift, 4
    data = np.random.default_rng(0).integers(0, 256, experts * nbytes + shift, dtype=np.uint8)
    room = np.zeros(experts * (nbytes + 64) + 64, np.uint8)
    start = 1 + shift
    sources = Sources(
        segment_start=np.arange(experts + 1),
        segment_file=np.full(experts, -1),
        segment_source=(data.ctypes.data + shift + np.arange(experts) * nbytes).astype(np.uint64),
        segment_nbytes=np.full(experts, nbytes),
        segment_region=np.zeros(experts, np.int32),
        segment_offset=np.zeros(experts, np.int64),
    )
    target = np.array([room.ctypes.data + start], np.uint64)
    with Engine(sources, target, np.array([nbytes + 64]), np.zeros(experts, np.int32), owner=(data, room)) as engine:
        rows = np.stack([np.arange(experts), np.arange(experts), np.ones(experts)], axis=1).astype(np.int32)
        engine.submit(fetch=rows)
        engine.wait_all(np.arange(experts, dtype=np.int32), np.ones(experts, np.int32), 60.0)
    for expert in range(experts):
        at = start + expert * (nbytes + 64)
        np.testing.assert_array_equal(room[at : at + nbytes], data[shift + expert * nbytes :][:nbytes])
        assert not room[at + nbytes : at + nbytes + 64 - (start if expert == experts - 1 else 0)].any()
    assert not room[:start].any()


@pytest.mark.failure("G23")
def test_a_process_without_a_home(tmp_path: Path) -> None:
    script = (
        "import torch, moecache; "
        "bank = moecache.ExpertBank.from_tensors([{'w': torch.arange(64.).view(8, 8)}]); "
        "cache = moecache.ExpertCache(bank, 2); print(cache.capacity)"
    )
    env = {"PATH": "/usr/bin", "PYTHONPATH": str(Path(copying.__file__).parents[1]), "HOME": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, "-O", "-W", "error", "-c", script],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "2"), done.stderr
    assert done.stderr == ""
