"""Experts that hold one number each, in tensors and in files, and steps that check it."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from moecache import ExpertCache
from moecache.errors import CheckpointError, TransferError

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
