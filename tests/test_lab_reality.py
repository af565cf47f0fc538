"""A simulated hit is a real hit: what a cache did while a model decoded is what the replay of its recording does, step for step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moecache import ExpertBank, ExpertCache, Fingerprint, History
from moecache.lab import read_trace, schedule
from moecache.lab._replay import Replay
from moecache.lab.replay import make_core
from moecache.lease import Lease
from moecache.policy import NAMES, resolve, score

TINY = Path(__file__).parent.parent / "examples" / "tiny_moe" / "model"
LAYERS, EXPERTS, TOP_K = 3, 16, 2


@score
def stale_and_rare(age: float, request_frequency: float, matched: float) -> float:
    return age / (1.0 + request_frequency) - 10.0 * matched


POLICIES = [*NAMES, stale_and_rare]


class Watched:
    """The occupants of all slots after each step of a cache."""

    def __init__(self, cache: ExpertCache, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tables: list[np.ndarray] = []
        release = Lease.release

        def watched(lease: Lease) -> None:
            was_open = lease._step.open
            release(lease)
            if was_open:
                self.tables.append(np.array(cache._core.slots.occupants))

        monkeypatch.setattr(Lease, "release", watched)


def replayed(path: Path, slots: int, policy: Any) -> tuple[dict[str, int], np.ndarray]:
    trace = read_trace(path)
    plan = schedule(trace)
    core = make_core(trace, slots, resolve(policy), History(Fingerprint(trace.num_experts, trace.top_k, ""), 1000))
    tables = np.full((1, plan.passes * trace.layers, slots), -2, np.int32)
    Replay([core], *plan.arrays(), tables=tables).run(0, plan.passes)
    return core.counters(), tables[0][(tables[0] != -2).all(1)]


def check_identical(cache: ExpertCache, watched: Watched, path: Path, slots: int, policy: Any) -> None:
    real = cache._core.counters()
    simulated, tables = replayed(path, slots, policy)
    assert real["demands"] > 0
    assert real["evictions"] > 0
    # A request that has not ended yet is the only thing a recording cannot know.
    for name in ("demands", "hits", "misses", "evictions", "waves", "steps", "tokens"):
        assert simulated[name] == real[name], name
    np.testing.assert_array_equal(tables, np.array(watched.tables))


def hand_written(cache: ExpertCache, seed: int) -> None:
    """Three requests, the second with a padded batch of two, over skewed routing."""
    random = np.random.default_rng(seed)
    for number in range(3):
        favourites = random.permutation(EXPERTS)
        with cache.request() as request:
            for tokens in (5, 1, 1, 1, 1, 1, 1, 1, 1):
                for layer in range(LAYERS):
                    rank = np.minimum(random.geometric(0.25, (tokens, TOP_K)) - 1, EXPERTS - 1)
                    ids = torch.from_numpy(favourites[(rank + 3 * layer) % EXPERTS])
                    counted = torch.tensor([False, True, True, True, True]) if number == 1 and tokens == 5 else None
                    with request.route(layer, ids, token_mask=counted) as lease:
                        for _ in lease.ready():
                            pass


@pytest.mark.parametrize("capacity", [EXPERTS, 20, 32])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_hand_written_stack(policy: Any, capacity: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = ExpertBank.from_tensors([{"w": torch.randn(EXPERTS, 4, 4)} for _ in range(LAYERS)])
    path = tmp_path / "trace.safetensors"
    with ExpertCache(bank, capacity, policy=policy, prefetch=False, top_k=TOP_K) as cache:
        watched = Watched(cache, monkeypatch)
        cache.record(path)
        hand_written(cache, seed=7)
    check_identical(cache, watched, path, capacity, policy)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny trained model where it has been made, a random one of its kind otherwise."""
    if (TINY / "model.safetensors.index.json").exists():
        return TINY
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=260, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=32, num_experts_per_tok=4, pad_token_id=258, eos_token_id=None,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("capacity", [40, 64, 96])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_tiny_model(
    policy: Any, capacity: int, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from moecache import detach, load

    path = tmp_path / "trace.safetensors"
    model = load(model_path, capacity=capacity, policy=policy, prefetch=False)
    cache = model.moecache
    watched = Watched(cache, monkeypatch)
    with torch.inference_mode():
        cache.record(path)
        for prompt in (b"def main(argv):", b"Once upon a time", b"3 + 4 ="):
            model.generate(torch.tensor([list(prompt)]), max_new_tokens=8, do_sample=False, pad_token_id=258)
    detach(model)
    check_identical(cache, watched, path, capacity, policy)
