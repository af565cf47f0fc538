"""Closing, forking, leaving and being killed."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from harness import WAIT, World, equal_parts, held_back, simple

import moecache._engine
from moecache._engine import Engine, FaultyLink, FileLink, HostLink, ThrottledLink
from moecache.errors import ClosedError, TransferError

pytestmark = pytest.mark.timeout(60)


def test_a_closed_engine_says_so() -> None:
    world = simple(1, 100, 1)
    engine = world.engine
    job = world.fetch((0, 0))
    assert not engine.closed
    engine.close()
    engine.close()
    assert engine.closed
    for call in (
        lambda: world.fetch((0, 0)),
        lambda: world.wait_all(job),
        lambda: engine.drain(1),
        engine.counters,
    ):
        with pytest.raises(ClosedError):
            call()


def test_closing_while_busy_stops_at_a_chunk_and_frees_the_waiters() -> None:
    link = FaultyLink(ThrottledLink(HostLink(), 1e5))
    world = simple(2, 1 << 20, 2, link=link, chunk_bytes=1000, window_bytes=2000)
    jobs = world.fetch((0, 0), (1, 1))
    caught: list[BaseException] = []

    def work() -> None:
        try:
            world.wait_all(jobs)
        except BaseException as error:
            caught.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    held_back(world, 4)
    world.engine.close()
    worker.join(WAIT)
    assert not worker.is_alive()
    assert isinstance(caught[0], ClosedError)
    assert link.chunks < 50
    after = [buffer.copy() for buffer in world.regions]
    time.sleep(0.02)
    assert all((buffer == copy).all() for buffer, copy in zip(world.regions, after, strict=True))


def test_closing_waits_for_a_caller_that_is_copying(tmp_path: Path) -> None:
    world = simple(4, 200_000, 4, folder=tmp_path, link=FaultyLink(FileLink(), delay_s=0.005), chunk_bytes=4096)
    jobs = world.fetch(*((slot, slot) for slot in range(4)))

    def work() -> None:
        with contextlib.suppress(ClosedError):
            world.wait_all(jobs)

    worker = threading.Thread(target=work)
    worker.start()
    held_back(world, 4)
    world.engine.close()
    worker.join(WAIT)
    assert not worker.is_alive()


@pytest.mark.failure("30")
def test_a_thread_that_is_gone_is_an_error_and_not_a_hang() -> None:
    world = simple(4, 1000, 4, link=FaultyLink(ThrottledLink(HostLink(), 1e6), end_thread_at=2), window_bytes=1)
    jobs = world.fetch((0, 0), (1, 1))
    with pytest.raises(TransferError, match="thread has ended"):
        world.wait_all(jobs)
    assert world.complete[0] == 1
    with pytest.raises(TransferError, match="thread has ended"):
        world.fetch((2, 2))
    with pytest.raises(TransferError, match="thread has ended"):
        world.engine.drain(WAIT)
    world.wait_any(jobs[:1])  # what had arrived stays
    world.engine.close()


@pytest.mark.failure("21")
def test_a_collected_engine_stops_and_releases_its_owner() -> None:
    class Owner:
        pass

    world = simple(2, 1 << 16, 2, link=ThrottledLink(HostLink(), 1e6))
    world.engine.close()
    owner = Owner()
    gone = weakref.ref(owner)
    address = np.array([world.regions[0].ctypes.data], np.uint64)
    engine = Engine(world.sources, address, np.array([1 << 16]), world.complete, owner=owner)
    engine.submit(fetch=np.array([[0, 0, 1]], np.int32))
    del owner
    gc.collect()
    assert gone() is not None
    threads = len(os.listdir("/proc/self/task"))
    del engine
    gc.collect()
    assert gone() is None
    assert len(os.listdir("/proc/self/task")) == threads - 1


def test_files_are_closed(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        world = World(equal_parts(4, 100), [100], 4, tmp_path, files=4)
        world.wait_all(world.fetch((0, 0)))
        world.engine.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_gets_an_error_and_leaves_the_parent_alone() -> None:
    world = simple(2, 4000, 2, link=ThrottledLink(HostLink(), 1e5))
    jobs = world.fetch((0, 0))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for call in (lambda: world.fetch((1, 1)), lambda: world.wait_all(jobs), world.engine.counters):
                with pytest.raises(ClosedError, match="fork"):
                    call()
            world.engine.close()
            fresh = simple(2, 100, 2)  # a new one works
            fresh.wait_all(fresh.fetch((1, 1)))
            fresh.engine.close()
            world.engine = None  # type: ignore[assignment]
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with world.engine:
        world.wait_all(jobs)
        assert world.holds(0, 0)


EXIT = """
import contextlib, os, sys, threading, types
import numpy as np
# The package without the rest of it, which imports torch and takes seconds.
sys.modules["moecache"] = types.ModuleType("moecache")
sys.modules["moecache"].__path__ = [{package!r}]
import moecache._engine
from moecache._engine import Engine, FaultyLink, HostLink, Sources, ThrottledLink
data = np.ones(1 << 22, np.uint8); buffer = np.zeros((2, 1 << 22), np.uint8); complete = np.zeros(2, np.int32)
one, size = np.zeros(1, np.int64), np.array([1 << 22])
sources = Sources(np.array([0, 1]), np.array([-1]), np.array([data.ctypes.data], np.uint64), size, one, one)
link = {link}
engine = Engine(sources, np.array([buffer.ctypes.data], np.uint64), np.array([1 << 22]), complete, link=link,
                chunk_bytes=1 << 16, owner=(data, buffer))
engine.submit(fetch=np.array([[0, 0, 1]], np.int32),
              prefetch=np.array([[0, 1, 1]], np.int32), priority=np.ones(1, np.float32))
def wait():
    with contextlib.suppress(BaseException):
        engine.wait_all(np.zeros(1, np.int32), np.ones(1, np.int32), 1e3)
{end}
"""


@pytest.mark.failure("133")
@pytest.mark.parametrize(
    "link", ["HostLink()", "ThrottledLink(HostLink(), 1e6)", "FaultyLink(HostLink(), delay_s=0.01)"]
)
@pytest.mark.parametrize(
    "end",
    [
        "",
        "del data, buffer, complete",
        "sys.keep = engine",
        "if os.fork() == 0: sys.exit(0)\nassert os.wait()[1] == 0",
        "threading.Thread(target=wait, daemon=True).start()",
    ],
    ids=["plain", "deleted", "kept", "forked", "waiting"],
)
def test_leaving_without_closing_is_silent(link: str, end: str) -> None:
    package = str(Path(moecache._engine.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", EXIT.format(package=package, link=link, end=end)],
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


VICTIM = """
import sys
print(engine.describe().splitlines()[0], flush=True)
sys.stdin.read()
"""


@pytest.mark.failure("99")
def test_a_killed_process_leaves_nothing_behind(tmp_path: Path) -> None:
    """No shared memory, no temporary file, no descriptor of either: the system takes back all there is."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "home").mkdir()
    package = str(Path(moecache._engine.__file__).parent)
    link = "FaultyLink(HostLink(), stall_at=3)"
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "HOME": str(tmp_path / "home")}
    environment |= {
        "MOECACHE_COPY": "plain",
        "MOECACHE_CHUNK": str(1 << 20),
    }  # else what was measured is kept in the home
    victim = subprocess.Popen(
        [sys.executable, "-c", EXIT.format(package=package, link=link, end=VICTIM)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    with victim:
        assert victim.stdout is not None
        assert "I/O threads alive" in victim.stdout.readline()
        process = Path(f"/proc/{victim.pid}")
        opened = [os.readlink(entry) for entry in (process / "fd").iterdir()]
        mapped = {line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines()}
        victim.kill()
    assert victim.returncode == -9
    for name in [*opened, *mapped]:
        assert not name.startswith(("/dev/shm", "/memfd", "/SYSV", str(tmp_path)))
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["home", "tmp"]
