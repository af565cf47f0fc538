"""What an attached model, or a loader that was asked for moecache, refuses by name; what it accepts says its cost."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_families import build, load_empty, load_resident, save
from torch import nn

import moecache
import moecache.hf
from moecache.errors import AttachError, CaptureError, CheckpointError

IDS = torch.randint(2, 96, (1, 7), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    return save("mixtral", tmp_path / "mixtral")


@pytest.fixture
def attached(mixtral: Path):
    model = load_empty(mixtral)
    moecache.attach(model, 8)
    yield model
    moecache.detach(model)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said, but for the size of the cache."""
    said = [record.getMessage() for record in caplog.records if record.name == "moecache"]
    return [text for text in said if not text.startswith("capacity")]


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, use_cache=False).logits


@pytest.mark.failure("C10")
@pytest.mark.parametrize(
    ("record", "name"),
    [
        (lambda model: torch.jit.trace(Logits(model), (IDS,), check_trace=False), r"torch\.jit\.trace"),
        (lambda model: torch.onnx.export(Logits(model), (IDS,), "never.onnx", dynamo=False), r"torch\.jit\.trace"),
        (lambda model: torch.export.export(Logits(model), (IDS,), strict=False), r"torch\.export"),
        (lambda model: torch.vmap(Logits(model))(IDS[None]), r"torch\.func"),
    ],
    ids=["jit.trace", "onnx", "export", "vmap"],
)
@torch.no_grad()
def test_recording_a_model_is_refused(attached, record, name: str) -> None:
    with pytest.raises(CaptureError, match=rf"{name}.* cannot record this model: .*moecache\.detach"):
        record(attached)
    attached(IDS)


@pytest.mark.failure("C10")
@pytest.mark.parametrize(
    ("record", "name"),
    [
        (lambda experts, run, rows: torch.fx.symbolic_trace(experts), r"torch\.fx"),
        (lambda experts, run, rows: torch.fx.experimental.proxy_tensor.make_fx(run)(rows), "proxy or fake tensors"),
        (lambda experts, run, rows: torch.vmap(run)(rows[None]), r"torch\.func"),
        (lambda experts, run, rows: torch.func.grad(lambda x: run(x).sum())(rows), r"torch\.func"),
    ],
    ids=["symbolic_trace", "make_fx", "vmap", "grad"],
)
def test_recording_one_module_is_refused(attached, record, name: str) -> None:
    experts = attached.model.layers[0].mlp.experts
    ids, scales = torch.tensor([[0, 1]] * 5), torch.full((5, 2), 0.5)
    with pytest.raises(CaptureError, match=name):
        record(experts, lambda rows: experts(rows, ids, scales), torch.randn(5, 32))


@pytest.mark.failure("C10")
@torch.no_grad()
def test_strict_export_and_full_graphs_say_why(attached) -> None:
    for record in (
        lambda: torch.export.export(Logits(attached), (IDS,), strict=True),
        lambda: torch.compile(Logits(attached), backend="eager", fullgraph=True)(IDS),
    ):
        with pytest.raises(Exception, match="an attached model takes its experts from a cache while it runs"):
            record()


@pytest.mark.failure("C10", "J39", "110")
@torch.no_grad()
def test_compiling_breaks_the_graph_and_says_nothing(attached, mixtral: Path, monkeypatch) -> None:
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    eager, compiled = load_resident(mixtral), torch.compile(attached, backend="eager")
    for ids in (IDS, IDS[:, :1]):
        assert torch.equal(compiled(ids).logits, eager(ids).logits)
    assert ignored == []


def _environment() -> dict[str, str]:
    folders = [str(Path(moecache.__file__).parents[1]), str(Path(__file__).parent)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}


@pytest.mark.failure("C10", "82")
@torch.no_grad()
def test_parameters_given_after_attaching_are_refused(attached, mixtral: Path) -> None:
    """They would be ignored: the cache feeds what is in its bank."""
    eager = load_resident(mixtral)
    with pytest.raises(AttachError, match="was replaced or wrapped after the model was attached"):
        torch.func.functional_call(attached, dict(eager.named_parameters()), (IDS,))
    assert torch.equal(
        torch.func.functional_call(attached, dict(attached.named_parameters()), (IDS,)).logits, eager(IDS).logits
    )
    experts = attached.model.layers[1].mlp.experts
    kept = experts.down_proj
    experts.down_proj = nn.Parameter(torch.ones(8, 32, 48))
    with pytest.raises(AttachError, match=r"model\.layers\.1\.mlp\.experts\.down_proj was replaced"):
        attached(IDS)
    experts.down_proj = kept
    assert torch.equal(attached(IDS).logits, eager(IDS).logits)
    nn.utils.parametrize.register_parametrization(experts, "down_proj", nn.Identity(), unsafe=True)
    with pytest.raises(AttachError, match="down_proj was replaced or wrapped"):
        attached(IDS)
    nn.utils.parametrize.remove_parametrizations(experts, "down_proj", leave_parametrized=False)


@pytest.mark.failure("C10")
def test_replicas_are_refused(attached) -> None:
    for module in (attached, attached.model.layers[0].mlp.experts):
        with pytest.raises(AttachError, match=r"cannot be replicated over devices \(DataParallel\)"):
            module._replicate_for_data_parallel()


@pytest.mark.failure("112")
def test_what_changes_neither_dtype_nor_device_is_done(attached) -> None:
    assert attached.share_memory() is attached
    assert all(param.is_shared() for param in attached.parameters() if not param.is_meta)
    with torch.no_grad():
        attached(IDS)


def test_what_was_kept_out_says_nothing(mixtral: Path, caplog) -> None:
    moecache.attach(load_empty(mixtral), 8)
    assert warnings_in(caplog) == []


RANKS = """
import os, sys, torch
import moecache, moecache.hf
from hf_families import load_empty
from pathlib import Path
from transformers.distributed import DistributedConfig
from moecache.errors import AttachError
os.environ.update(RANK=sys.argv[1], LOCAL_RANK=sys.argv[1], WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[3])
try:
    load_empty(Path(sys.argv[2]), distributed_config=DistributedConfig(tp_size=2))
except AttachError as error:
    print("refused:", error)
"""


@pytest.mark.failure("C11", "107")
def test_several_ranks_are_refused(mixtral: Path) -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(rank), str(mixtral), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(),
        )
        for rank in range(2)
    ]
    for rank in ranks:
        out, errors = rank.communicate(timeout=180)
        assert "refused: experts_implementation='moecache' does not go with distributed_config" in out, errors


@pytest.mark.failure("C11", "111", "112")
def test_placement_over_several_devices_is_refused(mixtral: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    device_map = {"model": "cpu", "lm_head": "disk"}
    with pytest.raises(AttachError, match=r"does not go with a device_map over cpu, disk .* name one device"):
        load_empty(mixtral, device_map=device_map, offload_folder=tmp_path / "offload")
    model = load_empty(mixtral, device_map="auto")
    assert model.model.layers[0].mlp.experts.down_proj.is_meta


@pytest.mark.failure("C11", "H33", "107")
def test_what_cannot_be_kept_out_is_said_with_its_cost(mixtral: Path, caplog) -> None:
    eager = load_resident(mixtral)
    cost = f"{2 * 8 * 3 * 32 * 48 * 4:,} bytes"
    for file in mixtral.glob("*.safetensors*"):
        file.unlink()
    torch.save(eager.state_dict(), mixtral / "pytorch_model.bin")
    model = load_empty(mixtral)
    assert [cost in text and ".bin" in text for text in warnings_in(caplog)] == [True]
    with pytest.raises(
        AttachError, match=r"bank='disk' is not possible: they are read from \.bin files; .*use bank='ram'"
    ):
        moecache.attach(model, 8, bank="disk")
    caplog.clear()
    given = transformers.MixtralForCausalLM.from_pretrained(
        None, config=eager.config, state_dict=eager.state_dict(), experts_implementation="moecache"
    )
    assert [cost in text and "state_dict" in text for text in warnings_in(caplog)] == [True]
    with pytest.raises(AttachError, match="they came as a state_dict"):
        moecache.attach(given, 8, bank="disk")
    for loaded in (model, given):
        moecache.attach(loaded, 8)
        with torch.no_grad():
            assert torch.allclose(loaded(IDS).logits, eager(IDS).logits, atol=1e-5)


@pytest.mark.failure("C11", "108")
def test_a_model_without_such_experts_is_said(tmp_path: Path, caplog) -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    load_empty(tmp_path)
    assert len(said := warnings_in(caplog)) == 1
    assert "LlamaForCausalLM has no MoE layers that moecache can page" in said[0]


@pytest.mark.failure("H33", "107")
def test_conversion_into_ram_is_said_with_its_cost(tmp_path: Path, caplog) -> None:
    save("mixtral", tmp_path, torch.bfloat16)
    moecache.attach(load_empty(tmp_path, dtype=torch.float32), 8)
    (said,) = warnings_in(caplog)
    nbytes = 2 * 8 * 3 * 32 * 48 * 4
    assert f"{nbytes:,} bytes ({nbytes // 2:,} bytes in the checkpoint)" in said
    assert "is to be torch.float32, the checkpoint holds torch.bfloat16" in said


@pytest.mark.failure("H32", "112")
def test_cast_between_loading_and_attaching(mixtral: Path, caplog) -> None:
    eager, model = load_resident(mixtral).half(), load_empty(mixtral).half()
    with pytest.raises(
        CheckpointError, match=r"loaded as torch.float32 and then cast to torch.float16; use bank='ram'"
    ):
        moecache.attach(model, 8, bank="disk")
    moecache.attach(model, 8)
    assert ["then cast to torch.float16" in text for text in warnings_in(caplog)] == [True]
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, eager(IDS).logits)


@pytest.mark.failure("H32")
def test_a_model_that_is_decompressed_at_its_first_forward_is_refused(mixtral: Path) -> None:
    """compressed-tensors marks such a model by the handle of its hook."""
    model = load_empty(mixtral)
    model.ct_decompress_hook = model.register_forward_pre_hook(lambda module, args: None)
    with pytest.raises(AttachError, match=r"compressed-tensors decompresses this model inside its first forward"):
        moecache.attach(model, 8)


@pytest.mark.failure("H34")
def test_base_model_of_a_model_that_was_kept_out(mixtral: Path) -> None:
    model, eager = load_empty(mixtral), load_resident(mixtral)
    cache = moecache.attach(model.model, 8, bank="disk")
    assert cache.bank.layer_names[0] == "model.layers.0.mlp.experts"
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, eager(IDS).logits)
    moecache.detach(model.model)
    moecache.attach(model, 8, bank="disk")
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, eager(IDS).logits)


@pytest.mark.failure("H34", "110")
def test_wrapper_around_a_model(mixtral: Path) -> None:
    model, eager = load_empty(mixtral), load_resident(mixtral)
    for wrapper in (Logits(model), torch.compile(model, backend="eager")):
        cache = moecache.attach(wrapper, 8)
        assert model.moecache is cache
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, eager(IDS).logits)
        moecache.detach(wrapper)
        assert not hasattr(model, "moecache")


def adapter(folder: Path, base: Path, **options: Any) -> Path:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(load_resident(base), peft.LoraConfig(r=2, init_lora_weights=False, **options))
    model.save_pretrained(folder)
    return folder


@pytest.mark.failure("H31", "H34", "118")
def test_adapters_of_attention(mixtral: Path, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", mixtral, target_modules=["q_proj", "v_proj"])
    eager = load_resident(mixtral)
    eager.load_adapter(str(folder))
    with torch.no_grad():
        expected = eager(IDS).logits
    model = load_empty(mixtral)
    model.load_adapter(str(folder))
    whole = load_empty(folder)
    import peft

    for loaded in (model, whole, peft.PeftModel.from_pretrained(load_empty(mixtral), str(folder))):
        cache = moecache.attach(loaded, 8, bank="disk")
        with torch.no_grad():
            assert torch.equal(loaded(IDS).logits, expected)
        assert cache.stats().misses > 0
        moecache.detach(loaded)
    attached = load_empty(mixtral)
    moecache.attach(attached, 8)
    attached.load_adapter(str(folder))
    with torch.no_grad():
        assert torch.equal(attached(IDS).logits, expected)


def test_levels_of_the_log_are_left_alone(mixtral: Path) -> None:
    level = logging.getLogger("moecache").level
    moecache.attach(build("mixtral"), 8)
    assert logging.getLogger("moecache").level == level
