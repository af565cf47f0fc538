"""Ways of loading and running a model: each beside the same without a cache."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from hf_families import aligned
from hf_other_families import inputs
from torch import nn

import moecache
import moecache.hf
from moecache.hf.discovery import discover, experts_per_token

IDS = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))
NEW_TOKENS = 12

Attached = tuple[Any, moecache.ExpertCache]


class Way(NamedTuple):
    """One way.

    Attributes
    ----------
    attached : callable
        Of the checkpoint's folder, the model's class and an implementation: the model and its cache.
    reference : callable, optional
        Of the same: the model without a cache, where it is not what ``from_pretrained`` makes.
    run : callable
        What is compared, of a model.
    suits : callable, optional
        Whether the way is one for this class of models.
    both_dtypes, every_implementation : bool
        Whether it is run in float32 too, and with each of the implementations; else with what transformers chooses.
    """

    attached: Callable[[Path, Any, str], Attached]
    reference: Callable[[Path, Any, str], Any] | None = None
    run: Callable[[Any], list[torch.Tensor]] | None = None
    suits: Callable[[Any], bool] = lambda cls: True
    both_dtypes: bool = False
    every_implementation: bool = False


@torch.no_grad()
def outputs(model: Any) -> list[torch.Tensor]:
    """Of a batch, of one token, and of an answer for a batch of two: logits and tokens."""
    found = []
    for ids in (IDS, IDS[:1, :1]):
        output = model(**inputs(model, ids))
        found.append(output.logits if hasattr(output, "logits") else output.last_hidden_state)
    return found + (answer(model) if generates(type(model)) else [])


@torch.no_grad()
def answer(model: Any) -> list[torch.Tensor]:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    output = model.generate(input_ids=IDS, output_logits=True, return_dict_in_generate=True, **options)
    return [output.sequences, *output.logits]


def generates(cls: Any) -> bool:
    # Diffusion draws its answers at random, and step3p7 is a model without a head.
    return hasattr(cls, "generate") and not cls.__name__.startswith("DiffusionGemma")


def decodes(cls: Any) -> bool:
    return generates(cls) and "ForConditional" not in cls.__name__


def few(model: nn.Module) -> int:
    """Slots for the experts of one token and one more, of every shape that experts have."""
    layers = discover(model)
    shapes = {tuple((key, param.shape) for key, param in layer.experts.items()) for layer in layers}
    return len(shapes) * (1 + max(experts_per_token(layer.config) or 1 for layer in layers))


def load(folder: Path, cls: Any, **options: Any) -> Any:
    return aligned(cls.from_pretrained(folder, experts_implementation="moecache", **options))


def resident(folder: Path, cls: Any, name: str, **options: Any) -> Any:
    return aligned(cls.from_pretrained(folder, experts_implementation=name, **options))


def put_on(model: Any, name: str | None, capacity: float | None = None, **options: Any) -> Attached:
    dispatches = name if any(not layer.own for layer in discover(model)) else None
    capacity = few(model) if capacity is None else capacity
    return model, moecache.attach(model, capacity, experts_implementation=dispatches, **options)


def from_disk(folder: Path, cls: Any, name: str) -> Attached:
    return put_on(load(folder, cls), name)


def from_memory(folder: Path, cls: Any, name: str) -> Attached:
    return put_on(resident(folder, cls, name), None)


def all_resident(folder: Path, cls: Any, name: str) -> Attached:
    return put_on(load(folder, cls), name, 1.0)


def all_resident_in_ram(folder: Path, cls: Any, name: str) -> Attached:
    return put_on(load(folder, cls), name, 1.0, bank="ram")


def by_device_map(folder: Path, cls: Any, name: str) -> Attached:
    return put_on(load(folder, cls, device_map="cpu"), name)


def by_moecache(folder: Path, cls: Any, name: str) -> Attached:
    model = aligned(moecache.load(folder, capacity=1.0))
    model.moecache.resize(few(model))
    return model, model.moecache


def by_state_dict(folder: Path, cls: Any, name: str) -> Attached:
    whole = cls.from_pretrained(folder)
    model = cls.from_pretrained(
        None, config=whole.config, state_dict=whole.state_dict(), experts_implementation="moecache"
    )
    return put_on(aligned(model), name)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", unk_token="w0")


def pipeline_of(model: Any) -> Any:
    return transformers.pipeline("text-generation", model=model, tokenizer=tokenizer())


def by_pipeline(folder: Path, cls: Any, name: str) -> Attached:
    pipe = pipeline_of(load(folder, cls))
    put_on(pipe.model, name)
    return pipe, pipe.model.moecache


def written(pipe: Any) -> list[torch.Tensor]:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_tensors": True}
    return [torch.tensor(pipe("w3 w8 w4 w9 w7", **options)[0]["generated_token_ids"])]


def lora(model: Any) -> Any:
    """A LoRA adapter on projections that are no expert's."""
    import peft

    experts = [layer.name for layer in discover(model)]
    inside = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not any(name.startswith(layer + ".") for layer in experts)
    ]
    named = [name for name in inside if "attn" in name or "attention" in name.lower()] or inside[:1]
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, target_modules=named[:4]))


def with_lora(folder: Path, cls: Any, name: str) -> Any:
    return lora(resident(folder, cls, name)).eval()


def lora_before(folder: Path, cls: Any, name: str) -> Attached:
    wrapped = lora(load(folder, cls)).eval()
    inner = wrapped.get_base_model()
    dispatches = name if any(not layer.own for layer in discover(inner)) else None
    return wrapped, moecache.attach(wrapped, few(inner), experts_implementation=dispatches)


def lora_after(folder: Path, cls: Any, name: str) -> Attached:
    model, cache = from_disk(folder, cls, name)
    return lora(model).eval(), cache


@contextmanager
def one_rank() -> Iterator[None]:
    with socket.socket() as probe, pytest.MonkeyPatch.context() as patch:
        probe.bind(("127.0.0.1", 0))
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        for key, value in {**rank, "MASTER_PORT": str(probe.getsockname()[1])}.items():
            patch.setitem(os.environ, key, value)
        probe.close()
        yield


def by_distributed_config(folder: Path, cls: Any, name: str) -> Attached:
    from transformers.distributed import DistributedConfig

    with one_rank():
        return put_on(load(folder, cls, distributed_config=DistributedConfig(tp_size=1)), name)


def batch_of_requests(model: Any) -> list[torch.Tensor]:
    config = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=-1)
    small = transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=16)
    found = model.generate_batch(
        [[3, 8, 4], [5, 6]], generation_config=config, continuous_batching_config=small, warmup=False
    )
    tokens = [torch.tensor(found[key].generated_tokens) for key in sorted(found)]
    assert [len(row) for row in tokens] == [6, 6]  # it logs errors and goes on
    return tokens


def compile_around_experts(model: Any) -> Any:
    """The modules around the experts, where the graph has to break; `tests/test_hf_refusals.py` compiles a whole model."""
    for layer in discover(model):
        model.get_submodule(layer.name.rpartition(".")[0]).compile(backend="eager")
    return model


def compiled(folder: Path, cls: Any, name: str) -> Attached:
    model, cache = from_disk(folder, cls, name)
    return compile_around_experts(model), cache


def only_forward(model: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        output = model(**inputs(model, IDS))
    return [output.logits if hasattr(output, "logits") else output.last_hidden_state]


class Logits(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output = self.model(**inputs(self.model, ids), use_cache=False)
        return output.logits if hasattr(output, "logits") else output.last_hidden_state


@torch.no_grad()
def exported(model: Any) -> list[torch.Tensor]:
    program = torch.export.export(Logits(model), (IDS,), strict=False)
    return [program.module()(IDS)]


@torch.no_grad()
def traced(model: Any) -> list[torch.Tensor]:
    return [torch.jit.trace(Logits(model), (IDS,), check_trace=False)(IDS)]


def in_transformers(cls: Any) -> bool:
    return hasattr(transformers, cls.__name__)


WAYS = {
    "`from_pretrained`, experts kept out": Way(from_disk, both_dtypes=True, every_implementation=True),
    "`from_pretrained`, experts in memory": Way(from_memory, both_dtypes=True, every_implementation=True),
    "kept out, every expert resident": Way(all_resident, both_dtypes=True, every_implementation=True),
    "the same, read into memory": Way(all_resident_in_ram, both_dtypes=True, every_implementation=True),
    "`device_map`": Way(by_device_map),
    "`moecache.load`": Way(by_moecache, suits=in_transformers),
    "`state_dict=`": Way(by_state_dict),
    "`pipeline`": Way(
        by_pipeline,
        lambda folder, cls, name: pipeline_of(resident(folder, cls, name)),
        run=written,
        suits=lambda cls: decodes(cls) and in_transformers(cls),
    ),
    "PEFT, then `attach`": Way(lora_before, with_lora),
    "`attach`, then PEFT": Way(lora_after, with_lora),
    "`DistributedConfig`, one rank": Way(by_distributed_config),
    "`generate_batch`": Way(from_disk, run=batch_of_requests, suits=lambda cls: decodes(cls) and in_transformers(cls)),
    "`torch.compile`": Way(compiled, run=only_forward),
    "`torch.export`": Way(from_disk, run=exported),
    "`torch.jit.trace`": Way(from_disk, run=traced),
}
