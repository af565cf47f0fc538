"""Request boundaries read from the model's calls, and which tokens are counted."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path

import pytest
import torch
from hf_families import continued, left_padded, load_empty, save

import moecache
import moecache.hf

IDS = torch.randint(2, 96, (1, 7), generator=torch.Generator().manual_seed(0))
TOP_K = 2
LAYERS = 2


@pytest.fixture
def model(tmp_path: Path):
    model = load_empty(save("mixtral", tmp_path))
    moecache.attach(model, 8)
    yield model
    moecache.detach(model)


def routed_tokens(model) -> int:
    """Tokens counted in the first layer of the current request."""
    request, _, _ = model._moecache_attachment.requests.current(0, 1)
    return int(request.counts[0].sum()) // TOP_K


def test_generate_is_one_request(model) -> None:
    model.generate(IDS, max_new_tokens=4, do_sample=False)
    assert model.moecache.stats().requests == 0  # the request is open until the next begins
    assert routed_tokens(model) == 7 + 3
    model.generate(IDS, max_new_tokens=4, do_sample=False)
    assert model.moecache.stats().requests == 1
    assert routed_tokens(model) == 7 + 3


@torch.no_grad()
def test_forward_without_cache_begins_a_request(model) -> None:
    first = model(IDS, use_cache=True)
    model(IDS[:, :1], **continued(model, first.past_key_values))
    assert model.moecache.stats().requests == 0
    model(IDS)
    model(IDS)
    assert model.moecache.stats().requests == 2


@torch.no_grad()
def test_positional_arguments(model) -> None:
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    model(IDS, mask)
    assert routed_tokens(model) == 4


@torch.no_grad()
def test_padding_is_computed_but_not_counted(model) -> None:
    ids, mask = left_padded()
    model(ids, attention_mask=mask)
    assert routed_tokens(model) == int(mask.sum())
    model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert routed_tokens(model) == int(mask.sum()) + 2 * len(ids)


def test_request_of_a_thread_ends_with_it(model) -> None:
    thread = threading.Thread(target=model.generate, args=(IDS,), kwargs={"max_new_tokens": 2, "do_sample": False})
    thread.start()
    thread.join()
    assert model.moecache.stats().requests == 1


def test_beams(model) -> None:
    model.generate(IDS, max_new_tokens=3, num_beams=3, do_sample=False)
    assert routed_tokens(model) == 3 * 7 + 2 * 3


@torch.no_grad()
def test_inputs_embeds(model) -> None:
    model(inputs_embeds=model.get_input_embeddings()(IDS))
    assert routed_tokens(model) == 7


@torch.no_grad()
def test_bare_calls_of_layers_open_a_request(model) -> None:
    experts = [layer.mlp.experts for layer in model.model.layers]
    hidden, ids, scales = torch.randn(5, 32), torch.tensor([[0, 1]] * 5), torch.full((5, 2), 0.5)
    for _ in range(2):
        for module in experts:
            module(hidden, ids, scales)
    assert model.moecache.stats().requests == 1
    model(IDS)
    assert model.moecache.stats().requests == 2


@pytest.mark.failure("40")
@torch.no_grad()
def test_no_token_and_repeated_experts(model) -> None:
    module = model.model.layers[0].mlp.experts
    empty = module(torch.empty(0, 32), torch.empty(0, 2, dtype=torch.long), torch.empty(0, 2))
    assert empty.shape == (0, 32)
    hidden, scales = torch.randn(2, 32), torch.rand(2, 2)
    stock = type(module).forward.__wrapped__
    none = model.config.num_local_experts  # the id that stands for no expert
    cases = [[[3, 3], [1, 3]], [[3, 3], [3, 3]]]
    if "num_experts + 1" in inspect.getsource(stock):  # transformers from 5.18 on skips that id
        cases += [[[none, 3], [none, none]], [[none, none], [1, 2]]]
    for ids in cases:
        resident = type(module)(model.config)
        for name, tensor in model.moecache.bank.layer(0).items():
            setattr(resident, name, torch.nn.Parameter(tensor))
        expected = stock(resident, hidden, torch.tensor(ids), scales)
        assert torch.equal(module(hidden, torch.tensor(ids), scales), expected)
        one = module(hidden[:1], torch.tensor(ids[:1]), scales[:1])
        assert torch.equal(one, stock(resident, hidden[:1], torch.tensor(ids[:1]), scales[:1]))


@pytest.mark.failure("54")
def test_decode_steps_are_told_apart(model) -> None:
    seen = []
    route = moecache.Request.route

    def spy(self, layer, ids, *args, **kwargs):
        seen.append((layer, tuple(ids.shape), kwargs["decode"], kwargs["counted"] is not None))
        return route(self, layer, ids, *args, **kwargs)

    ids, mask = left_padded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moecache.Request, "route", spy)
        model.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False)
    prompt = [(layer, (36, TOP_K), False, True) for layer in range(LAYERS)]
    decode = [(layer, (4, TOP_K), True, False) for layer in range(LAYERS)]
    assert seen == prompt + decode
