"""The examples: decoding from disk equals the resident model, at every capacity, and says clearly what it cannot do."""

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

from moecache import History
from moecache.lease import Lease
from moecache.request import Request
from moecache.request_batch import RequestBatch

EXAMPLES = Path(__file__).parent.parent / "examples"
PROMPTS = ["def __init__(self, ", "#include <stdio.h>\n\nint ", "<html>\n<head>\n", '{\n  "name": "a", "version": ']
KEYS = {
    *("tokens_per_s", "hit_rate", "demands", "hits", "misses", "evictions", "prefetch_issued", "prefetch_useful"),
    *("bytes_demand", "bytes_prefetch", "stall_s", "capacity_experts", "resident_bytes", "expert_bytes_total"),
    *("identical", "text"),
}


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def decode() -> ModuleType:
    pytest.importorskip("transformers")
    return load_example("decode")


@pytest.fixture(scope="module")
def handwritten() -> ModuleType:
    return load_example("handwritten")


@pytest.fixture
def steps_within_capacity(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Holds at every step that no more experts are resident than there are slots; collects the numbers seen."""
    seen: list[int] = []

    def checking(route: Callable[..., Lease]) -> Callable[..., Lease]:
        def checked(self: Request | RequestBatch, *args, **kwargs) -> Lease:
            lease = route(self, *args, **kwargs)
            seen.append(len(self.cache.resident()))
            assert seen[-1] <= self.cache.capacity
            return lease

        return checked

    for cls in (Request, RequestBatch):
        monkeypatch.setattr(cls, "route", checking(cls.route))
    return seen


@pytest.mark.parametrize(("capacity", "experts"), [("4", 4), ("0.05", 12), ("0.25", 64), ("1.0", 256)])
def test_decode_equals_the_resident_model(
    decode: ModuleType, tmp_path: Path, steps_within_capacity: list[int], capacity: str, experts: int
) -> None:
    out = tmp_path / "facts.json"
    arguments = ["--capacity", capacity, "--bank", "disk", "--check", "--max-new-tokens", "24", "--json", str(out)]
    assert decode.run([*arguments, "--prompt", PROMPTS[0]]) == 0

    facts = json.loads(out.read_text())
    assert set(facts) == KEYS
    assert facts["identical"] is True
    assert abs(facts["capacity_experts"] - experts) <= 1
    assert isinstance(facts["text"], str)
    assert facts["hits"] + facts["misses"] == facts["demands"] > 0
    assert facts["resident_bytes"] <= facts["expert_bytes_total"] * facts["capacity_experts"] / 256
    if experts < 256:
        assert facts["misses"] > 0
        assert facts["evictions"] > 0
        assert facts["bytes_demand"] > 0
    assert max(steps_within_capacity) <= facts["capacity_experts"]


@pytest.mark.parametrize("bank", ["disk", "ram"])
def test_decode_of_a_batch_equals_the_resident_model(
    decode: ModuleType, tmp_path: Path, steps_within_capacity: list[int], bank: str
) -> None:
    out = tmp_path / "facts.json"
    prompts = [argument for prompt in PROMPTS for argument in ("--prompt", prompt)]
    assert decode.run([*prompts, "--bank", bank, "--check", "--max-new-tokens", "12", "--json", str(out)]) == 0
    facts = json.loads(out.read_text())
    assert facts["identical"] is True
    assert len(facts["text"]) == 4
    assert facts["misses"] > 0
    assert facts["evictions"] > 0
    assert steps_within_capacity


def map_at(file: Path, remainder: int) -> None:
    """Write a file of tensors again, so that where it is mapped they begin at addresses of that remainder by 64."""
    tensors = load_file(file)
    for n in range(64):
        save_file(tensors, file, metadata={"format": "pt", "pad": "x" * n})
        if (8 + int.from_bytes(file.read_bytes()[:8], "little")) % 64 == remainder:
            return
    raise AssertionError("no length of the header gives this remainder")


@pytest.mark.failure("C13")
@pytest.mark.parametrize("remainder", [8, 40])
def test_check_compares_with_experts_aligned_as_slots_are(decode: ModuleType, tmp_path: Path, remainder: int) -> None:
    """A float32 checkpoint that is mapped at any address: the reference must not depend on it."""
    folder = tmp_path / "model"
    model = decode.AutoModelForCausalLM.from_pretrained(decode.TINY, dtype=torch.float32)
    model.save_pretrained(folder, save_original_format=False)  # experts stacked, as they lie in memory
    shutil.copy(decode.TINY / "tokenizer.json", folder)
    map_at(folder / "model.safetensors", remainder)

    resident = decode.load_resident(argparse.Namespace(model=folder))
    before = {name: param.clone() for name, param in resident.named_parameters()}
    addresses = [param.data_ptr() % 64 for name, param in resident.named_parameters() if ".experts." in name]
    for name, param in decode.align_experts(resident).named_parameters():
        assert torch.equal(param, before[name])
        if ".experts." in name:
            assert {expert.data_ptr() % 64 for expert in param} == {0}
    assert any(addresses), "nothing was to be aligned"

    out = tmp_path / "facts.json"
    arguments = [str(folder), "--prompt", PROMPTS[0], "--bank", "disk", "--capacity", "0.1", "--check"]
    assert decode.run([*arguments, "--max-new-tokens", "8", "--json", str(out)]) == 0
    facts = json.loads(out.read_text())
    assert facts["identical"] is True
    assert facts["misses"] > 0
    assert facts["evictions"] > 0


def test_check_notices_a_difference(
    decode: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    loader = decode.load_resident

    def altered(args):
        model = loader(args)
        with torch.no_grad():
            model.model.layers[0].mlp.experts.down_proj *= 1.25
        return model

    monkeypatch.setattr(decode, "load_resident", altered)
    assert decode.run(["--prompt", PROMPTS[0], "--check", "--max-new-tokens", "4"]) == 1
    assert "DIFFERS" in capsys.readouterr().out


def test_prompt_file_policy_and_history(decode: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    prompt, history = tmp_path / "prompt.txt", tmp_path / "chat.history"
    prompt.write_text(PROMPTS[1])
    arguments = ["--prompt-file", str(prompt), "--policy", "lru", "--max-new-tokens", "6", "--history", str(history)]
    for _ in range(2):
        assert decode.run(arguments) == 0
        assert history.stat().st_size > 0
    out = capsys.readouterr().out
    assert "int " in out
    assert "moecache lru" in out


@pytest.mark.failure("G24")
def test_a_prompt_in_utf8_where_the_locale_is_ascii(tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Der B\u00e4r \u2603", encoding="utf-8")
    plain = {
        **os.environ,
        "PYTHONUTF8": "0",
        "LC_ALL": "C",
        "LANG": "C",
        "PYTHONPATH": str(EXAMPLES.parent),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(EXAMPLES / "decode.py"), "--prompt-file", str(prompt), "--max-new-tokens", "4"]
    done = subprocess.run(command, env=plain, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")


def test_fit_shows_before_and_after(decode: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out, history = tmp_path / "facts.json", tmp_path / "chat.history"
    arguments = ["--fit", "--check", "--bank", "disk", "--prompt", PROMPTS[0], "--max-new-tokens", "4"]
    assert decode.run([*arguments, "--json", str(out), "--history", str(history)]) == 0
    shown = capsys.readouterr().out
    assert "recorded 23 of 23 prompts" in shown
    assert "held-out loss" in shown
    rows = [line for line in shown.splitlines() if line.startswith(("before ", "after, "))]
    assert [re.split(r" {2,}", row)[0] for row in rows] == ["before", "after, counts alone", "after, forecaster"]
    facts = json.loads(out.read_text())
    assert set(facts) == KEYS
    assert facts["identical"] is True
    kept = History.load(history)
    assert kept.forecaster is not None
    assert len(kept) == 23


def test_compare_shows_the_others_side_by_side(decode: ModuleType, capsys: pytest.CaptureFixture) -> None:
    assert decode.run(["--prompt", PROMPTS[0], "--max-new-tokens", "2", "--compare"]) == 0
    out = capsys.readouterr().out
    for name in ("moecache expected-next-use", "moecache lru", "fully resident", "accelerate disk"):
        assert name in out
    assert "failed" not in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["no/such/model"],
        ["--capacity", "0"],
        ["--capacity", "-3"],
        ["--capacity", "2.5"],
        ["--capacity", "3"],
        ["--capacity", "lots"],
        ["--policy", "newest"],
        ["--fit", "--policy", "lru"],
        ["--prompt-file", "no/such/file"],
        ["--prompt", ""],
        ["--max-new-tokens", "0"],
        ["--json", "no/such/folder/facts.json"],
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line(
    decode: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, arguments: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["decode.py", *arguments])
    assert decode.main() == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("decode.py: ")


@pytest.mark.parametrize("capacity", [0.05, 1.0])
def test_handwritten_writes_what_transformers_writes(
    handwritten: ModuleType, steps_within_capacity: list[int], capacity: float
) -> None:
    transformers = pytest.importorskip("transformers")
    resident = transformers.AutoModelForCausalLM.from_pretrained(handwritten.TINY, experts_implementation="eager")
    with torch.inference_mode():
        model = handwritten.TinyMoE(handwritten.TINY, capacity=capacity)
        for prompt in PROMPTS:
            ids = torch.tensor([list(prompt.encode())])
            expected = resident.generate(ids, do_sample=False, max_new_tokens=32)[0, ids.shape[1] :].tolist()
            assert list(model.generate(ids[0].tolist(), 32)) == expected
        model.cache.close()
    assert steps_within_capacity


def test_handwritten_is_short_and_needs_no_transformers() -> None:
    assert len((EXAMPLES / "handwritten.py").read_text().splitlines()) <= 150
    code = (
        "import runpy, sys; sys.modules['transformers'] = None; sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", code, str(EXAMPLES / "handwritten.py"), "import os\n", "--max-new-tokens", "4"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("import os\n")
    assert "hits" in done.stdout
