"""Request boundaries read from the model's calls: whose tokens are whose."""

from __future__ import annotations

import copy
import gc
import inspect
import threading
from pathlib import Path

import pytest
import torch
from hf_families import continued, left_padded, load_empty, load_resident, save
from transformers import DynamicCache, GenerationConfig, StaticCache, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import moecache
import moecache.hf
from moecache import Request, RequestBatch

IDS = torch.randint(2, 96, (1, 7), generator=torch.Generator().manual_seed(0))
OTHER = torch.randint(2, 96, (1, 5), generator=torch.Generator().manual_seed(1))
TOP_K = 2
LAYERS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("mixtral", tmp_path_factory.mktemp("mixtral"))


@pytest.fixture
def model(folder: Path):
    model = load_empty(folder)
    moecache.attach(model, 8)
    yield model
    moecache.detach(model)


def tokens(request: Request) -> int:
    """Tokens counted in each layer."""
    return int(request.counts[0].sum()) // TOP_K


def generate(model, ids: torch.Tensor = IDS, n: int = 4, **options) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=n, do_sample=False, **options)


def test_generate_is_one_request_that_ends_with_its_key_value_cache(model, opened: list[Request]) -> None:
    for n in (1, 2):
        generate(model)
        assert [tokens(request) for request in opened] == [7 + 3] * n
        assert model.moecache.stats().requests == n
    output = generate(model, return_dict_in_generate=True)
    assert not opened[2].closed  # it can go on
    del output
    assert opened[2].closed
    assert model.moecache.stats().requests == 3


@torch.no_grad()
def test_forward_without_a_key_value_cache_begins_a_request(model, opened: list[Request]) -> None:
    first = model(IDS, use_cache=True)
    model(IDS[:, :1], **continued(model, first.past_key_values))
    model(IDS)
    model(IDS)
    assert [tokens(request) for request in opened] == [8, 7, 7]
    assert [request.closed for request in opened] == [False, True, True]
    tuples = model(IDS, return_dict=False)
    model(IDS[:, :1], **continued(model, tuples[1]))
    assert [tokens(request) for request in opened][3:] == [8]


@pytest.mark.failure("D15")
@torch.no_grad()
def test_sequences_that_take_turns_on_one_thread_have_requests_of_their_own(model, opened: list[Request]) -> None:
    first, second = model(IDS), model(OTHER)
    for _ in range(3):
        first = model(IDS[:, :1], **continued(model, first.past_key_values))
        second = model(IDS[:, :1], **continued(model, second.past_key_values))
    second = model(IDS[:, :1], **continued(model, second.past_key_values))
    assert [tokens(request) for request in opened] == [7 + 3, 5 + 4]
    assert [request.stats().decode_tokens for request in opened] == [3, 4]
    del first, second
    assert all(request.closed for request in opened)


@pytest.mark.failure("D15")
@torch.no_grad()
def test_a_key_value_cache_keeps_its_request_in_whatever_thread_it_is_used(model, opened: list[Request]) -> None:
    output = model(IDS)
    thread = threading.Thread(target=model, args=(OTHER,), kwargs=continued(model, output.past_key_values))
    thread.start()
    thread.join()
    assert [tokens(request) for request in opened] == [12]
    assert not opened[0].closed


@pytest.mark.failure("D15", "114")
def test_generate_in_threads_with_key_value_caches_of_their_own(model, opened: list[Request]) -> None:
    def run(length: int) -> None:
        for _ in range(3):
            generate(model, IDS[:, :length], n=5)

    threads = [threading.Thread(target=run, args=(length,)) for length in (3, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(tokens(request) for request in opened) == sorted([7, 9, 11] * 3)
    assert all(request.closed for request in opened)
    assert model.moecache.stats().requests == 9


@pytest.mark.failure("D15")
@pytest.mark.parametrize("beams", [1, 3])
def test_generate_without_a_key_value_cache_is_one_request(model, opened: list[Request], beams: int) -> None:
    with_cache = generate(model, num_beams=beams)
    without = generate(model, num_beams=beams, use_cache=False)
    assert torch.equal(with_cache, without)
    assert [tokens(request) for request in opened] == [7 + beams * 3] * 2
    # What is computed again is counted once, and the answer as an answer.
    assert [request.stats().decode_tokens for request in opened] == [3 * beams] * 2
    assert model.moecache.stats().requests == 2


@pytest.mark.failure("D15")
@torch.no_grad()
def test_a_loop_without_a_key_value_cache_is_one_request(model, opened: list[Request]) -> None:
    for end in (4, 5, 7):
        model(IDS[:, :end], use_cache=False)
    model(OTHER, use_cache=False)
    model(IDS, use_cache=False)
    assert [tokens(request) for request in opened] == [7, 5, 7]
    assert [request.closed for request in opened] == [True, True, False]


@pytest.mark.failure("D15")
@torch.no_grad()
def test_a_past_prepared_elsewhere_begins_a_request_that_ends(model, opened: list[Request]) -> None:
    """As prefix tuning and copies of a prompt's key-value cache do."""
    prompt = model(IDS).past_key_values
    for _ in range(3):
        past = copy.deepcopy(prompt)
        generate(model, torch.cat([IDS, OTHER], 1), past_key_values=past)
        del past
    assert [tokens(request) for request in opened] == [7] + [5 + 3] * 3
    assert [request.closed for request in opened] == [False, True, True, True]


@pytest.mark.failure("D15")
def test_a_key_value_cache_that_was_emptied_begins_anew(model, opened: list[Request]) -> None:
    static = StaticCache(config=model.config, max_cache_len=32)
    for _ in range(2):
        generate(model, past_key_values=static)
        static.reset()
    assert [tokens(request) for request in opened] == [10, 10]
    assert [request.closed for request in opened] == [True, False]
    dynamic = DynamicCache(config=model.config)
    ids = generate(model, past_key_values=dynamic)
    generate(model, torch.cat([ids, OTHER], 1), past_key_values=dynamic)  # a chat goes on
    assert [tokens(request) for request in opened][2:] == [7 + 4 + 5 + 3]


class Interrupt(BaseStreamer):
    def __init__(self, after: int) -> None:
        self.after = after

    def put(self, value: torch.Tensor) -> None:
        self.after -= 1
        if self.after < 0:
            raise KeyboardInterrupt

    def end(self) -> None:
        pass


@pytest.mark.failure("D15")
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_generation_that_raises_drops_what_it_began(model, opened: list[Request], use_cache: bool) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        generate(model, n=9, streamer=Interrupt(after=3), use_cache=use_cache)
    assert caught.traceback  # whose frames hold the key-value cache
    assert [request.closed for request in opened] == [True]
    assert len(model.moecache.history) == 0
    chat = DynamicCache(config=model.config)
    ids = generate(model, past_key_values=chat)
    with pytest.raises(KeyboardInterrupt):
        generate(model, torch.cat([ids, OTHER], 1), past_key_values=chat, streamer=Interrupt(after=1))
    assert [request.closed for request in opened] == [True, False]  # what began before goes on
    del chat, caught
    gc.collect()
    assert opened[1].closed
    assert len(model.moecache.history) == 1


def test_a_thread_that_ends_ends_its_requests(model, opened: list[Request]) -> None:
    def run() -> None:
        with torch.no_grad():
            model(IDS, use_cache=False)
        assert not opened[0].closed

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert opened[0].closed


@pytest.mark.failure("D15")
@torch.no_grad()
def test_a_key_value_cache_collected_in_the_middle_of_a_step_ends_its_request_after_it(
    model, opened: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    past = model(IDS).past_key_values
    past.itself = past  # only the garbage collector frees it
    del past
    seen = []
    route = Request.route

    def collect(self: Request, *args, **kwargs):
        gc.collect()
        seen.append(opened[0].closed)
        return route(self, *args, **kwargs)

    gc.collect(0)
    monkeypatch.setattr(Request, "route", collect)
    output = model(OTHER)
    assert [tokens(request) for request in opened] == [7, 5]
    model(IDS[:, :1], **continued(model, output.past_key_values))
    assert opened[0].closed


def test_detach_ends_requests_and_gives_generate_back(folder: Path, opened: list[Request]) -> None:
    model = load_empty(folder)
    cache = moecache.attach(model, 8)
    assert (
        list(inspect.signature(model.generate).parameters)
        == list(inspect.signature(type(model).generate).parameters)[1:]
    )
    output = generate(model, return_dict_in_generate=True)
    assert not opened[0].closed
    moecache.detach(model)
    assert "generate" not in model.__dict__
    assert cache.stats().requests == 1
    del output


def test_closing_the_cache_ends_requests(folder: Path, opened: list[Request]) -> None:
    model = load_empty(folder)
    cache = moecache.attach(model, 8)
    output = generate(model, return_dict_in_generate=True)
    cache.close()
    assert len(cache.history) == 1
    del output
    assert len(cache.history) == 1


@pytest.mark.failure("D14")
def test_sequences_of_continuous_batching_have_requests_of_their_own(
    folder: Path, model, opened: list[Request]
) -> None:
    prompts = [[5, 6, 7, 8, 9], [10, 11, 12], [4] * 7]
    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def answers(model) -> list[list[int]]:
        return [output.generated_tokens for output in model.generate_batch(prompts, generation_config=config).values()]

    expected = answers(load_resident(folder))
    assert all(len(answer) == 6 for answer in expected)
    assert answers(model) == expected
    gc.collect()
    assert sorted(tokens(request) for request in opened) == [3 + 5, 5 + 5, 7 + 5]
    assert sorted(request.stats().decode_tokens for request in opened) == [5] * 3
    assert len(model.moecache.history) == 3


@pytest.mark.failure("52")
def test_a_draft_model_with_a_cache_of_its_own(
    folder: Path, tmp_path: Path, model, opened: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = load_empty(save("mixtral", tmp_path, num_hidden_layers=1))
    moecache.attach(small, 4)
    expected = generate(load_resident(folder), n=8)
    assert torch.equal(generate(model, n=8, assistant_model=small), expected)
    of_target = [request for request in opened if request.cache is model.moecache]
    of_draft = [request for request in opened if request.cache is small.moecache]
    assert len(of_target) == len(of_draft) == 1
    # The pass over the prompt checks the first draft as well; rejected drafts count where they were computed.
    assert of_target[0].stats().decode_tokens > 0
    assert tokens(of_target[0]) >= 7 + 7
    assert torch.equal(generate(model, n=8, prompt_lookup_num_tokens=2), expected)
    assert len([request for request in opened if request.cache is model.moecache]) == 2
    moecache.detach(small)


def test_a_copy_of_the_model_generates_with_its_own_dense_weights(folder: Path) -> None:
    model = load_empty(folder)
    moecache.attach(model, 8)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    assert generate(twin)[0, -4:].tolist() == [0] * 4
    assert generate(model)[0, -4:].tolist() != [0] * 4
    moecache.detach(model)


@torch.no_grad()
def test_positional_arguments(model, opened: list[Request]) -> None:
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    model(IDS, mask)
    assert tokens(opened[0]) == 4


@torch.no_grad()
def test_inputs_embeds(model, opened: list[Request]) -> None:
    embeds = model.get_input_embeddings()(IDS)
    model(inputs_embeds=embeds)
    model.generate(inputs_embeds=embeds, max_new_tokens=3, do_sample=False)
    assert [tokens(request) for request in opened] == [7, 9]


def test_beams(model, opened: list[Request]) -> None:
    model.generate(IDS, max_new_tokens=3, num_beams=3, do_sample=False)
    assert [tokens(request) for request in opened] == [7 + 2 * 3]  # the prompt once
    model.generate(OTHER.repeat(2, 1), max_new_tokens=3, num_beams=3, num_return_sequences=2, do_sample=False)
    assert [tokens(request) for request in opened[1:]] == [5 + 2 * 3] * 2


@torch.no_grad()
def test_bare_calls_of_layers_open_a_request(model, opened: list[Request]) -> None:
    experts = [layer.mlp.experts for layer in model.model.layers]
    hidden, ids, scales = torch.randn(5, 32), torch.tensor([[0, 1]] * 5), torch.full((5, 2), 0.5)
    for _ in range(2):
        for module in experts:
            module(hidden, ids, scales)
    assert [request.closed for request in opened] == [True, False]
    model(IDS)
    assert [request.closed for request in opened] == [True, True, True]


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
    resident = type(module)(model.config)
    for name, tensor in model.moecache.bank.layer(0).items():
        storage = torch.empty_like(tensor).copy_(tensor)  # experts of whole cache lines, aligned as slots are
        assert storage.data_ptr() % 64 == 0
        assert storage[0].nbytes % 64 == 0
        setattr(resident, name, torch.nn.Parameter(storage))
    for ids in cases:
        expected = stock(resident, hidden, torch.tensor(ids), scales)
        assert torch.equal(module(hidden, torch.tensor(ids), scales), expected)
        one = module(hidden[:1], torch.tensor(ids[:1]), scales[:1])
        assert torch.equal(one, stock(resident, hidden[:1], torch.tensor(ids[:1]), scales[:1]))


@pytest.mark.failure("54")
def test_decode_steps_are_told_apart(model) -> None:
    seen = []
    route = RequestBatch.route

    def spy(self, layer, ids, *args, **kwargs):
        seen.append((layer, tuple(ids.shape), kwargs["decode"], kwargs["token_mask"] is not None))
        return route(self, layer, ids, *args, **kwargs)

    ids, mask = left_padded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RequestBatch, "route", spy)
        model.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False)
    prompt = [(layer, (36, TOP_K), False, True) for layer in range(LAYERS)]
    decode = [(layer, (4, TOP_K), True, False) for layer in range(LAYERS)]
    assert seen == prompt + decode


@pytest.mark.parametrize("stop", ["criteria", "strings"])
def test_stops_of_other_kinds_are_passed_on(model, opened: list[Request], stop: str) -> None:
    class After(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_) -> torch.Tensor:
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 9)

    options = {"stopping_criteria": [After()]} if stop == "criteria" else {"max_time": 1e-9}
    ids = generate(model, n=6, **options)
    assert tokens(opened[0]) == ids.shape[1] - 1
