"""Packed sources: decoded as they land, whatever the chunks, the link and the faults."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_world import world as cuda_world
from fake_cuda import FakeCuda
from harness import POISON, WAIT

from moecache._engine import Engine, FaultyLink, FileLink, HostLink, Sources, ThrottledLink
from moecache.errors import TransferError
from moecache.packed import FP8, MXFP4, Part, Recipe

EXPERTS, ROWS, COLS, BLOCK = 3, 96, 64, 32
BIAS = 24  # plain bytes behind the matrices


class Packed:
    """Experts of an FP8 matrix, an MXFP4 matrix and plain bytes, in memory or in two files, and slots for two of them."""

    def __init__(self, folder: Path | None, **options: Any) -> None:
        random = np.random.default_rng(0)
        fp8 = FP8().decoded({"": Part((ROWS, COLS), "F8_E4M3"), "_scale_inv": Part((3, 2), "F32")}, torch.bfloat16)
        fp4 = MXFP4().decoded({"_blocks": Part((ROWS, 2, 16), "U8"), "_scales": Part((ROWS, 2), "U8")}, torch.float32)
        self.recipes: list[Recipe] = [fp8.recipe, fp4.recipe]
        values = random.integers(0, 0x7E, (EXPERTS, ROWS, COLS), np.uint8)
        scales = random.random((EXPERTS, 3, 2), np.float32)
        blocks = random.integers(0, 256, (EXPERTS, ROWS, 2, 16), np.uint8)
        powers = random.integers(120, 130, (EXPERTS, ROWS, 2), np.uint8)
        plain = random.integers(0, 256, (EXPERTS, BIAS), np.uint8)
        self.arrays = (values, scales, blocks, powers, plain)
        self.expected = [self.slot_of(*(array[expert] for array in self.arrays)) for expert in range(EXPERTS)]
        nbytes = len(self.expected[0])
        self.slots = np.full((2, nbytes), POISON, np.uint8)
        self.complete = np.zeros(2, np.int32)
        self.packed_nbytes = sum(array[0].nbytes for array in self.arrays)
        self.engine = Engine(
            self.sources(folder),
            np.array([self.slots.ctypes.data], np.uint64),
            np.array([nbytes], np.int64),
            self.complete,
            owner=self,
            **options,
        )

    @staticmethod
    def slot_of(values: Any, scales: Any, blocks: Any, powers: Any, plain: Any) -> bytes:
        """What a slot is to hold, by torch and numpy."""
        spread = np.repeat(np.repeat(scales, BLOCK, 0), BLOCK, 1)
        fp8 = torch.from_numpy(values).view(torch.float8_e4m3fn).float() * torch.from_numpy(spread)
        e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
        nibbles = np.stack([blocks & 15, blocks >> 4], -1).reshape(ROWS, 2, 32)
        fp4 = np.ldexp(e2m1[nibbles], powers[:, :, None].astype(np.int32) - 127).reshape(ROWS, COLS)
        bits = fp8.to(torch.bfloat16).view(torch.int16).numpy()
        return bits.tobytes() + np.ascontiguousarray(fp4.T.astype(np.float32)).tobytes() + plain.tobytes()

    def sources(self, folder: Path | None) -> Sources:
        where, files = [], [bytearray(b"x" * 13), bytearray(b"y" * 4099)]
        for expert, (number, array) in itertools.product(range(EXPERTS), enumerate(self.arrays)):
            file = files[number % 2]  # scales in another file than values
            where.append((number % 2, len(file)) if folder else (-1, array[expert].ctypes.data))
            file += array[expert].tobytes()
        paths = [] if folder is None else [folder / "first", folder / "second"]
        for path, data in zip(paths, files, strict=False):
            path.write_bytes(data)
        begins = (0, 0, ROWS * COLS * 2, ROWS * COLS * 2, ROWS * COLS * 6)
        return Sources(
            segment_start=np.arange(EXPERTS + 1, dtype=np.int64) * 5,
            segment_file=np.array([file for file, _ in where], np.int32),
            segment_source=np.array([at for _, at in where], np.uint64),
            segment_nbytes=np.array([array[0].nbytes for array in self.arrays] * EXPERTS, np.int64),
            segment_region=np.zeros(5 * EXPERTS, np.int32),
            segment_offset=np.array(begins * EXPERTS, np.int64),
            files=tuple(map(str, paths)),
            recipes=tuple(self.recipes),
            segment_recipe=np.array([0, -2, 1, -2, -1] * EXPERTS, np.int32),
        )

    def fetch(self, expert: int, slot: int, generation: int) -> None:
        self.engine.submit(fetch=np.array([[expert, slot, generation]], np.int32))
        self.engine.wait_all(np.array([slot], np.int32), np.array([generation], np.int32), WAIT)

    def holds(self, slot: int, expert: int) -> bool:
        return self.slots[slot].tobytes() == self.expected[expert]


LINKS = {
    "memory": (False, HostLink),
    "direct": (True, lambda: FileLink(direct=True)),
    "cached": (True, lambda: FileLink(direct=False)),
    "refused": (True, lambda: FaultyLink(FileLink(), refuse_direct=True)),
    "short reads": (True, lambda: FaultyLink(FileLink(), short_read=1000)),
    "throttled": (True, lambda: ThrottledLink(FileLink(), 1e9)),
    "throttled memory": (False, lambda: ThrottledLink(HostLink(), 1e9)),
}


@pytest.fixture(params=LINKS)
def link(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    in_files, make = LINKS[request.param]
    return {"folder": tmp_path if in_files else None, "link": make()}


@pytest.mark.parametrize("chunk_bytes", [1, 2500, 1 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_chunk_and_link(link: dict[str, Any], chunk_bytes: int, threads: int) -> None:
    world = Packed(**link, chunk_bytes=chunk_bytes, threads=threads)
    with world.engine:
        for generation, (expert, slot) in enumerate([(0, 0), (1, 1), (2, 0), (0, 1), (1, 0)], 1):
            world.fetch(expert, slot, generation)
            assert world.holds(slot, expert)
        counters = world.engine.counters()
        assert counters["bytes_demand"] == 5 * world.packed_nbytes


def test_a_failed_read_of_scales_names_their_file(tmp_path: Path) -> None:
    world = Packed(tmp_path)
    with world.engine:
        world.fetch(0, 0, 1)
        (tmp_path / "second").write_bytes(b"z" * 5000)
        with pytest.raises(TransferError, match="changed since") as failed:
            world.fetch(1, 1, 1)
        assert str(tmp_path / "second") in str(failed.value.__cause__)
        assert world.complete[1] == -1


def test_a_part_of_the_rows_is_never_taken_for_all(tmp_path: Path) -> None:
    world = Packed(tmp_path, link=FaultyLink(FileLink(), short_copy_at=1))
    with world.engine:
        with pytest.raises(TransferError):
            world.fetch(0, 0, 1)
        assert not world.holds(0, 0)
        world.fetch(0, 0, 2)
        assert world.holds(0, 0)


@pytest.mark.parametrize(
    ("recipe_of", "message"),
    [
        ([0, -1, 1, -2, -1], "followed by the others"),
        ([-1, -2, 1, -2, -1], "no stream of the one before"),
        ([0, -2, 1, -2, -2], "no stream of the one before"),
        ([1, -2, 1, -2, -1], r"segment \d holds 6144 bytes, its recipe takes 3072"),
        ([0, -2, 1, -2, 2], "one of 2 recipes"),
        ([0, -2, 1, -2], "one entry per segment"),
    ],
)
def test_recipes_that_do_not_fit(recipe_of: list[int], message: str) -> None:
    world = Packed(None)
    world.engine.close()
    sources = world.sources(None)
    changed = Sources(**{**sources.__dict__, "segment_recipe": np.array(recipe_of * EXPERTS, np.int32)})
    with pytest.raises(ValueError, match=message):
        Engine(changed, np.zeros(1, np.uint64), np.ones(1, np.int64), np.zeros(2, np.int32))


def test_a_cuda_link_refuses_packed_sources(fake: FakeCuda) -> None:
    here = cuda_world()
    here.engine.close()
    world = Packed(None)
    world.engine.close()
    regions = np.zeros(1, np.uint64), np.ones(1, np.int64)
    with pytest.raises(ValueError, match="CudaLink cannot decode, and the sources are packed"):
        Engine(world.sources(None), *regions, np.zeros(2, np.int32), link=here.copies.link)
    here.close()
