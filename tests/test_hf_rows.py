"""Which rows are counted: not padding, whatever says so; not answers that have ended; not NaN."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from hf_families import continued, left_padded, load_empty, load_resident, save
from transformers import StaticCache
from transformers.masking_utils import create_causal_mask

import moecache
import moecache.hf
from moecache import Request
from moecache.hf.rows import Ends, Rows

TOP_K = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("mixtral", tmp_path_factory.mktemp("mixtral"))


@pytest.fixture(scope="module")
def eager(folder: Path):
    return load_resident(folder)


@pytest.fixture(params=["sdpa", "eager"])
def model(folder: Path, request: pytest.FixtureRequest):
    model = load_empty(folder, attn_implementation=request.param)
    moecache.attach(model, 8)
    yield model
    moecache.detach(model)


def tokens(request: Request) -> int:
    return int(request.counts[0].sum()) // TOP_K


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = left_padded()
    return (ids, mask) if side == "left" else (ids.flip(1), mask.flip(1))


def square(model, mask: torch.Tensor, past: int, keys: int) -> torch.Tensor:
    """Mask ``[batch, 1, length, keys]``: a token sees those before it in its row, itself, and no padding."""
    length = mask.shape[1] - past
    seen = torch.zeros((mask.shape[0], 1, length, keys), dtype=torch.bool)
    seen[..., : mask.shape[1]] = torch.ones(length, mask.shape[1]).tril(past).bool() & mask.bool()[:, None, None, :]
    return seen


# Masks


@torch.no_grad()
@pytest.mark.failure("D15")
@pytest.mark.parametrize("form", ["2d", "2d-bool", "2d-float", "4d-bool", "4d-float", "4d-inf", "by-kind"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_computed_but_not_counted_whatever_form_the_mask_has(
    model, opened: list[Request], side: str, form: str
) -> None:
    ids, mask = padded(side)
    seen = square(model, mask, 0, 9)
    hidden = torch.finfo(torch.float32).min if form != "4d-inf" else -torch.inf
    additive = torch.zeros(seen.shape).masked_fill(~seen, hidden)
    given = {
        "2d": mask, "2d-bool": mask.bool(), "2d-float": mask.float(), "4d-bool": seen, "4d-float": additive,
        "4d-inf": additive, "by-kind": {"sliding_attention": None, "full_attention": seen},
    }[form]  # fmt: skip
    if form not in ("by-kind", "4d-inf"):  # rows that attend to nothing are NaN with -inf
        model(ids, attention_mask=given)
        assert [tokens(request) for request in opened] == mask.sum(1).tolist()
    rows = Rows(ids, given, 0, None, 1, Ends(), [])
    assert torch.equal(rows.token_mask(), mask.bool().reshape(-1))


@torch.no_grad()
@pytest.mark.failure("D15")
def test_masks_that_say_nothing_count_all(model) -> None:
    ids, mask = left_padded()
    for given in (None, "flash", {}, {"full_attention": None}, mask[:, :3], mask[:3], torch.ones_like(mask), mask.to("meta"),
                  torch.zeros(4, 1, 3, 9), torch.ones(4, 1, 9, 0), torch.ones(9)):  # fmt: skip
        assert Rows(ids, given, 0, None, 1, Ends(), []).token_mask() is None


@torch.no_grad()
@pytest.mark.failure("D15")
def test_masks_of_a_later_pass(model, opened: list[Request]) -> None:
    ids, mask = left_padded()
    first = model(ids, attention_mask=mask)
    more = torch.cat([mask, torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])], 1)
    last = torch.full((4, 3), 5)
    model(last, attention_mask=more, **continued(model, first.past_key_values))
    assert [tokens(request) for request in opened] == more.sum(1).tolist()
    for keys in (12, 20):  # a static cache has keys for what is still to come
        seen = square(model, more, 9, keys)
        rows = Rows(last, seen, 9, None, 1, Ends(), [])
        assert torch.equal(rows.token_mask(), more[:, 9:].bool().reshape(-1))
    wide = torch.cat([more, torch.zeros(4, 8, dtype=more.dtype)], 1)
    assert torch.equal(Rows(last, wide, 9, None, 1, Ends(), []).token_mask(), more[:, 9:].bool().reshape(-1))


@pytest.mark.failure("D15")
@pytest.mark.parametrize("cache", ["dynamic", "static", "offloaded", "quantized"])
def test_padding_with_every_kind_of_key_value_cache(model, opened: list[Request], cache: str) -> None:
    if cache == "quantized":
        pytest.importorskip("optimum.quanto")
    if cache == "offloaded" and not torch.cuda.is_available():
        pytest.skip("offloads from a CUDA device")
    ids, mask = left_padded()
    options = {} if cache == "dynamic" else {"cache_implementation": cache}
    for _ in range(2):
        model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, **options)
    assert [tokens(request) for request in opened] == [n + 2 for n in mask.sum(1).tolist()] * 2


@torch.no_grad()
@pytest.mark.failure("D15")
def test_padding_in_a_static_cache(model, opened: list[Request]) -> None:
    """Masks made for a static cache have keys for all that it will hold."""
    ids, mask = left_padded()
    static = StaticCache(config=model.config, max_cache_len=32)
    embeds = model.get_input_embeddings()(ids)
    made = create_causal_mask(model.config, inputs_embeds=embeds, attention_mask=mask, past_key_values=static)
    assert made.shape[-1] == 32
    model(ids, attention_mask=made, past_key_values=static)
    assert [tokens(request) for request in opened] == mask.sum(1).tolist()


def test_padding_of_models_with_sliding_windows(tmp_path: Path, opened: list[Request]) -> None:
    model = load_empty(save("gpt_oss", tmp_path))
    moecache.attach(model, 8)
    ids, mask = left_padded(rows=4, longest=14)
    for options in ({}, {"cache_implementation": "static"}):
        model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, **options)
    assert [tokens(request) for request in opened] == [n + 2 for n in mask.sum(1).tolist()] * 2
    moecache.detach(model)


@torch.no_grad()
@pytest.mark.parametrize("given", ["positions", "boundaries"])
def test_packed_sequences_have_requests_of_their_own(model, opened: list[Request], given: str) -> None:
    ids = torch.arange(2, 12)[None]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2, 3]])
    if given == "positions":
        model(ids, position_ids=positions)
        assert [tokens(request) for request in opened] == [4, 2, 4]
    else:  # what lies behind the last is padding
        model(ids, position_ids=positions, cu_seq_lens_q=torch.tensor([0, 4, 6]))
        assert [tokens(request) for request in opened] == [4, 2]
    alone = [ids[:, :4], ids[:, 4:6]]
    for sequence in alone:
        model(sequence)
    for packed, request in zip(opened[:2], opened[-2:], strict=True):
        assert packed.counts[0].tolist() == request.counts[0].tolist()


# Answers that have ended


def answers(eager, **options) -> torch.Tensor:
    ids, mask = left_padded()
    options = {"max_new_tokens": 12, "do_sample": False, **options}
    return eager.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]


def passes(answer: list[int], eos: int) -> int:
    """Forward passes that a row of its own needs for an answer: its last token is never fed back."""
    return (answer.index(eos) + 1 if eos in answer else len(answer)) - 1


@pytest.mark.failure("D15")
@pytest.mark.parametrize("pad", ["unused", "eos", "in-answers"])
@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"cache_implementation": "static"}], ids=str)
def test_rows_that_have_finished_stop_counting(eager, model, opened: list[Request], pad: str, options: dict) -> None:
    ids, mask = left_padded()
    free = answers(eager)
    # Row 0 ends after three tokens, the others where the same token comes up, if it does.
    eos = int(free[0, 2])
    if pad == "in-answers":
        others = [token for row in free[1:].tolist() for token in row[:-1] if token != eos]
        padding = others[0]
    else:
        padding = eos if pad == "eos" else 0
    ended = {"eos_token_id": eos, "pad_token_id": padding}
    expected = answers(eager, **ended, **options)
    found = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, **ended, **options)
    assert torch.equal(found[:, ids.shape[1] :], expected)
    length = expected.shape[1]
    needed = [passes(row[:length], eos) for row in free.tolist()]
    assert sum(needed) < 4 * (length - 1)
    assert [tokens(request) for request in opened] == [a + b for a, b in zip(mask.sum(1).tolist(), needed, strict=True)]
    assert len(model.moecache.history) == 4


@pytest.mark.failure("D15")
def test_rows_ended_by_a_stop_string_count_no_padding(model, opened: list[Request]) -> None:
    from transformers import StoppingCriteria

    class FirstRows(StoppingCriteria):
        """Ends row n after n + 1 tokens."""

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_) -> torch.Tensor:
            return torch.arange(input_ids.shape[0]) + 9 < input_ids.shape[1]

    ids, mask = left_padded()
    model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False, stopping_criteria=[FirstRows()],
                   eos_token_id=-5, pad_token_id=95)  # fmt: skip
    # Which token was the last is not seen until padding follows: one pass more a row, but for the last row.
    for row, (request, prompt) in enumerate(zip(opened, mask.sum(1).tolist(), strict=True)):
        assert prompt + row <= tokens(request) <= prompt + min(row + 1, 3)


@torch.no_grad()
@pytest.mark.failure("D15")
def test_padding_fed_by_a_loop_of_ones_own_is_not_counted(model, opened: list[Request]) -> None:
    ids, _ = left_padded()
    output = model(ids[:, 4:])
    pad = model.config.pad_token_id
    for column in ([5, 6, 7, 8], [5, pad, 7, 8], [5, pad, pad, 8]):
        output = model(torch.tensor(column)[:, None], **continued(model, output.past_key_values))
    assert [tokens(request) for request in opened] == [5 + 3, 5 + 1, 5 + 2, 5 + 3]


# NaN


@torch.no_grad()
@pytest.mark.failure("D15", "42")
def test_rows_of_nan_are_not_counted_and_others_are_right(folder: Path, model, opened: list[Request]) -> None:
    ids, _ = left_padded()
    ids = ids.clamp(min=2)
    embeds = model.get_input_embeddings()(ids)
    embeds[1] = torch.nan  # a whole sequence
    embeds[2, 6] = torch.nan  # a sequence from some token on
    eager = load_resident(folder, attn_implementation=model.config._attn_implementation)
    logits = model(inputs_embeds=embeds).logits
    assert torch.allclose(logits, eager(inputs_embeds=embeds).logits, rtol=0, atol=0, equal_nan=True)
    assert not logits[[0, 3]].isnan().any()
    assert logits[1].isnan().all()
    assert logits[2, 6:].isnan().all()
    # Attention may hand NaN on to the tokens before as well, through products with 0.
    sound = (~logits.isnan().any(-1)).sum(1).tolist()
    assert sound in ([9, 0, 0, 9], [9, 0, 6, 9])
    assert [[int(layer.sum()) for layer in request.counts] for request in opened] == [[n * TOP_K] * 2 for n in sound]


@torch.no_grad()
@pytest.mark.failure("D15", "42")
def test_a_decoded_token_of_nan_is_not_counted_in_any_layer(model, opened: list[Request]) -> None:
    """It is looked at in the first layer only; the next token is looked at anew."""
    past = model(torch.tensor([[5, 6, 7]])).past_key_values
    before = [int(layer.sum()) for layer in opened[0].counts]
    embeds = model.get_input_embeddings()(torch.tensor([[8]]))
    model(inputs_embeds=embeds * torch.nan, **continued(model, copy.deepcopy(past)))
    assert [int(layer.sum()) for layer in opened[-1].counts] == [0, 0]
    model(inputs_embeds=embeds, **continued(model, past))
    assert [int(layer.sum()) for layer in opened[0].counts] == [n + TOP_K for n in before]


@torch.no_grad()
@pytest.mark.failure("D15", "42")
@pytest.mark.parametrize("tokens_of_step", [1, 4])
def test_nan_gate_weights_count_for_nothing(model, opened: list[Request], tokens_of_step: int) -> None:
    experts = model.model.layers[0].mlp.experts
    ids = torch.tensor([[0, 1]] * tokens_of_step)
    weights = torch.full(ids.shape, 0.5)
    weights[0, 1] = torch.nan
    result = experts(torch.randn(tokens_of_step, 32), ids, weights)
    assert result[0].isnan().all()
    assert not result[1:].isnan().any()
    assert int(opened[0].counts[0].sum()) == (tokens_of_step - 1) * TOP_K
    # Infinite ones are numbers.
    weights[0] = torch.tensor([torch.inf, -torch.inf])
    experts(torch.randn(tokens_of_step, 32), ids, weights)
    assert int(opened[-1].counts[0].sum()) >= TOP_K
