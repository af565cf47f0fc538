"""Packed checkpoints of transformers: run from the file's own bytes, equal to transformers' own dequantised model."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_families import load_empty, load_resident
from packed_files import describe, flip, one_file, save_fp8, save_mxfp4
from safetensors.torch import load_file

import moecache
import moecache.hf
from moecache.errors import CheckpointError

pytestmark = pytest.mark.parity
IDS = torch.randint(2, 96, (2, 7), generator=torch.Generator().manual_seed(0))

CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "deepseek_v3": lambda folder: save_fp8("deepseek_v3", folder),
    "qwen3_moe, 8 x 8": lambda folder: save_fp8("qwen3_moe", folder, block=8),
    "glm4_moe, ue8m0": lambda folder: save_fp8("glm4_moe", folder, scales=torch.float8_e8m0fnu),
    "mixtral, e5m2": lambda folder: save_fp8("mixtral", folder, values=torch.float8_e5m2),
    "gpt_oss": save_mxfp4,
    "gpt_oss, wide": lambda folder: save_mxfp4(folder, intermediate_size=96, hidden_size=160),
    "qwen3_moe, a plain layer": lambda folder: save_fp8("qwen3_moe", folder, plain="layers.0.mlp.experts"),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make(tmp_path_factory.mktemp("checkpoint")) for name, make in CHECKPOINTS.items()}


def generate(model: Any) -> Any:
    options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=12, **options)


def assert_same(found: Any, expected: Any) -> None:
    assert torch.equal(found.sequences, expected.sequences)
    assert all(torch.equal(a, b) for a, b in zip(found.logits, expected.logits, strict=True))


@pytest.mark.failure("80", "H33")
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_equal_to_the_dequantised_model(name: str, checkpoints: dict[str, Path]) -> None:
    """On disk and in RAM, with the fewest experts and with all; the state dict is the dequantised one."""
    resident = load_resident(checkpoints[name])
    expected, state = generate(resident), resident.state_dict()
    for place in ("disk", "ram"):
        for capacity in (resident.config.num_experts_per_tok + 1, 1.0):
            model = load_empty(checkpoints[name])
            cache = moecache.attach(model, capacity, bank=place)
            assert cache.bank.location == place
            assert_same(generate(model), expected)
            stats = cache.stats()
            assert stats.misses > 0
            assert stats.expert_bytes_stored < stats.expert_bytes_total
            assert (stats.evictions > 0) == (capacity != 1.0)
            if capacity != 1.0:
                assert stats.resident_bytes < stats.expert_bytes_total
            found = model.state_dict()
            assert found.keys() == state.keys()
            assert all(torch.equal(found[key], state[key]) for key in state)
            moecache.detach(model)


@pytest.mark.parametrize("place", ["disk", "ram"])
def test_what_travels_is_packed(place: str, checkpoints: dict[str, Path]) -> None:
    for name, share in (("deepseek_v3", 0.52), ("gpt_oss", 0.30)):
        model = load_empty(checkpoints[name])
        cache = moecache.attach(model, 1.0, bank=place)
        generate(model)
        stats = cache.stats()
        moved = stats.bytes_demand + stats.bytes_prefetch
        assert 0 < moved <= share * stats.resident_bytes
        assert cache.bank.stored_nbytes <= share * cache.bank.nbytes
        assert f"({cache.bank.stored_nbytes} packed)" in repr(cache.bank)
        assert "where they lie" in str(stats)
        moecache.detach(model)


@pytest.mark.parametrize(
    ("make", "layer", "tensor"),
    [
        (lambda folder: save_fp8("deepseek_v3", folder), 0, "model.layers.1.mlp.experts.{}.down_proj.weight"),
        (save_mxfp4, 0, "model.layers.0.mlp.experts.down_proj_blocks"),
    ],
    ids=["fp8", "mxfp4"],
)
def test_a_flipped_byte_counts_where_its_expert_is_used(make, layer: int, tensor: str, tmp_path: Path) -> None:
    folder = make(tmp_path)
    file = folder / "model.safetensors"
    model = load_empty(folder)
    cache = moecache.attach(model, 4, bank="disk")
    with torch.no_grad():
        before = model(IDS[:1, :2]).logits
    used = {expert for at, expert in _seen(folder) if at == layer}
    unused = set(range(cache.num_experts[layer])) - used
    assert used
    assert unused
    moecache.detach(model)
    nbytes = load_file(file)[tensor.format(0)].nbytes // (1 if "{}" in tensor else cache.num_experts[layer])
    for expert, counts in ((min(unused), False), (min(used), True)):
        flip(file, tensor.format(expert), nbytes // 2 + (0 if "{}" in tensor else expert * nbytes))
        changed = load_empty(folder)
        moecache.attach(changed, 4, bank="disk")
        with torch.no_grad():
            assert torch.equal(changed(IDS[:1, :2]).logits, before) != counts
        moecache.detach(changed)


def _seen(folder: Path) -> set[tuple[int, int]]:
    model = load_empty(folder)
    cache = moecache.attach(model, 1.0, bank="disk", prefetch=False)
    with torch.no_grad():
        model(IDS[:1, :2])
    seen = cache.resident()
    moecache.detach(model)
    return seen


def test_blocks_that_transformers_reads_otherwise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """32 rows of 24 make two blocks, for transformers of 16 each: the same outputs, and a line that says so."""
    save_fp8("qwen3_moe", tmp_path, block=24, plain="attn", moe_intermediate_size=32)
    expected = generate(load_resident(tmp_path))
    with caplog.at_level(logging.WARNING, logger="moecache"):
        model = load_empty(tmp_path)
    said = [record.getMessage() for record in caplog.records if "no multiple of the blocks" in record.getMessage()]
    assert len(said) == 1
    assert "(32, 32) is no multiple of the blocks of (24, 24)" in said[0]
    cache = moecache.attach(model, 4, bank="disk")
    assert_same(generate(model), expected)
    assert cache.stats().evictions > 0


def test_a_cast_model_is_converted(tmp_path: Path) -> None:
    """What is cast after loading is not what the format decodes to."""
    save_fp8("qwen3_moe", tmp_path)
    model = load_empty(tmp_path).to(torch.float32)
    with pytest.raises(CheckpointError, match=r"was loaded as torch.bfloat16 and then cast to torch.float32"):
        moecache.attach(model, 4, bank="disk")
    resident = load_resident(tmp_path).to(torch.float32)
    cache = moecache.attach(model, 4)
    assert cache.bank.location == "ram"
    assert not cache.bank.is_packed
    assert_same(generate(model), generate(resident))


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (
            lambda t: t.pop(f"{EXPERT}_scale_inv"),
            rf"tensor '{EXPERT}_scale_inv' is not in the checkpoint; found 7 of 8 experts",
        ),
        (lambda t: t.pop(EXPERT), rf"tensor '{EXPERT}' is not in the checkpoint; found 7 of 8 experts"),
        (
            lambda t: t.update({f"{EXPERT}_scale_inv": torch.ones(1, 3)}),
            r"has shape \(1, 3\), F32; expected \(1, 1\), F32",
        ),
        (
            lambda t: t.update({n: s.to(torch.int32) for n, s in t.items() if n.endswith("_scale_inv")}),
            r"FP8 scales of I32; expected one of F32",
        ),
        (
            lambda t: t.update({n: torch.ones(3, 1) for n in list(t) if "experts" in n and n.endswith("_scale_inv")}),
            r"FP8 scales of shape \(3, 1\) for values of shape",
        ),
        (
            lambda t: [t.pop(n) for n in list(t) if "experts" in n and n.endswith("_scale_inv")],
            r"the fp8 streams of '.*' have no tensors ending in _scale_inv",
        ),
        (lambda t: t.update({EXPERT: t[EXPERT].float().to(torch.bfloat16)}), r"BF16; expected .*F8_E4M3"),
    ],
    ids=["one scale", "one expert", "shape of one", "dtype", "shape", "all scales", "one plain expert"],
)
def test_fp8_refused_before_anything_is_loaded(edit, why: str, tmp_path: Path) -> None:
    save_fp8("qwen3_moe", tmp_path)
    one_file(tmp_path, edit)
    with pytest.raises(CheckpointError, match=why):
        load_empty(tmp_path)


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (
            lambda t: [t.pop(n) for n in list(t) if n.endswith("_scales")],
            r"the mxfp4 streams of '.*' have no tensors ending in",
        ),
        (
            lambda t: t.update({n: s[..., :-1].contiguous() for n, s in t.items() if n.endswith("_scales")}),
            r"tensor .* holds no expert bytes|MXFP4 scales of shape",
        ),
        (
            lambda t: t.update({n: s.float() for n, s in t.items() if n.endswith("_scales")}),
            r"MXFP4 scales of shape .*, F32",
        ),
    ],
    ids=["no scales", "shape", "dtype"],
)
def test_mxfp4_refused_before_anything_is_loaded(edit, why: str, tmp_path: Path) -> None:
    save_mxfp4(tmp_path, hidden_size=64, intermediate_size=64)
    one_file(tmp_path, edit)
    with pytest.raises(CheckpointError, match=why):
        load_empty(tmp_path)


def test_configured_as_one_format_and_stored_as_another(tmp_path: Path) -> None:
    save_fp8("qwen3_moe", tmp_path)
    describe(tmp_path, quant_method="mxfp4")
    with pytest.raises(CheckpointError, match=r"experts are stored as F8_E4M3 .*quantization_config, which says mxfp4"):
        load_empty(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"experts are stored as F8_E4M3 .*quantization_config, which says none"):
        load_empty(tmp_path)
