"""Loading with the experts kept out: what is read, what is refused, and where bytes must be converted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import transformers
from hf_families import FAMILIES, aligned, build, left_padded, load_empty, load_resident, save
from safetensors.torch import load_file, save_file

import moecache
import moecache.hf
from moecache.errors import CheckpointError

IDS = torch.randint(2, 96, (1, 7), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    return save("mixtral", tmp_path / "mixtral")


def one_file(folder: Path) -> Path:
    """Join the shards into one file, without an index."""
    tensors = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(shard))
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder / "model.safetensors"


def change(file: Path, edit) -> None:
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def assert_same_logits(model, folder: Path, **kwargs) -> None:
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, load_resident(folder, **kwargs)(IDS).logits)


@pytest.mark.failure("104")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.failure("71")
def test_experts_stay_on_meta(family: str, tmp_path: Path) -> None:
    save(family, tmp_path)
    model = load_empty(tmp_path)
    eager = load_resident(tmp_path)
    experts = {name for name, module in model.named_modules() if type(module).__name__.endswith("Experts")}
    assert experts
    for name, param in eager.named_parameters():
        ours = model.get_parameter(name)
        if name.rpartition(".")[0] in experts:
            assert ours.device.type == "meta"
            assert ours.shape == param.shape
        else:
            assert torch.equal(ours, param)
    assert dict(model.named_buffers()).keys() == dict(eager.named_buffers()).keys()
    assert all(torch.equal(buffer, eager.get_buffer(name)) for name, buffer in model.named_buffers())


def test_plain_loading_is_unchanged(mixtral: Path) -> None:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(mixtral, output_loading_info=True)
    assert not any(info.values())
    assert all(param.device.type == "cpu" for param in model.parameters())
    assert model.config._experts_implementation != "moecache"


def test_loading_info_is_clean(mixtral: Path) -> None:
    _, info = transformers.AutoModelForCausalLM.from_pretrained(
        mixtral, output_loading_info=True, experts_implementation="moecache"
    )
    assert not any(info.values())


def test_base_model_and_wrapped_model(mixtral: Path) -> None:
    """The same checkpoint without the head: names lose their prefix."""
    eager = aligned(transformers.AutoModel.from_pretrained(mixtral, experts_implementation="eager"))
    model = aligned(transformers.AutoModel.from_pretrained(mixtral, experts_implementation="moecache"))
    moecache.attach(model, 4, bank="disk")
    with torch.no_grad():
        assert torch.equal(model(IDS).last_hidden_state, eager(IDS).last_hidden_state)


def test_device_map_of_one_device(mixtral: Path) -> None:
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    model = load_empty(mixtral, device_map="cpu")
    moecache.attach(model, 4)
    assert_same_logits(model, mixtral)


@pytest.mark.failure("83")
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
@pytest.mark.failure("83", "H33")
def test_another_dtype_is_converted_into_ram_only(family: str, tmp_path: Path) -> None:
    save(family, tmp_path, torch.bfloat16)
    model = load_empty(tmp_path, dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"is to be torch.float32, the checkpoint holds torch.bfloat16; use bank"):
        moecache.attach(model, 4, bank="disk")
    assert not hasattr(model, "moecache")
    cache = moecache.attach(model, 4)
    assert cache.bank.location == "ram"
    assert_same_logits(model, tmp_path, dtype=torch.float32)
    assert cache.stats().evictions > 0


def test_another_layout_is_converted_into_ram_only(tmp_path: Path) -> None:
    """Experts stored transposed, with a mapping of the user's own that turns them round."""
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    save("gpt_oss", tmp_path)
    file = one_file(tmp_path)
    expected = aligned(build("gpt_oss"))

    def transpose(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("experts.down_proj")]:
            tensors[name.replace("down_proj", "down_t")] = tensors.pop(name).transpose(1, 2).contiguous()

    change(file, transpose)
    register_checkpoint_conversion_mapping(
        "GptOssForCausalLM",
        [WeightConverter("mlp.experts.down_t", "mlp.experts.down_proj", operations=[Transpose(1, 2)])],
        overwrite=True,
    )
    try:
        model = load_empty(tmp_path)
        with pytest.raises(CheckpointError, match=r"made from the checkpoint by Transpose.*use bank='ram'"):
            moecache.attach(model, 4, bank="disk")
        moecache.attach(model, 4)
        with torch.no_grad():
            expected.set_experts_implementation("eager")
            assert torch.equal(model(IDS).logits, expected(IDS).logits)
    finally:
        from transformers import conversion_mapping

        conversion_mapping._checkpoint_conversion_mapping_cache.pop("GptOssForCausalLM")
        conversion_mapping.USER_REGISTERED_MAPPINGS.discard("GptOssForCausalLM")


@pytest.mark.failure("71", "C13")
def test_checkpoint_with_stacked_experts(tmp_path: Path) -> None:
    """Already in the model's own layout: one 3-D tensor a parameter, rows are experts."""
    model = build("qwen3_moe")
    model.save_pretrained(tmp_path, save_original_format=False)
    empty = load_empty(tmp_path)
    cache = moecache.attach(empty, 4, bank="disk")
    assert cache.bank.location == "disk"
    assert_same_logits(empty, tmp_path)


def test_torch_checkpoint_falls_back_to_memory(mixtral: Path) -> None:
    model = load_resident(mixtral)
    for file in mixtral.glob("*.safetensors*"):
        file.unlink()
    torch.save(model.state_dict(), mixtral / "pytorch_model.bin")
    again = load_empty(mixtral)
    cache = moecache.attach(again, 4)
    assert cache.bank.location == "ram"
    ids, mask = left_padded()
    with torch.no_grad():
        assert torch.equal(again(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits)


def test_missing_shard(mixtral: Path) -> None:
    shard = sorted(mixtral.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name}: missing shard"):
        moecache.load(mixtral, capacity=4)


def test_truncated_shard(mixtral: Path) -> None:
    shard = sorted(mixtral.glob("*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size - 64)
    for read in (lambda: moecache.load(mixtral, capacity=4), lambda: load_empty(mixtral)):
        with pytest.raises(CheckpointError, match=rf"{shard.name}: truncated: holds "):
            read()


def test_missing_expert(mixtral: Path) -> None:
    name = "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    change(one_file(mixtral), lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=rf"tensor '{name}' is not in the checkpoint; found 7 of 8 experts"):
        load_empty(mixtral)


def test_missing_layer(mixtral: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "layers.1." in name and ".w2." in name]:
            del tensors[name]

    change(one_file(mixtral), drop)
    with pytest.raises(CheckpointError, match=r"becomes model\.layers\.1\.mlp\.experts\.down_proj"):
        load_empty(mixtral)


def test_two_shapes_in_one_layer(mixtral: Path) -> None:
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    change(one_file(mixtral), lambda tensors: tensors.update({name: torch.ones(32, 40)}))
    with pytest.raises(CheckpointError, match=rf"{name}' has shape \(32, 40\), F32; expected \(32, 48\), F32"):
        load_empty(mixtral)


def test_experts_of_another_size_than_the_config_says(mixtral: Path) -> None:
    config = json.loads((mixtral / "config.json").read_text())
    config["intermediate_size"] = 64
    (mixtral / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"make \(8, 96, 32\), torch.float32; the model expects \(8, 128, 32\)"):
        load_empty(mixtral)


def test_checkpoint_changed_before_attach(mixtral: Path) -> None:
    model = load_empty(mixtral)
    for shard in mixtral.glob("*.safetensors"):
        shard.write_bytes(shard.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="changed since"):
        moecache.attach(model, 4)
    assert not hasattr(model, "moecache")


@pytest.mark.failure("H34")
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("described", [True, False], ids=["config", "names only"])
def test_layer_that_predicts_further_tokens_is_not_counted(family: str, described: bool, tmp_path: Path) -> None:
    """DeepSeek-V3 and GLM-4.5 store one more MoE layer behind the last; the decoder never runs it."""
    save(family, tmp_path)
    file = one_file(tmp_path)

    def add_layer(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.2.")]:
            tensors[name.replace("layers.2.", "layers.3.")] = tensors[name].clone()
        tensors["model.layers.3.eh_proj.weight"] = torch.ones(32, 64)

    change(file, add_layer)
    if not described:
        (tmp_path / "config.json").unlink()
    bank = moecache.ExpertBank.from_safetensors(tmp_path, family)
    assert [name.split(".")[2] for name in bank.layer_names] == ["1", "2"]
    assert len(moecache.ExpertBank.from_safetensors(tmp_path, family, layers=[3]).num_experts) == 1
    if described:
        model = load_empty(tmp_path)
        assert moecache.attach(model, 4).bank.layer_names == (
            "model.layers.1.mlp.experts",
            "model.layers.2.mlp.experts",
        )
