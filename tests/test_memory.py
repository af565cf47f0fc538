"""Peak memory of loading and generating: the experts' bytes are never held, however many there are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

LAYERS, EXPERTS, TOP_K, HIDDEN, INNER, VOCAB = 8, 32, 2, 512, 640, 2048
EXPERT_NBYTES = 3 * HIDDEN * INNER * 2
MARGIN = 64 * 2**20

SCRIPT = """
import sys
import torch
import transformers
import transformers.models.qwen3_moe.modeling_qwen3_moe
from transformers import AutoModelForCausalLM, GenerationMixin

torch.set_num_threads(1)
# The interpreter that the margin is over: everything imported, and torch's kernels once used.
torch.nn.functional.linear(torch.ones(4, 4, dtype=torch.bfloat16), torch.ones(4, 4, dtype=torch.bfloat16))

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

before = peak()
import moecache
import moecache.hf

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], experts_implementation="moecache")
loaded = peak()
cache = moecache.attach(model, int(sys.argv[2]), bank="disk")
model.generate(torch.arange(2, 10)[None], max_new_tokens=8, do_sample=False)
stats = cache.stats()
resident = sum(p.nbytes for p in model.parameters() if p.device.type != "meta")
print(before, loaded, peak(), resident, cache.pool.nbytes, stats.misses, stats.evictions)
"""


def write_shard(file: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    """A bfloat16 shard of small random numbers, written tensor by tensor."""
    header, end = {}, 0
    for name, shape in tensors.items():
        nbytes = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    block = (torch.randn(HIDDEN * INNER, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    raw = block.view(torch.uint8).numpy().tobytes()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for shape in tensors.values():
            whole, rest = divmod(2 * torch.Size(shape).numel(), len(raw))
            for _ in range(whole):
                stream.write(raw)
            stream.write(raw[:rest])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        moe_intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        eos_token_id=None,
        pad_token_id=0,
        dtype="bfloat16",
        architectures=["Qwen3MoeForCausalLM"],
        tie_word_embeddings=False,
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        names = transformers.Qwen3MoeForCausalLM(config).state_dict()
    shards: dict[str, dict[str, tuple[int, ...]]] = {}
    shards["model-rest.safetensors"] = {name: tuple(t.shape) for name, t in names.items() if ".experts." not in name}
    for layer in range(LAYERS):
        shard = shards.setdefault(f"model-{layer}.safetensors", {})
        for expert in range(EXPERTS):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            shard[f"{prefix}.down_proj.weight"] = (HIDDEN, INNER)
            shard[f"{prefix}.gate_proj.weight"] = (INNER, HIDDEN)
            shard[f"{prefix}.up_proj.weight"] = (INNER, HIDDEN)
    for file, tensors in shards.items():
        write_shard(folder / file, tensors)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert sum(file.stat().st_size for file in folder.glob("*.safetensors")) > 500e6
    return folder


@pytest.mark.failure("104", "127")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="VmHWM is read from Linux's /proc")
def test_peak_is_the_dense_part_and_the_pool(checkpoint: Path) -> None:
    capacity = 24
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(checkpoint), str(capacity)], capture_output=True, text=True, check=True
    )
    before, loaded, peak, resident, pool, misses, evictions = map(int, result.stdout.split())
    assert pool == capacity * EXPERT_NBYTES
    assert resident < 30e6
    assert misses > 0
    assert evictions > 0
    assert loaded - before < resident + MARGIN
    assert peak - before < resident + pool + MARGIN
