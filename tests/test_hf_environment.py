"""Attaching and loading under other defaults, modes and limits than a fresh process has."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hf_families import build, load_empty, load_resident, save
from safetensors.torch import load_file, save_file
from torch import nn

import moecache
import moecache.hf
from moecache import ExpertBank, ExpertCache
from moecache.errors import CheckpointError
from moecache.hf import forms

IDS = torch.randint(2, 96, (1, 7), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    return save("mixtral", tmp_path / "mixtral")


@contextlib.contextmanager
def default_device(name: str):
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "default device": lambda: default_device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "float16": lambda: default_dtype(torch.float16),
    "inference mode": torch.inference_mode,
    "grad": torch.enable_grad,
    "deterministic": deterministic,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.failure("G25")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bank", ["disk", "ram", None])
def test_mode_around_attaching(mixtral: Path, mode: str, bank: str | None) -> None:
    eager = load_resident(mixtral)
    model = load_resident(mixtral) if bank is None else load_empty(mixtral)
    with MODES[mode]():
        moecache.attach(model, 4, bank=bank)
    with torch.no_grad():
        expected = eager(IDS).logits
        assert torch.equal(model(IDS).logits, expected)
    assert torch.equal(model(IDS).logits, expected)  # with grad mode on, nothing made in inference mode is in the way
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), eager.state_dict().values(), strict=True))
    moecache.detach(model)


@pytest.mark.failure("G25")
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "default device"])
def test_mode_around_loading_and_running(mixtral: Path, mode: str) -> None:
    with MODES[mode](), torch.no_grad():
        eager, model = load_resident(mixtral), load_empty(mixtral)
        moecache.attach(model, 4, bank="disk")
        assert torch.equal(model(IDS).logits, eager(IDS).logits)
        model.generate(IDS, max_new_tokens=3, do_sample=False)


@pytest.mark.failure("G25")
def test_default_device_around_everything_but_the_model(mixtral: Path) -> None:
    """Import, bank, cache and a step by hand, in a process whose default device is another."""
    code = f"""
import torch
torch.set_default_device("meta")
import moecache
bank = moecache.ExpertBank.from_safetensors({str(mixtral)!r}, "mixtral", location="ram")
with moecache.ExpertCache(bank, 4, device="cpu") as cache, cache.request() as request:
    for ids in ([[0, 1]], [[0, 1], [2, 3], [4, 5]], torch.tensor([[7, 0]], device="cpu")):
        with request.route(0, ids) as lease:
            for expert, slot, tokens in lease.ready():
                assert tokens.device.type == "cpu"
                assert torch.equal(lease.weights["down_proj"][slot], bank.expert(0, expert)["down_proj"])
"""
    folder = str(Path(moecache.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": folder}
    )
    assert done.returncode == 0, done.stderr


def sparse_checkpoint(folder: Path, nbytes: int) -> Path:
    """A tiny model whose file holds `nbytes` more in a tensor that no parameter takes, between those that one does."""
    save("mixtral", folder)
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(shard))
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink()
    save_file(tensors, folder / "a.safetensors", metadata={"format": "pt"})
    small = (folder / "a.safetensors").read_bytes()
    length = int.from_bytes(small[:8], "little")
    end = len(small) - 8 - length
    text = small[8 : 8 + length].rstrip()[:-1].decode()
    header = (
        text
        + f',"model.layers.2.mlp.experts.gate_up_proj":{{"dtype":"U8","shape":[{nbytes}],"data_offsets":[{end},{end + nbytes}]}}}}'
    )
    raw = header.encode() + b" " * (-len(header) % 8)
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw + small[8 + length :])
        stream.truncate(8 + len(raw) + end + nbytes)
    (folder / "a.safetensors").unlink()
    return folder


LIMITED = """
import resource, sys, torch
import moecache, moecache.hf
from hf_families import load_empty
from pathlib import Path
room, folder = int(sys.argv[1]), Path(sys.argv[2])
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
try:
    model = load_empty(folder, disable_mmap=False)
    moecache.attach(model, 4, bank="disk")
    with torch.no_grad():
        print("logits", float(model(torch.arange(2, 9)[None]).logits.sum()))
except moecache.errors.CheckpointError as error:
    print("refused:", error)
"""


def limited(folder: Path, room: int) -> str:
    folders = [str(Path(moecache.__file__).parents[1]), str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(room), str(folder)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.failure("G27")
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS and /proc are Linux's")
def test_only_what_is_needed_is_mapped(tmp_path: Path) -> None:
    """A file of 16 GB in an address space with room for 2 GB: what nobody needs takes none of it."""
    assert "logits" in limited(sparse_checkpoint(tmp_path, 16 << 30), 2 << 30)


@pytest.mark.failure("G27")
def test_tensors_lie_as_in_the_file(mixtral: Path) -> None:
    """At the alignment at which transformers maps them, so that products that depend on it are the same."""
    ours, theirs = load_empty(mixtral), load_resident(mixtral)
    for name, param in ours.named_parameters():
        if not param.is_meta:
            assert param.data_ptr() % 64 == theirs.get_parameter(name).data_ptr() % 64, name


@pytest.mark.failure("G27c")
@pytest.mark.parametrize("capacity", [2, 5, 12])
def test_kept_products_are_bounded_and_change_nothing(monkeypatch, capacity: int) -> None:
    """More experts than slots, in an order that keeps nearly all products waiting."""
    monkeypatch.setattr(forms, "KEPT_NBYTES", 4096)
    torch.manual_seed(0)
    module = build("mixtral", num_local_experts=16).model.layers[0].mlp.experts
    bank = ExpertBank.from_tensors([{name: param.detach() for name, param in module.named_parameters()}])
    kept = []
    with (
        ExpertCache(bank, capacity, device="cpu", prefetch=False) as cache,
        cache.request() as request,
        torch.no_grad(),
    ):
        for _ in range(6):
            hidden = torch.randn(200, 32)
            ids = torch.rand(200, 16).argsort(1)[:, :2].contiguous()
            scales = torch.rand(200, 2)
            order = []
            with request.route(0, ids) as lease:
                ready = lease.ready

                def spied(ready=ready, order=order):
                    for item in ready():
                        order.append(item[0])
                        yield item

                monkeypatch.setattr(type(lease), "ready", lambda self, spied=spied: spied(), raising=True)
                found = forms.Form(forms.plain, "input").run(module, lease, hidden, ids, scales)
                monkeypatch.undo()
                monkeypatch.setattr(forms, "KEPT_NBYTES", 4096)
            assert torch.equal(found, type(module).forward.__wrapped__(module, hidden, ids, scales))
            kept.append(_most_kept(order))
    assert max(kept) <= 8


def _most_kept(order: list[int]) -> int:
    """Most experts that waited for a lower one at a time."""
    waiting: set[int] = set()
    most = turn = 0
    ascending = sorted(order)
    for expert in order:
        waiting.add(expert)
        while turn < len(ascending) and ascending[turn] in waiting:
            waiting.discard(ascending[turn])
            turn += 1
        most = max(most, len(waiting))
    return most


def test_a_mapped_parameter_outlives_its_file(mixtral: Path) -> None:
    model, eager = load_empty(mixtral), load_resident(mixtral)
    moecache.attach(model, 4, bank="ram")
    for shard in mixtral.glob("*.safetensors"):
        shard.unlink()
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, eager(IDS).logits)
    assert isinstance(model.lm_head.weight, nn.Parameter)


@pytest.mark.failure("G27")
def test_a_mapping_that_fails_is_named_or_read(mixtral: Path, monkeypatch, caplog) -> None:
    def failing(number: int):
        def mmap(*args: object, **kwargs: object) -> None:
            raise OSError(number, os.strerror(number))

        return mmap

    monkeypatch.setattr("moecache.hf.mapped.mmap.mmap", failing(errno.ENOMEM))
    with pytest.raises(
        CheckpointError, match=r"mapping [\d,]+ bytes of tensors outside the experts failed .*raise the limit"
    ):
        load_empty(mixtral)
    monkeypatch.setattr("moecache.hf.mapped.mmap.mmap", failing(errno.ENODEV))
    moecache.attach(model := load_empty(mixtral), 4)
    assert "cannot be mapped" in caplog.text
    with torch.no_grad():
        assert torch.allclose(model(IDS).logits, load_resident(mixtral)(IDS).logits, atol=1e-5)
