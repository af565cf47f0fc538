"""Presets: each finds in a family's checkpoint the bytes that the model has, and leaves other layers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_families import FAMILIES, WHOLE_MODELS, build, build_small
from hf_other_families import BY_CLASS, build_by_class
from safetensors.torch import load_file, save_file

from moecache import ExpertBank
from moecache.errors import CheckpointError
from moecache.hf.discovery import discover
from moecache.layout import PRESETS, Layout

MADE = [name for name in dict.fromkeys([*FAMILIES, *WHOLE_MODELS, *BY_CLASS]) if name in PRESETS]


def made(family: str) -> Any:
    if family in BY_CLASS:
        return build_by_class(family, **({"zero_expert_num": 0} if family == "longcat_flash" else {}))
    return build(family) if family in FAMILIES else build_small(family)


def edit(folder: Path, change: Any) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("family", MADE)
def test_preset_finds_what_the_model_has(family: str, tmp_path: Path) -> None:
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    model = made(family)
    model.save_pretrained(tmp_path)
    expected = [
        tensor if isinstance(tensor, torch.Tensor) else torch.stack(tensor)
        for layer in discover(model)
        for tensor in layer.adopted({name: param.detach() for name, param in layer.params.items()}).values()
    ]
    bank = ExpertBank.from_safetensors(tmp_path, family)
    found = [tensor for layer in range(len(bank.num_experts)) for tensor in bank.layer(layer).values()]
    # JetMoE's attention has experts as well; tied layers of diffusion_gemma are in the checkpoint once.
    assert len(found) == len(expected) // (2 if family in ("jetmoe", "diffusion_gemma") else 1)
    assert all(any(torch.equal(tensor, other) for other in expected) for tensor in found)


def test_two_stacks_follow_each_other(tmp_path: Path) -> None:
    made("switch_transformers").save_pretrained(tmp_path)
    bank = ExpertBank.from_safetensors(tmp_path, "switch_transformers")
    assert [name.split(".")[0] for name in bank.layer_names] == ["encoder", "decoder"]
    with pytest.raises(
        CheckpointError, match="two stacks of layers, which no numbers tell apart: expected layers=None"
    ):
        ExpertBank.from_safetensors(tmp_path, "switch_transformers", layers=[1])
    edit(
        tmp_path,
        lambda tensors: tensors.pop(next(name for name in tensors if "decoder" in name and "expert_3.wo" in name)),
    )
    with pytest.raises(CheckpointError, match=r"decoder\.block\..*expert_3\.wo\.weight.* is not in the checkpoint"):
        ExpertBank.from_safetensors(tmp_path, Layout.preset("switch_transformers"))


@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_layers_that_predict_further_tokens_are_left_out(family: str, with_config: bool, tmp_path: Path) -> None:
    made(family).save_pretrained(tmp_path)
    expected = ExpertBank.from_safetensors(tmp_path, family).layer_names

    def add(tensors: dict[str, torch.Tensor]) -> None:
        last = f"model.layers.{max(int(name.split('.')[2]) for name in tensors if '.experts.' in name)}."
        number = int(last.split(".")[2]) + 1
        further = {
            name.replace(last, f"model.layers.{number}."): tensor.clone()
            for name, tensor in tensors.items()
            if name.startswith(last)
        }
        tensors.update(further | {f"model.layers.{number}.eh_proj.weight": torch.zeros(32, 64)})

    edit(tmp_path, add)
    if not with_config:
        (tmp_path / "config.json").unlink()
    assert ExpertBank.from_safetensors(tmp_path, family).layer_names == expected
