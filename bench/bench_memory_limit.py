"""Decode a Mixtral of 1.64 GB from disk in 700 MB of memory, beside other ways of doing it.

    sudo python bench/bench_memory_limit.py [--only moecache] [--capacity 0.1 0.13 auto] [--rounds 3] [--format fp8] [--json FILE]

A random Mixtral (16 layers x 32 experts, top-2, bfloat16) is written shard by shard into a temporary folder. Each
contender then writes the same tokens in a process of its own, the limited ones in a memory cgroup made for it, with the
model's files, the interpreter's and all libraries' dropped from the page cache first, so that each pays for its own.
What other processes have mapped cannot be dropped; how much that was is said. moecache takes part once per capacity; in
every round the contenders take turns, and the table has medians over the rounds. What is counted, per token after the warm-up:

* MB read: ``read_bytes`` of /proc/self/io, what came from the block device for this process, page faults included;
* ms: wall time between tokens.

With ``--format fp8`` the same model has its experts in blocks of 128 x 128. With ``--format mxfp4`` it is a gpt-oss of as many
experts of the same size, whose ``gpt-oss-bf16`` is what to compare it with. moecache then decodes what it reads.

Linux; making a cgroup takes root. accelerate and llama-cpp-python (with gguf) take part where they are installed.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import mmap
import os
import shutil
import site
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MB = 1e6
LIMIT_BYTES = 700_000_000
FORMATS = ("bf16", "fp8", "gpt-oss-bf16", "mxfp4")
CONTENDERS = ("moecache", "accelerate", "llama.cpp", "resident")
SMALL_FILE = 64 << 10  # not worth the time it takes to drop tens of thousands of them
DECODER = Path(__file__).with_name("limited_decode.py")


class Cgroup:
    """A memory cgroup of its own (version 1 or 2), removed at the end.

    Raises
    ------
    OSError
        This machine or user cannot make one.
    """

    def __init__(self, limit_bytes: int) -> None:
        v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
        self.version = 1 if v1.is_dir() else 2
        root = v1 if self.version == 1 else v2
        if self.version == 2 and "memory" not in (root / "cgroup.subtree_control").read_text().split():
            (root / "cgroup.subtree_control").write_text("+memory")
        self.path = root / f"moecache-bench-{os.getpid()}"
        self.path.mkdir()
        limit = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
        (self.path / limit).write_text(str(limit_bytes))
        if (self.path / "memory.swap.max").exists():
            (self.path / "memory.swap.max").write_text("0")

    def enter(self) -> None:
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def peak(self) -> int | None:
        file = self.path / ("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak")
        return int(file.read_text()) if file.exists() else None

    def close(self) -> None:
        # The kernel may take a moment to free what the last process had.
        for _ in range(50):
            try:
                return self.path.rmdir()
            except OSError:
                time.sleep(0.1)


def drop_from_page_cache(files: Iterable[Path]) -> None:
    for path in files:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def files_below(*folders: str | Path) -> list[Path]:
    return [path for folder in folders for path in Path(folder).rglob("*") if path.is_file()]


def installed_files() -> list[Path]:
    """The interpreter, its standard library, everything installed, and this package."""
    folders = {*site.getsitepackages(), *map(str, (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")))}
    package = importlib.util.find_spec("moecache")
    folders |= set(package.submodule_search_locations or ()) if package else set()
    files = [Path(sys.executable).resolve(), *files_below(*folders)]
    return [path for path in files if path.stat().st_size >= SMALL_FILE]


def cached_bytes(files: Iterable[Path]) -> int:
    """How much of some files lies in the page cache."""
    libc, pages = ctypes.CDLL(None, use_errno=True), 0
    for path in files:
        size = path.stat().st_size
        if size == 0:
            continue
        with path.open("r+b" if os.access(path, os.W_OK) else "rb") as file:
            view = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        first = ctypes.c_char.from_buffer(view)
        seen = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        if libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), seen) == 0:
            pages += bytes(seen).count(1)
        del first
        view.close()
    return pages * mmap.PAGESIZE


def absent(contender: str, args: argparse.Namespace) -> str | None:
    """Why a contender cannot take part."""
    if contender == "llama.cpp" and args.format != "bf16":
        return f"its GGUF is made from the bf16 model, not from {args.format}"
    needs = {"accelerate": ("accelerate",), "llama.cpp": ("llama_cpp", "gguf")}.get(contender, ())
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


def decode(contender: str, args: argparse.Namespace, folder: Path, token_file: Path, capacity: str) -> list[str]:
    """The command that runs one contender."""
    command = [sys.executable, str(DECODER), contender, str(folder), "--token-file", str(token_file)]
    for option in ("policy", "format", "tokens", "warmup", "prompt_tokens"):
        command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
    return [*command, "--capacity", capacity]


def measure(
    contender: str, args: argparse.Namespace, folder: Path, token_file: Path, capacity: str, installed: list[Path]
) -> dict[str, Any]:
    """Run one contender in a process of its own."""
    cgroup = None if contender == "resident" else Cgroup(args.limit)
    drop_from_page_cache([*files_below(folder), *installed])
    shared = cached_bytes(installed)
    (folder / "scratch").mkdir(exist_ok=True)
    name = f"moecache {capacity}" if contender == "moecache" else contender
    row: dict[str, Any] = {"contender": name, "not_dropped_mb": shared / MB}
    start = time.perf_counter()
    try:
        done = subprocess.run(
            decode(contender, args, folder, token_file, capacity),
            capture_output=True,
            text=True,
            preexec_fn=cgroup.enter if cgroup else None,
        )
        row |= {"process_s": time.perf_counter() - start, "peak_mb": ((cgroup and cgroup.peak()) or 0) / MB}
    finally:
        if cgroup:
            cgroup.close()
        shutil.rmtree(folder / "scratch", ignore_errors=True)
    if done.returncode:
        reason = "killed (out of memory)" if done.returncode == -9 else (done.stderr.strip().splitlines() or ["?"])[-1]
        return {**row, "failed": reason[:160]}
    return {**row, **json.loads(done.stdout.splitlines()[-1])}


def medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of several: medians of what is a number, the first round's of the rest."""
    done = [row for row in rounds if "failed" not in row]
    if not done:
        return rounds[0]
    numbers = [name for name, value in done[0].items() if isinstance(value, (int, float))]
    return {**done[0], **{name: statistics.median(row[name] for row in done) for name in numbers}}


def table(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    head = ("contender", "experts", "MB/token", "ms/token", "least ms", "/ best", "warm-up MB", "warm-up s", "own MB")
    done = [row for row in rows if "failed" not in row]
    best = min((row["ms_per_token"] for row in done if row["contender"] != "resident"), default=0.0)
    lines = [head]
    for row in done:
        name = row["contender"] + (" (no limit)" if row["contender"] == "resident" else "")
        experts = f"{row['capacity_experts']:.0f} ({row['capacity_share']:.3f})" if "capacity_experts" in row else ""
        figures = (f"{row['mb_per_token']:.1f}", f"{row['ms_per_token']:.1f}", f"{row['ms_best']:.1f}")
        figures += (f"{row['ms_per_token'] / best:.2f}" if best else "", f"{row['warmup_mb']:.0f}")
        lines.append((name, experts, *figures, f"{row['warmup_s']:.1f}", f"{row['anonymous_mb']:.0f}"))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
    text.insert(1, "-" * len(text[0]))
    text += [f"{row['contender']}: {row['failed']}" for row in rows if "failed" in row]
    text.append(
        f"limit {args.limit / MB:.0f} MB; {args.tokens} tokens after {args.warmup} of warm-up; MB = 10^6 bytes; "
        f"medians of {args.rounds} rounds in turn, least ms the best round"
    )
    text.append("own MB: memory of the process that is not a page of a file; the rest of the limit is page cache")
    if shared := max((row["not_dropped_mb"] for row in rows), default=0.0):
        text.append(
            f"mapped by other processes, so that contenders did not pay for it: up to {shared:.0f} MB of libraries"
        )
    return "\n".join(text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=LIMIT_BYTES, help="bytes of memory for each limited contender")
    parser.add_argument("--capacity", nargs="+", default=["auto"], help="moecache's capacities, one contender each")
    parser.add_argument("--policy", default="expected-next-use")
    parser.add_argument("--format", choices=FORMATS, default="bf16", help="how the experts are packed")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--warmup", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--folder", type=Path, help="keep the model here, and use it if it is there")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def run_all(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    token_file, rows = folder / "tokens.json", []
    token_file.unlink(missing_ok=True)
    contenders = [(name, size) for name in args.only for size in (args.capacity if name == "moecache" else [""])]
    present = [(name, size) for name, size in contenders if absent(name, args) is None]
    prepare = [name for name, wanted in (("model", True), ("gguf", ("llama.cpp", "") in present)) if wanted]
    for what in prepare:
        subprocess.run(
            [sys.executable, str(DECODER), f"write-{what}", str(folder), "--format", args.format], check=True
        )
    installed = installed_files()
    for turn in range(args.rounds):
        for contender, size in present:
            print(f"round {turn + 1} of {args.rounds}: {contender} {size}", file=sys.stderr)
            row = measure(contender, args, folder, token_file, size, installed)
            if "token_ids" in row and not token_file.exists():
                token_file.write_text(json.dumps(row["token_ids"]))
            rows.append(row)
    token_file.unlink(missing_ok=True)
    return rows + [
        {"contender": name, "not_dropped_mb": 0.0, "failed": why} for name in args.only if (why := absent(name, args))
    ]


def main() -> int:
    args = parse()
    try:
        Cgroup(args.limit).close()
    except OSError as error:
        print(f"skipped: cannot make a memory cgroup here ({error})")
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        rows = run_all(args, args.folder or Path(temporary))
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_name.setdefault(row["contender"], []).append(row)
    print(table([medians(same) | {"ms_best": least(same)} for same in by_name.values()], args))
    if args.json:
        args.json.write_text(json.dumps({"limit": args.limit, "rows": rows}, indent=2) + "\n")
    return 0


def least(rounds: list[dict[str, Any]]) -> float:
    return min((row["ms_per_token"] for row in rounds if "failed" not in row), default=0.0)


if __name__ == "__main__":
    sys.exit(main())
