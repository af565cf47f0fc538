"""Controls: a checkpoint's byte that a prompt uses changes its logits, another does not."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from ways import IDS, from_disk, inputs

import moecache
from moecache.bank import ExpertBank

_EXPONENT = 0x40  # of a float32's last byte: the number becomes larger or smaller by 2^128
_MOST_TRIES = 8  # elements; what is multiplied with one may be zero, behind a ReLU


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    output = model(**inputs(model, IDS[:1, :2]))
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def _used(folder: Path, cls: Any) -> tuple[torch.Tensor, ExpertBank, dict[int, set[int]]]:
    """The logits, where the experts lie, and by layer which of them were used."""
    used: dict[int, set[int]] = {}
    route = moecache.Request.route

    def noted(self: Any, layer: int, ids: torch.Tensor, **options: Any) -> Any:
        used.setdefault(layer, set()).update(ids.flatten().tolist())
        return route(self, layer, ids, **options)

    model, cache = from_disk(folder, cls, "eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moecache.Request, "route", noted)
        return _logits(model), cache.bank, used


def _flip(folder: Path, bank: ExpertBank, layer: int, expert: int, element: int) -> None:
    param = list(bank.shape_groups[bank.layer_group[layer]])[-1]
    piece = bank._pieces[layer][param][0]
    assert bank._index is not None
    file = folder / Path(bank._index.files[piece.file[expert]]).name
    with file.open("r+b") as stream:
        stream.seek(int(piece.source[expert]) + 4 * element + 3)
        byte = stream.read(1)[0]
        stream.seek(-1, 1)
        stream.write(bytes([byte ^ _EXPONENT]))


def flipped_bytes(folder: Path, cls: Any) -> str:
    """Of a float32 checkpoint: flip a byte of an expert that was used, and one of another's; says what was seen."""
    before, bank, used = _used(folder, cls)
    layer, unused = next(
        (layer, sorted(set(range(bank.num_experts[layer])) - ids)[0])
        for layer, ids in used.items()
        if set(range(bank.num_experts[layer])) - ids
    )
    with tempfile.TemporaryDirectory() as other:
        shutil.copytree(folder, other, dirs_exist_ok=True)
        _flip(Path(other), bank, layer, unused, 0)
        assert torch.equal(_logits(from_disk(Path(other), cls, "eager")[0]), before), "an unused expert's byte counts"
    for expert in sorted(used[layer] - {-1}):
        with tempfile.TemporaryDirectory() as other:
            shutil.copytree(folder, other, dirs_exist_ok=True)
            for element in range(_MOST_TRIES):
                _flip(Path(other), bank, layer, expert, element)
                if not torch.equal(_logits(from_disk(Path(other), cls, "eager")[0]), before):
                    return "seen"
    raise AssertionError("a used expert's byte does not count")
