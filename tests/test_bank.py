"""The bank: adopted tensors and safetensors extents give every expert its own bytes, and bad input is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moecache.bank import ExpertBank, Layout, ParamSpec
from moecache.errors import CheckpointError, ClosedError

EXPERTS, HIDDEN, INNER = 4, 6, 5


def unique(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    raw = torch.empty(shape, dtype=dtype)
    bytes_ = np.random.default_rng(seed + 17 * len(shape)).integers(0, 255, raw.nbytes, dtype=np.uint8)
    return torch.from_numpy(bytes_).view(dtype).reshape(shape)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.contiguous().numpy(force=True).tobytes() == (b.contiguous().numpy(force=True).tobytes())
    )


def write_checkpoint(folder: Path, layers: tuple[int, ...] = (1, 3), shards: int = 2) -> dict[str, torch.Tensor]:
    """Layers 1 and 3 are MoE layers, as in a model whose other layers are dense."""
    tensors = {"model.embed.weight": unique(3, 3)}
    for layer in layers:
        for expert in range(EXPERTS):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            tensors[f"{prefix}.gate_proj.weight"] = unique(INNER, HIDDEN, seed=layer * 100 + expert)
            tensors[f"{prefix}.up_proj.weight"] = unique(INNER, HIDDEN, seed=layer * 100 + expert + 50)
            tensors[f"{prefix}.down_proj.weight"] = unique(HIDDEN, INNER, seed=layer * 100 + expert + 70)
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard::shards]
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def gather(bank: ExpertBank, slots: list[int]) -> list[dict[str, torch.Tensor]]:
    """What a mover would put into a pool: every segment copied as `sources` says."""
    region_of = {(k, p): i for i, (k, p) in enumerate((k, p) for k, kind in enumerate(bank.shape_groups) for p in kind)}
    sources = bank.sources(region_of)
    files = [Path(file).read_bytes() for file in sources.files]
    names = {number: name for name, number in region_of.items()}
    moved = []
    for gid in slots:
        layer = int(np.searchsorted(np.cumsum(bank.num_experts), gid, side="right"))
        kind = bank.layer_group[layer]
        room = {p: np.zeros(spec.nbytes, np.uint8) for p, spec in bank.shape_groups[kind].items()}
        for s in range(sources.segment_start[gid], sources.segment_start[gid + 1]):
            begin, size = int(sources.segment_source[s]), int(sources.segment_nbytes[s])
            if sources.segment_file[s] < 0:
                data = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_ubyte * size).from_address(begin))
            else:
                data = np.frombuffer(files[sources.segment_file[s]], np.uint8)[begin : begin + size]
            owner_kind, param = names[int(sources.segment_region[s])]
            assert owner_kind == kind
            offset = int(sources.segment_offset[s])
            room[param][offset : offset + size] = data
        moved.append(
            {
                p: torch.from_numpy(room[p]).view(spec.dtype).reshape(spec.shape)
                for p, spec in bank.shape_groups[kind].items()
            }
        )
    return moved


def test_adopts_without_copy() -> None:
    w = unique(EXPERTS, 3, 2)
    bank = ExpertBank.from_tensors([{"w": w}, {"w": [row.clone() for row in w]}], names=["a", "b"])
    assert bank.copied_bytes == 0
    assert bank.location == "ram"
    assert bank.num_experts == (EXPERTS, EXPERTS)
    assert bank.layer_group == (0, 0)
    assert bank.shape_groups == ({"w": ParamSpec((3, 2), torch.float32)},)
    assert bank.nbytes == 2 * EXPERTS * 24
    assert bank.expert_nbytes(1) == 24
    w[2] = 7.0  # the bank sees the caller's own storage
    assert bank.expert(0, 2)["w"].eq(7).all()
    for gid, moved in enumerate(gather(bank, list(range(8)))):
        assert same_bytes(moved["w"], bank.expert(gid // 4, gid % 4)["w"])


@pytest.mark.failure("27")
def test_stack_with_gaps_between_experts_is_adopted() -> None:
    w = unique(EXPERTS, 2, 3, 2)[:, 0]
    bank = ExpertBank.from_tensors([{"w": w}])
    assert bank.copied_bytes == 0
    assert all(same_bytes(m["w"], w[i]) for i, m in enumerate(gather(bank, [0, 1, 2, 3])))


@pytest.mark.failure("27")
@pytest.mark.parametrize("make", [lambda w: w.transpose(1, 2), lambda w: w[:, :, :2], lambda w: [x.t() for x in w]])
def test_strided_experts_are_copied_once(make) -> None:
    w = make(unique(EXPERTS, 4, 3))
    bank = ExpertBank.from_tensors([{"w": w}])
    assert bank.copied_bytes == bank.nbytes
    assert all(same_bytes(m["w"], w[i].contiguous()) for i, m in enumerate(gather(bank, [0, 1, 2, 3])))


@pytest.mark.failure("73", "80", "36")
def test_opaque_bytes_and_all_tensors_of_an_expert() -> None:
    layer = {
        "qweight": unique(EXPERTS, 3, 5, dtype=torch.uint8),
        "fp8": unique(EXPERTS, 1, 3, dtype=torch.float8_e4m3fn),
        "scale": unique(EXPERTS, 1),
        "scalar": unique(EXPERTS, dtype=torch.float16),
    }
    bank = ExpertBank.from_tensors([layer])
    for index, moved in enumerate(gather(bank, [0, 1, 2, 3])):
        for param, tensor in layer.items():
            assert (
                moved[param].view(torch.uint8).tolist() == tensor[index].contiguous().view(torch.uint8).tolist()
                if (tensor[index].dim())
                else moved[param].item() == tensor[index].item() or tensor[index].isnan()
            )
            assert moved[param].dtype == tensor.dtype
            assert moved[param].shape == tensor[index].shape


@pytest.mark.failure("65")
def test_ragged_layers_and_kinds() -> None:
    layers = [{"w": unique(8, 3, 2)}, {"w": unique(16, 3, 2)}, {"w": unique(4, 5, 2)}, {"w": unique(8, 3, 2)}]
    bank = ExpertBank.from_tensors(layers)
    assert bank.num_experts == (8, 16, 4, 8)
    assert bank.layer_group == (0, 0, 1, 0)
    assert len(bank.shape_groups) == 2
    moved = gather(bank, list(range(36)))
    expected = [row for layer in layers for row in layer["w"]]
    assert all(same_bytes(m["w"], row) for m, row in zip(moved, expected, strict=True))


@pytest.mark.parametrize("location", ["disk", "ram"])
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_safetensors_extents(tmp_path: Path, location: str, shards: int) -> None:
    tensors = write_checkpoint(tmp_path, shards=shards)
    bank = ExpertBank.from_safetensors(tmp_path, "qwen3_moe", location=location)
    assert bank.location == location
    assert bank.num_experts == (EXPERTS, EXPERTS)
    assert bank.layer_names == ("model.layers.1.mlp.experts", "model.layers.3.mlp.experts")
    for gid, moved in enumerate(gather(bank, list(range(8)))):
        prefix = f"model.layers.{(1, 3)[gid // 4]}.mlp.experts.{gid % 4}"
        gate_up = torch.cat([tensors[f"{prefix}.gate_proj.weight"], tensors[f"{prefix}.up_proj.weight"]])
        assert same_bytes(moved["gate_up_proj"], gate_up)
        assert same_bytes(moved["down_proj"], tensors[f"{prefix}.down_proj.weight"])
        again = bank.expert(gid // 4, gid % 4)
        assert all(same_bytes(again[p], moved[p]) for p in again)
    assert same_bytes(bank.layer(1)["down_proj"][2], bank.expert(1, 2)["down_proj"])


def test_adjacent_pieces_become_one_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, layers=(0,), shards=1)
    bank = ExpertBank.from_safetensors(tmp_path, "qwen3_moe")
    sources = bank.sources({(0, "gate_up_proj"): 0, (0, "down_proj"): 1})
    assert len(sources.segment_nbytes) == 2 * EXPERTS  # gate and up lie side by side


@pytest.mark.failure("71")
def test_stacked_tensor_and_single_file(tmp_path: Path) -> None:
    stacked, bias = unique(EXPERTS, 3, 4), unique(EXPERTS, 3, seed=5)
    save_file({"layers.0.w": stacked, "layers.0.b": bias}, tmp_path / "a.safetensors")
    bank = ExpertBank.from_safetensors(tmp_path / "a.safetensors", {"w": "layers.{layer}.w", "b": ["layers.{layer}.b"]})
    for index, moved in enumerate(gather(bank, [0, 1, 2, 3])):
        assert same_bytes(moved["w"], stacked[index])
        assert same_bytes(moved["b"], bias[index])


def test_chosen_layers_only(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    bank = ExpertBank.from_safetensors(tmp_path, Layout.preset("qwen3_moe"), layers=[3])
    assert bank.layer_names == ("model.layers.3.mlp.experts",)
    with pytest.raises(CheckpointError, match=r"layer 2: tensor .*layers\.2\."):
        ExpertBank.from_safetensors(tmp_path, "qwen3_moe", layers=[2])


@pytest.mark.failure("68")
@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "no layers"),
        ([{}], "no expert parameters"),
        ([{"w": torch.empty(2, 3, device="meta")}], r"layers\.0\.w: is on the meta device"),
        ([{"w": [torch.ones(2), torch.ones(3)]}], r"layers\.0\.w\[1\].*\(3,\).*expected \(2,\)"),
        ([{"w": [torch.ones(2), torch.ones(2, dtype=torch.float64)]}], r"w\[1\].*float64"),
        ([{"w": torch.ones(3, 2), "b": torch.ones(4, 2)}], "same number of experts"),
        ([{"w": torch.ones(0, 2)}], "at least one expert"),
        ([{"w": torch.ones(2, 0)}], "no bytes"),
        ([{"w": []}], "empty list"),
        ([{"w": torch.eye(3).to_sparse()}], "no plain storage"),
        ([{"w": ["x"]}], "found str"),
    ],
)
def test_bad_tensors_are_refused(layers: list, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ExpertBank.from_tensors(layers)


def rewrite_header(file: Path, change) -> None:
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


def leave_out(file: Path, name: str) -> None:
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file)


DOWN_2 = "model.layers.1.mlp.experts.2.down_proj.weight"


def test_missing_shard(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors: missing shard"):
        ExpertBank.from_safetensors(tmp_path, "qwen3_moe")


@pytest.mark.failure("128")
@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_shard(tmp_path: Path, keep: int) -> None:
    write_checkpoint(tmp_path)
    shard = tmp_path / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002.safetensors: .*(cut short|truncated)"):
        ExpertBank.from_safetensors(tmp_path, "qwen3_moe")


def test_missing_expert(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=1)
    (tmp_path / "model.safetensors.index.json").unlink()
    file = tmp_path / "model-00001-of-00001.safetensors"
    leave_out(file, DOWN_2)
    with pytest.raises(CheckpointError, match=rf"layer 1: tensor '{DOWN_2}' is not in the checkpoint; found 3 of 4"):
        ExpertBank.from_safetensors(tmp_path, "qwen3_moe")


def test_index_names_a_tensor_the_shard_lacks(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=1)
    leave_out(tmp_path / "model-00001-of-00001.safetensors", DOWN_2)
    with pytest.raises(CheckpointError, match=rf"{DOWN_2}' .*the index says that model-00001-of-00001"):
        ExpertBank.from_safetensors(tmp_path, "qwen3_moe")


@pytest.mark.failure("68")
def test_two_shapes_in_one_layer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=1)
    rewrite_header(
        tmp_path / "model-00001-of-00001.safetensors",
        lambda header: header[DOWN_2].update(shape=[INNER, HIDDEN]),
    )
    with pytest.raises(CheckpointError, match=rf"{DOWN_2}' has shape \(5, 6\), F32; expected \(6, 5\), F32"):
        ExpertBank.from_safetensors(tmp_path, "qwen3_moe")


def test_impossible_header(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=1)
    file = tmp_path / "model-00001-of-00001.safetensors"
    for change in (
        lambda h: h[DOWN_2].update(shape=[6, 6]),
        lambda h: h[DOWN_2].update(shape=[-6, -5]),
        lambda h: h[DOWN_2].pop("data_offsets"),
    ):
        raw = file.read_bytes()
        rewrite_header(file, change)
        with pytest.raises(CheckpointError, match=r"model-00001-of-00001\.safetensors: not a sound"):
            ExpertBank.from_safetensors(tmp_path, "qwen3_moe")
        file.write_bytes(raw)


@pytest.mark.failure("108")
def test_no_match_and_unknown_layout(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no tensor matches"):
        ExpertBank.from_safetensors(tmp_path, "mixtral")
    with pytest.raises(CheckpointError, match=r"unknown layout 'nope'; known: .*qwen3_moe"):
        ExpertBank.from_safetensors(tmp_path, "nope")
    with pytest.raises(CheckpointError, match=r"must hold {layer} once"):
        Layout({"w": ["layers.0.w"]})
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no safetensors file"):
        ExpertBank.from_safetensors(tmp_path / "empty", "mixtral")


@pytest.mark.failure("128", "B8")
def test_file_replaced_after_the_header_was_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=1)
    bank = ExpertBank.from_safetensors(tmp_path, "qwen3_moe")
    file = tmp_path / "model-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="changed since"):
        bank.sources({(0, "gate_up_proj"): 0, (0, "down_proj"): 1})


@pytest.mark.failure("B5")
def test_closed_bank() -> None:
    with ExpertBank.from_tensors([{"w": unique(2, 3)}]) as bank:
        assert "1 layers, 2 experts" in repr(bank)
    bank.close()
    with pytest.raises(ClosedError):
        bank.expert(0, 0)
    with pytest.raises(ClosedError):
        bank.sources({(0, "w"): 0})


def test_unknown_expert() -> None:
    bank = ExpertBank.from_tensors([{"w": unique(2, 3)}])
    for layer, index in ((0, 2), (0, -1), (1, 0)):
        with pytest.raises(IndexError, match="no expert"):
            bank.expert(layer, index)
