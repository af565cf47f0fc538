"""Kinds of failure that other systems are known for and that no other test of ours happens to show."""

from __future__ import annotations

import gc
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_helpers import check, make_bank, run
from reference_core import call_route, run_step
from test_threads import filled_store

import moecache
from moecache import CacheOptions, ExpertBank, ExpertCache
from moecache._core import Core
from moecache._engine import HostLink, ThrottledLink

PACKAGE = Path(moecache.__file__).parent


@pytest.mark.failure("7")
@pytest.mark.parametrize("layers", range(1, 8))
@pytest.mark.parametrize("slots", range(1, 8))
def test_slots_that_do_not_divide_the_layers_go_to_the_right_one(layers: int, slots: int) -> None:
    bank = make_bank((3,) * layers)
    with bank, ExpertCache(bank, min(slots, 3 * layers), policy="lru") as cache, cache.request() as request:
        for token in range(4):
            for layer in range(layers):
                run(request, layer, [[token % 3]])


@pytest.mark.failure("8")
def test_a_long_prompt_in_pieces_through_two_slots_is_never_stale() -> None:
    ids = torch.from_numpy(np.argsort(np.random.default_rng(0).random((2000, 8)))[:, :2].copy())
    link = ThrottledLink(HostLink(), 1e9, latency_s=5e-6, jitter_s=20e-6)
    with (
        make_bank((8, 8)) as bank,
        ExpertCache(bank, 2, options=CacheOptions(link=link)) as cache,
        cache.request() as request,
    ):
        for piece in ids.split(64):
            for layer in (0, 1):
                assert sorted(run(request, layer, piece)) == sorted(set(piece.flatten().tolist()))


@pytest.mark.failure("21")
def test_the_tensors_of_a_bank_live_as_long_as_it_copies_from_them() -> None:
    def make() -> ExpertBank:
        return ExpertBank.from_tensors(
            [{"w": [torch.full((50_000,), float(expert)) for expert in range(6)]} for _ in range(2)]
        )

    link = ThrottledLink(HostLink(), 2e9)
    with make() as bank, ExpertCache(bank, 2, options=CacheOptions(link=link)) as cache, cache.request() as request:
        for n in range(12):
            gc.collect()
            others = [torch.full((50_000,), -1.0) for _ in range(6)]
            with request.route(n % 2, torch.tensor([[n % 6]])) as lease:
                for expert, slot, _ in lease.ready():
                    assert (lease.weights["w"][slot] == expert).all()
            del others


@pytest.mark.failure("77", "73")
@pytest.mark.parametrize("capacity", [1, 3, 5])
def test_scales_and_biases_follow_their_expert_into_any_slot(capacity: int) -> None:
    experts = 7
    packed = torch.arange(experts, dtype=torch.uint8)[:, None, None].repeat(1, 5, 3)
    scale = torch.arange(1, experts + 1, dtype=torch.float32)[:, None]
    bias = -torch.arange(experts, dtype=torch.bfloat16)[:, None].repeat(1, 5)
    bank = ExpertBank.from_tensors([{"packed": packed, "scale": scale, "bias": bias}])
    with bank, ExpertCache(bank, capacity) as cache, cache.request() as request:
        for n in range(20):
            with request.route(0, torch.tensor([[n * 3 % experts, (n * 3 + 2) % experts]])) as lease:
                for expert, slot, _ in lease.ready():
                    assert lease.weights["scale"][slot].item() == expert + 1
                    assert (lease.weights["packed"][slot] == expert).all()
                    assert (lease.weights["bias"][slot] == -expert).all()
        assert cache.stats().evictions > 0


@pytest.mark.failure("82")
def test_weights_put_in_place_of_attached_ones_are_never_computed_with() -> None:
    from hf_families import build

    model = build("mixtral")
    ids = torch.tensor([[3, 5, 7, 9]])
    with torch.no_grad():
        experts = model.model.layers[0].mlp.experts
        moecache.attach(model, 4)
        before = model(ids).logits
        # What stands in the module is a placeholder without memory: torch itself refuses to put memory under it.
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            experts.down_proj.data = torch.zeros(experts.down_proj.shape)
        assert torch.equal(model(ids).logits, before)
        moecache.detach(model)
        assert torch.equal(model(ids).logits, before)


@pytest.mark.failure("119", "2")
def test_four_tokens_of_disjoint_experts_run_in_waves_and_are_counted_so() -> None:
    with make_bank((8, 8)) as bank, ExpertCache(bank, 4, top_k=2) as cache, cache.request() as request:
        for layer in (0, 1, 0):
            assert sorted(run(request, layer, [[0, 1], [2, 3], [4, 5], [6, 7]])) == list(range(8))
        assert cache.stats().waves == 3


@pytest.mark.failure("1")
@pytest.mark.parametrize("policy", moecache.policy.NAMES)
def test_newcomers_are_no_victims_of_the_step_that_brings_them(policy: str) -> None:
    with make_bank((8,)) as bank, ExpertCache(bank, 3, policy=policy) as cache, cache.request() as request:
        for _ in range(5):
            run(request, 0, [[0, 1, 2]])
        with request.route(0, torch.tensor([[5, 6, 7]])) as lease:
            assert len(set(lease.slots)) == 3
            served = list(lease.ready())
            for expert, slot, _ in served:  # all of them, when the last has come
                check(cache, lease, 0, expert, slot)
        assert sorted(expert for expert, _, _ in served) == [5, 6, 7]


@pytest.mark.failure("141")
def test_counters_start_over_after_a_warm_up_and_nothing_of_it_is_left() -> None:
    with make_bank((8, 8)) as bank, ExpertCache(bank, 4, prefetch=False) as cache, cache.request() as request:
        for n in range(30):
            run(request, n % 2, [[n % 8]])
        cache.reset_stats()
        assert cache.stats().demands == cache.stats().bytes_demand == cache.stats().steps == 0
        run(request, 0, [[6]])
        stats = cache.stats()
        assert (stats.demands, stats.hits + stats.misses, stats.steps, stats.tokens) == (1, 1, 1, 1)
        assert stats.bytes_demand == stats.misses * bank.expert_nbytes(0)


@pytest.mark.failure("136")
@pytest.mark.skipif(not shutil.which("readelf"), reason="readelf of binutils is not there")
def test_the_compiled_modules_need_nothing_but_the_c_library() -> None:
    for module in PACKAGE.glob("*.so"):
        read = subprocess.run(
            ["readelf", "--dynamic", "--version-info", module], capture_output=True, text=True, check=True
        )
        needed = set(re.findall(r"\(NEEDED\).*\[(.*?)\.so", read.stdout)) - {"libasan", "libubsan", "libtsan"}
        assert needed <= {"libc", "libm", "libpthread", "ld-linux-x86-64", "ld-linux-aarch64"}, (
            f"{module.name}: {needed}"
        )
        assert "GLIBCXX" not in read.stdout


@pytest.mark.failure("A4c")
def test_a_score_that_reads_another_threads_request_sees_a_whole_match() -> None:
    """Victims that one thread asks for while another counts without the GIL are those of some step of the other."""
    layers, experts, stored = 3, 8, 20_000
    steps = np.argsort(np.random.default_rng(2).random((1500, 1, experts)))[:, :, :2].astype(np.int64)

    def started() -> tuple[Core, object]:
        store = filled_store(stored, stored, 2)
        core = Core(store, np.zeros(layers, np.int32), np.array([24], np.int32), np.zeros(24, np.int32), "moe-infinity")
        first = core.begin_request()
        for layer in range(layers):
            step = call_route(core, first, layer, np.arange(experts)[None])
            run_step(core, step)
            core.release(step)
        core.end_request(first, keep=False)
        return core, core.begin_request()

    def seen(core: Core) -> frozenset[int]:
        return frozenset(core.evictor.victims(0, 6, 0))

    def uninformed(core: Core) -> frozenset[int]:
        # The formula with no match: the deepest layer first, of one layer those that were used longest ago.
        gid, last = core.slots.occupants.tolist(), core.estimates.last_use.tolist()
        return frozenset(sorted(range(24), key=lambda slot: (-(gid[slot] // experts), last[gid[slot]], slot))[:6])

    core, request = started()
    possible = {seen(core), uninformed(core)}
    for n, ids in enumerate(steps):
        step = call_route(core, request, n % layers, ids)
        possible.add(seen(core))  # while the step's own experts are pinned
        core.release(step)
        possible |= {seen(core), uninformed(core)}

    core, request = started()
    done, found = threading.Event(), set()

    def watch() -> None:
        while not done.is_set():
            found.add(seen(core))

    watcher = threading.Thread(target=watch)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        watcher.start()
        for n, ids in enumerate(steps):
            core.release(call_route(core, request, n % layers, ids))
    finally:
        done.set()
        watcher.join()
        sys.setswitchinterval(before)
    assert found <= possible, f"{len(found - possible)} choices of victims follow from no state that there was"
