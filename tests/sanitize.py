"""Build the compiled modules with a sanitizer, beside the ordinary ones, and run tests over them.

    python tests/sanitize.py address            address and undefined behaviour: core, engine, history, the mock CUDA runtime
    python tests/sanitize.py thread             data races: engine, threads in the core
    python tests/sanitize.py address -k resize  what follows is pytest's

Needs gcc and its sanitizer libraries (Debian: gcc). The interpreter and its libraries are not instrumented, so that leaks
are not looked for. What a sanitizer reports, in a test's subprocess too, is printed at the end and makes the run fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
_FLAGS = "-O1 -g1 -fno-omit-frame-pointer"


class Sanitizer(NamedTuple):
    """How one is built, loaded and told what to do, and the tests that run over it."""

    flag: str
    library: str
    options: dict[str, str]
    tests: tuple[str, ...]
    chosen: str = ""


# Patterns of files and folders in tests/.
_MEMORY = ("engine", "fuzz", "soak", "test_bank.py", "test_cache_*.py", "test_core*.py", "test_cuda*.py", "test_failure_kinds.py",
           "test_estimates.py", "test_forecaster.py", "test_given_back.py", "test_hazard.py", "test_history*.py",
           "test_match_loops.py", "test_prefetch.py", "test_resize.py", "test_slots.py", "test_step_ids.py", "test_store.py",
           "test_threads.py", "test_waves.py")  # fmt: skip
# Tests that read the sources beside the modules, and those that count files, of which the runtimes make some.
_ELSEWHERE = "not signatures and not killed_process"
_RACES = ("engine", "test_threads.py", "test_cuda_link*.py", "test_failure_kinds.py", "test_resize.py")

SANITIZERS = {
    "address": Sanitizer(
        "-fsanitize=address,undefined -fno-sanitize-recover=undefined",
        "libasan.so",
        {
            # Freed memory is kept for a while, by default more than a short soak frees: resident memory would only grow.
            "ASAN_OPTIONS": "detect_leaks=0:quarantine_size_mb=32:halt_on_error=1:log_path={report}",
            "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1:log_path={report}",
            "PYTHONMALLOC": "malloc",
        },
        _MEMORY,
        _ELSEWHERE,
    ),
    "thread": Sanitizer(
        "-fsanitize=thread",
        "libtsan.so",
        # Modules that are not instrumented hand memory from thread to thread in ways that cannot be seen.
        {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:die_after_fork=0:history_size=4:log_path={report}"},
        _RACES,
        # The runtime cannot follow a forked process with several threads, and a caller is too slow under it to help.
        f"{_ELSEWHERE} and not forked and not waiting_caller",
    ),
}


def build(kind: str) -> Path:
    """The folder of a package whose compiled modules are sanitized."""
    base, flag = ROOT / "build" / "sanitize" / kind, SANITIZERS[kind].flag
    environment = {**os.environ, "MOECACHE_CFLAGS": f"{_FLAGS} {flag}", "LDFLAGS": flag.split()[0]}
    command = [
        sys.executable,
        "setup.py",
        "--quiet",
        "build",
        "--build-base",
        str(base / "temp"),
        "--build-lib",
        str(base / "lib"),
    ]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return base / "lib"


def run(kind: str, library: Path, arguments: list[str]) -> int:
    """Run the kind's tests; 1 if one fails or anything is reported."""
    sanitizer, reports = SANITIZERS[kind], library.parent / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir(parents=True)
    # With the C++ runtime behind it, or the sanitizer does not find what torch throws exceptions with.
    runtime = " ".join(
        subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in (sanitizer.library, "libstdc++.so.6")
    )
    environment = {
        **os.environ,
        **{name: text.format(report=reports / "report") for name, text in sanitizer.options.items()},
        "LD_PRELOAD": runtime,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(library),
        "MOECACHE_SOAK_SECONDS": "20",
        "MOECACHE_RESIZES": "30",
        "MOECACHE_INTERRUPTS": "300",
    }
    tests = arguments if any(not a.startswith("-") and Path(a.split("::")[0]).exists() for a in arguments) else [
        *(str(path.relative_to(ROOT)) for pattern in sanitizer.tests for path in sorted((ROOT / "tests").glob(pattern))),
        *arguments,
    ]  # fmt: skip
    # The runtimes want memory where address space layout randomization may have put something else.
    plain = ["setarch", "-R"] if shutil.which("setarch") else []
    common = ["-p", "no:cacheprovider", "--timeout", "1200", "-k", sanitizer.chosen]
    command = [*plain, sys.executable, __file__, "--inside", *common, *tests]
    code = subprocess.run(command, cwd=ROOT, env=environment).returncode
    found = sorted(reports.iterdir())
    for report in found:
        print(f"\n==== {report}\n{report.read_text(errors='replace')[:6000]}")
    print(f"{kind}: {len(found)} processes with reports, tests ended with {code}")
    return 1 if found or code else 0


def inside(arguments: list[str]) -> int:
    import pytest

    import moecache._core

    # The folder of this script comes first on the path, the sanitized package next; never the one in the repository.
    expected = Path(os.environ["PYTHONPATH"])
    if expected not in Path(moecache._core.__file__).parents:
        sys.exit(f"{moecache._core.__file__} is not the sanitized module of {expected}")
    return pytest.main(arguments)


def main() -> int:
    if sys.argv[1:2] == ["--inside"]:
        return inside(sys.argv[2:])
    if sys.argv[1:2] == [] or sys.argv[1] not in SANITIZERS:
        sys.exit(__doc__)
    return run(sys.argv[1], build(sys.argv[1]), sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
