"""The command where the terminal, the locale or the folder lacks something."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_lab_replay import skewed

from moecache.lab import Trace, schedule
from moecache.lab.progress import progress

pytest.importorskip("typer")
pytest.importorskip("rich")

ROOT = Path(__file__).parent.parent


def moecache(
    *arguments: object, env: dict[str, str] | None = None, **options: object
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moecache.cli", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})},
        text=True,
        encoding="utf-8",
        errors="replace",
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},  # type: ignore[call-overload]
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    trace = skewed(0, tokens=40)
    found = tmp_path / "tr\u00e4ce.safetensors"
    Trace(
        "a", trace.experts, trace.request, trace.decode, trace.num_experts, metadata={"model": "mod\u00e8le \u2603"}
    ).save(found)
    return found


@pytest.mark.failure("G24")
def test_a_locale_without_the_signs_of_a_name(path: Path, tmp_path: Path) -> None:
    plain = {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONIOENCODING": "", "LANG": "C"}
    info = moecache("trace", "info", path, env=plain)
    assert (info.returncode, info.stderr) == (0, "")
    assert "\\u2603" in info.stdout
    out = tmp_path / "r.json"
    replayed = moecache("replay", path, "--capacity", "8", "--policy", "lru", "--json", out, env=plain)
    assert replayed.returncode == 0, replayed.stderr
    assert "lru" in replayed.stdout
    assert json.loads(out.read_text(encoding="utf-8"))["rows"][0]["model"] == "mod\u00e8le \u2603"


@pytest.mark.failure("G24", "I36c")
def test_a_narrow_terminal_and_one_that_goes_away(path: Path) -> None:
    command = (
        "replay",
        path,
        "--capacity",
        "6,8",
        "--policy",
        "lru,counts",
        "--link",
        "nvme",
        "--expert-bytes",
        1 << 20,
    )
    narrow = moecache(*command, env={"COLUMNS": "60"})
    assert narrow.returncode == 0, narrow.stderr
    assert max(len(line) for line in narrow.stdout.splitlines()) <= 60
    for head in (
        "hit %",
        "ms/token",
        "waiting %",
        "idle link %",
        "MB/token",
        "useful",
        "late",
        "wasted MB",
        "wasted %",
    ):
        assert re.search(rf"(^| ){re.escape(head)}( |$)", narrow.stdout, re.MULTILINE), head
    assert "\u2026" not in narrow.stdout
    read, write = os.pipe()
    os.close(read)
    gone = moecache("trace", "info", path, stdout=write)
    os.close(write)
    assert gone.returncode == 1
    assert gone.stderr == ""
    if Path("/dev/full").exists():
        with open("/dev/full", "w") as full:
            assert "No space left" in moecache("trace", "info", path, stdout=full).stderr


@pytest.mark.failure("G24", "I36c")
def test_what_cannot_be_written_is_said_before_the_work(path: Path, tmp_path: Path) -> None:
    for out, message in ((tmp_path / "none" / "r.json", "no folder"), (tmp_path, "is a folder")):
        refused = moecache("replay", path, "--json", out)
        assert refused.returncode == 2
        assert message in refused.stderr
        assert refused.stdout == ""


@pytest.mark.failure("I36c")
def test_work_without_a_terminal_is_seen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import threading

    monkeypatch.setattr("moecache.lab.progress.INTERVAL_S", 0.01)
    shown = threading.Event()
    write = sys.stderr.write
    monkeypatch.setattr(sys.stderr, "write", lambda text: (shown.set(), write(text))[1])
    with progress("work", 100, "passes") as bar:
        bar.update(25)
        assert shown.wait(60)
    assert "work: 25 of 100 passes, 25%" in capsys.readouterr().err


@pytest.mark.failure("I36c", "63")
def test_some_tokens_are_of_all_groups() -> None:
    trace = skewed(0, tokens=400)
    request = np.arange(400) // 10
    several = Trace(
        "a", trace.experts, request, trace.decode, trace.num_experts, request_group=np.repeat(np.arange(4), 10)
    )
    chosen = schedule(several, max_tokens=75).origin
    assert len(chosen) == 8
    assert np.bincount(chosen // 10).tolist() == [2, 2, 2, 2]
    alone = Trace("a", trace.experts, request, trace.decode, trace.num_experts)
    assert np.ptp(schedule(alone, max_tokens=15).origin) >= 15
    assert schedule(alone, max_tokens=400).tokens == schedule(alone, max_tokens=10_000).tokens == 400
