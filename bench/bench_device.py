"""What a CUDA device does with it: the link, copies under arithmetic, and decoding models of real shapes from host memory.

python bench/bench_device.py link|overlap|deepseek|mixtral [--device cuda|cpu] [--scale full|small] [--traces FOLDER] [--json FILE]
python bench/bench_device.py trace FILE.safetensors     the routing of the tiny model, for want of others
python bench/bench_device.py report FILE.json ...      the results as markdown

On the CPU (``--scale small``) it runs the same way, which shows that it runs; its figures then say nothing about a device.
``bench/device.sh`` runs all of it. A section's file is written again after every figure, so a section that is stopped
leaves what it has measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from device_decode import decode, tiny_trace
from device_link import link, overlap
from device_results import Results


def report(paths: list[Path]) -> str:
    lines: list[str] = []
    for path in paths:
        try:
            facts = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            lines += [f"## {path.name}", "", f"nothing: {error}", ""]
            continue
        lines += [f"## {facts['section']} on {facts['device']}, torch {facts['torch']}", ""]
        lines += [
            f"* {key}: {value}" for key, value in facts.items() if not isinstance(value, list) and key not in HEAD
        ]
        for table, rows in facts.items():
            if isinstance(rows, list):
                columns = list(dict.fromkeys(key for row in rows for key in row))
                lines += ["", f"{table}:", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
                lines += [f"| {' | '.join(str(row.get(key, '')) for key in columns)} |" for row in rows]
        lines.append("")
    return "\n".join(lines)


HEAD = ("section", "device", "torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=("link", "overlap", "deepseek", "mixtral", "trace", "report"))
    parser.add_argument("files", nargs="*", type=Path, help="for trace and report")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", choices=("full", "small"), default="full")
    parser.add_argument("--traces", type=Path, help="folder with routing traces; by default the tiny model is recorded")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.section == "report":
        print(report(arguments.files))
        return
    if arguments.section == "trace":
        tiny_trace().save(arguments.files[0])
        return
    device, small = torch.device(arguments.device), arguments.scale == "small"
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    if arguments.traces is not None and not arguments.traces.is_dir():
        print(f"no folder {arguments.traces}: the tiny model's routing is recorded", file=sys.stderr)
        arguments.traces = None
    results = Results(arguments.section, arguments.json, device)
    with torch.inference_mode():
        if arguments.section == "link":
            link(results, device, small)
        elif arguments.section == "overlap":
            overlap(results, device, small)
        else:
            decode(results, arguments.section, device, small, arguments.traces)
    results.add(finished=True)


if __name__ == "__main__":
    main()
