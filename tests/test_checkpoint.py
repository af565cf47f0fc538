"""Files of a checkpoint: which they are, what their headers may say, and that what safetensors refuses is refused."""

from __future__ import annotations

import json
import logging
import os
import resource
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moecache import CacheOptions, ExpertBank, ExpertCache
from moecache._engine import FileLink
from moecache.checkpoint import CheckpointIndex
from moecache.errors import CheckpointError, TransferError

LAYOUT = {"w": "layers.{layer}.experts.{expert}.w"}


def expert_name(expert: int | str, layer: int = 0) -> str:
    return f"layers.{layer}.experts.{expert}.w"


def experts(count: int = 3, value: float = 0.0) -> dict[str, torch.Tensor]:
    return {expert_name(expert): torch.full((2, 3), value + expert) for expert in range(count)}


def raw_file(file: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def entry(begin: int, end: int, dtype: str = "F32", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def write_index(folder: Path, weight_map: object) -> Path:
    file = folder / "model.safetensors.index.json"
    file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return file


def of_disk(path: Path) -> ExpertBank:
    return ExpertBank.from_safetensors(path, LAYOUT)


# Headers

_names = st.sampled_from(["a", "b", "c", "é", "__metadata__", ""])
_numbers = st.one_of(st.integers(0, 12), st.sampled_from([2**31, 2**63, 2**64, -1, 1.0, None, "4", True]))
_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "F4", "F64", "BF16", "BOOL", "XX", 3]),
        "shape": st.lists(_numbers, max_size=3),
    },
    optional={"data_offsets": st.lists(_numbers, max_size=3), "other": st.none() | st.just([[1]])},
)


@st.composite
def sound_tensors(draw: st.DrawFn) -> tuple[list[tuple[str, Any]], int]:
    """Tensors that lie one after the other, in some order of names; their number of bytes."""
    made, at = [], 0
    for name in draw(st.lists(st.sampled_from("abcdef"), unique=True, max_size=5)):
        dtype, size = draw(st.sampled_from([("F32", 4), ("U8", 1), ("BF16", 2), ("F8_E4M3", 1)]))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        nbytes = size
        for n in shape:
            nbytes *= n
        made.append((name, {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}))
        at += nbytes
    return draw(st.permutations(made)), at


@st.composite
def headers(draw: st.DrawFn) -> tuple[bytes, int]:
    """The text of a header, sound or spoilt in one of many ways, and how many bytes follow it."""
    pairs, nbytes = draw(sound_tensors())
    for _ in range(draw(st.integers(0, 2))):
        how = draw(st.sampled_from(["shift", "shape", "twice", "other", "odd", "metadata"]))
        if how == "metadata":
            pairs = [*pairs, ("__metadata__", draw(st.sampled_from([{"format": "pt"}, {"n": 1}, [], None, "x"])))]
        elif how == "other":
            pairs = [*pairs, (draw(_names), draw(_entries))]
        elif pairs:
            at = draw(st.integers(0, len(pairs) - 1))
            name, old = pairs[at]
            new = dict(old) if isinstance(old, dict) else old
            if how == "twice":
                pairs = [*pairs, (name, new)]
            elif isinstance(new, dict) and how == "shift":
                new["data_offsets"] = [
                    n + draw(st.integers(-2, 2)) for n in old.get("data_offsets", [0, 0]) if type(n) is int
                ]
            elif isinstance(new, dict) and how == "shape":
                new["shape"] = draw(st.lists(_numbers, max_size=3))
            elif how == "odd":
                new = draw(st.sampled_from([None, 1, "x", []]))
            pairs = [*pairs[:at], (name, new), *pairs[at + 1 :]]
    text = "{" + ",".join(f"{json.dumps(name)}:{json.dumps(value)}" for name, value in pairs) + "}"
    raw = text.encode()
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(raw) - 1))
        raw = raw[:at] + draw(st.binary(max_size=2)) + raw[at + draw(st.integers(0, 2)) :]
    raw += draw(st.sampled_from([b"", b"", b"  ", b"\n", b"x", b"\0"]))
    return raw, nbytes + draw(st.sampled_from([0, 0, 0, 1, -1]))


def has_a_name_twice(text: bytes) -> bool:
    doubled = []
    json.loads(text, object_pairs_hook=lambda pairs: doubled.append(len(dict(pairs)) < len(pairs)))
    return any(doubled)


@pytest.mark.failure("B8b", "128")
@settings(max_examples=400, deadline=None)
@given(headers())
def test_what_safetensors_refuses_is_refused_and_what_it_takes_lies_where_it_says(
    tmp_path_factory: pytest.TempPathFactory, header: tuple[bytes, int]
) -> None:
    text, nbytes = header
    file = raw_file(tmp_path_factory.getbasetemp() / "drawn.safetensors", text, bytes(range(max(nbytes, 0))))
    os.utime(file, (1, 1))  # long ago: nothing to wait for
    try:
        with safe_open(file, framework="pt") as theirs:
            expected = {name: theirs.get_slice(name).get_shape() for name in theirs.keys()}  # noqa: SIM118
    except SafetensorError:
        with pytest.raises(CheckpointError, match=r"drawn\.safetensors"):
            CheckpointIndex(file)
        return
    if has_a_name_twice(text):  # the one thing that is refused beyond that
        with pytest.raises(CheckpointError, match="twice"):
            CheckpointIndex(file)
        return
    index = CheckpointIndex(file)
    assert {name: list(extent.shape) for name, extent in index.tensors.items()} == expected
    with safe_open(file, framework="pt") as theirs:
        for name, extent in index.tensors.items():
            if extent.dtype is not None and extent.nbytes:
                ours, expected_bytes = index.read(name).reshape(-1), theirs.get_tensor(name).reshape(-1)
                assert torch.equal(ours.view(torch.uint8), expected_bytes.view(torch.uint8))


@pytest.mark.failure("B8b", "I35b", "128")
@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "invalid offset"),
        ({"a": entry(0, 8), "b": entry(12, 16)}, 16, "invalid offset"),
        ({"a": entry(0, 8), "b": entry(0, 8)}, 8, "invalid offset"),
        ({"a": entry(0, 8, shape=[3])}, 8, "not a sound"),
        ({"a": entry(0, 8)}, 9, "1 bytes follow"),
        ({"a": entry(0, 8)}, 7, r"truncated: holds \d+ bytes.*the last is 'a'.* need \d+"),
        (b'{"a":1,"a":2}', 0, "not a sound"),
        (
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            1,
            "twice",
        ),
        (b'{"x":' + b"[" * 3000 + b"]" * 3000 + b"}", 0, "not a sound"),
        (b'{"\xff":1}', 0, "UTF-8"),
        (b"{", 0, "JSON"),
        (b"", 0, "JSON"),
        (b"[]", 0, "not a sound"),
        (b"x" * 5000, 0, "JSON"),
    ],
)
def test_headers_that_are_not_sound(tmp_path: Path, header: object, data: int, message: str) -> None:
    file = raw_file(tmp_path / "a.safetensors", header, bytes(data))
    with pytest.raises(CheckpointError, match=rf"a\.safetensors: .*{message}") as caught:
        CheckpointIndex(file)
    assert len(str(caught.value)) < 1000


@pytest.mark.failure("I35b")
@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001, 50_000_000])
def test_a_header_length_beyond_the_file_allocates_nothing(tmp_path: Path, length: int) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(struct.pack("<Q", length) + b"{}")
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=rf"cut short: 10 bytes, a header of {length} bytes"):
            CheckpointIndex(file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")  # opening it would wait for a writer
    with pytest.raises(CheckpointError, match="missing shard"):
        CheckpointIndex(tmp_path / "model.safetensors")
    (tmp_path / "secret.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="cut short: 0 bytes"):
        CheckpointIndex(tmp_path / "secret.safetensors")


# Numbers in names


@pytest.mark.failure("H35", "I35b")
@pytest.mark.parametrize("number", ["99999999999", "20000000", "9" * 5000])
def test_an_expert_number_that_is_no_count_is_refused_at_once(tmp_path: Path, number: str) -> None:
    save_file({**experts(), expert_name(number): torch.ones(2, 3)}, tmp_path / "model.safetensors")
    tracemalloc.start()
    try:
        with pytest.raises(
            CheckpointError, match=r"no number of|experts\.3\.w' is not in the checkpoint; found 4 of 20000001"
        ):
            of_disk(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.failure("B8b")
def test_two_names_for_one_expert_are_refused_and_digits_of_other_scripts_are_no_numbers(tmp_path: Path) -> None:
    save_file({**experts(), expert_name("00"): torch.ones(2, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts\.00?\.w' and '.*experts\.00?\.w' are the same expert"):
        of_disk(tmp_path)
    save_file({**experts(2), expert_name("\u0662"): torch.ones(2, 3)}, tmp_path / "model.safetensors")
    assert of_disk(tmp_path).num_experts == (2,)
    padded = {expert_name(f"{expert:02}"): torch.full((2,), float(expert)) for expert in range(11)}
    save_file(padded, tmp_path / "model.safetensors")
    assert of_disk(tmp_path).expert(0, 10)["w"].tolist() == [10, 10]


@pytest.mark.failure("H35")
def test_a_dtype_that_torch_lacks_matters_where_it_is_wanted(tmp_path: Path) -> None:
    plain = {
        expert_name(e): {"dtype": "F8_E4M3FNUZ", "shape": [4], "data_offsets": [4 * e, 4 * e + 4]} for e in range(2)
    }
    header = {**plain, "other": {"dtype": "F4", "shape": [8], "data_offsets": [8, 12]}}
    raw_file(tmp_path / "model.safetensors", header, bytes(range(12)))
    bank = of_disk(tmp_path)
    assert bank.expert(0, 1)["w"].dtype == torch.float8_e4m3fnuz
    assert bank.expert(0, 1)["w"].view(torch.uint8).tolist() == [4, 5, 6, 7]
    with pytest.raises(CheckpointError, match=r"'other' has dtype F4, which torch does not have"):
        ExpertBank.from_safetensors(tmp_path, [{"w": ["other"]}])
    with pytest.raises(CheckpointError, match=r"'other' has dtype F4"):
        CheckpointIndex(tmp_path).read("other")


# Which files


@pytest.mark.failure("H29")
def test_an_index_may_name_more_than_the_shards_hold(tmp_path: Path) -> None:
    save_file(experts(), tmp_path / "model-00001-of-00001.safetensors")
    names = [*experts(), "lm_head.weight", "rotary.inv_freq"]
    write_index(tmp_path, dict.fromkeys(names, "model-00001-of-00001.safetensors"))
    assert of_disk(tmp_path).num_experts == (3,)
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' is not in .*the index says that model-00001-of-00001"):
        CheckpointIndex(tmp_path).read("lm_head.weight")


@pytest.mark.failure("H29")
def test_of_a_tensor_in_two_files_the_last_file_has_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file({**experts(), "x": torch.zeros(1)}, tmp_path / "b.safetensors")
    save_file({expert_name(1): torch.full((2, 3), 7.0)}, tmp_path / "c.safetensors")
    write_index(tmp_path, {**dict.fromkeys(experts(), "c.safetensors"), "x": "b.safetensors"})
    with caplog.at_level(logging.WARNING, "moecache"):
        assert of_disk(tmp_path).expert(0, 1)["w"].eq(7).all()
    assert "1 tensors are in more than one file" in caplog.text
    assert (
        ExpertBank.from_safetensors([tmp_path / "c.safetensors", tmp_path / "b.safetensors"], LAYOUT)
        .expert(0, 1)["w"]
        .eq(1)
        .all()
    )


@pytest.mark.failure("H29")
def test_files_beside_the_checkpoint_are_not_taken_for_it(tmp_path: Path) -> None:
    save_file(experts(value=50), tmp_path / "consolidated.safetensors")
    save_file(experts(), tmp_path / "model-00001-of-00002.safetensors")
    save_file({"y": torch.zeros(1)}, tmp_path / "model-00002-of-00002.safetensors")
    assert of_disk(tmp_path).expert(0, 1)["w"].eq(1).all()
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: missing shard"):
        of_disk(tmp_path)
    write_index(tmp_path, dict.fromkeys(experts(), "model-00001-of-00002.safetensors"))
    assert of_disk(tmp_path).expert(0, 1)["w"].eq(1).all()
    save_file(experts(value=20), tmp_path / "model.safetensors")  # goes before the index, as in transformers
    assert of_disk(tmp_path).expert(0, 1)["w"].eq(21).all()


@pytest.mark.failure("G27b", "I35b")
@pytest.mark.parametrize(
    "file",
    ["../outside.safetensors", "/etc/passwd", "a/../../outside.safetensors", 3, None, ["a"], "", "a\0b", {"a": 1}],
)
def test_an_index_that_names_what_is_not_in_its_folder_is_refused(tmp_path: Path, file: object) -> None:
    save_file(experts(), tmp_path / "outside.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(experts(), folder / "a.safetensors")
    index = write_index(folder, {expert_name(0): "a.safetensors", "z": file})
    for path in (folder, index):
        with pytest.raises(
            CheckpointError, match=r"index\.json: the file of tensor 'z' is .*expected a file's name inside"
        ):
            CheckpointIndex(path)


def test_an_index_may_name_folders_inside_and_links(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "model" / "sub").mkdir(parents=True)
    save_file(experts(), tmp_path / "blobs" / "0123")
    (tmp_path / "model" / "sub" / "a.safetensors").symlink_to("../../blobs/0123")  # as the hub's cache has it
    write_index(tmp_path / "model", dict.fromkeys(experts(), "sub/a.safetensors"))
    assert of_disk(tmp_path / "model").expert(0, 2)["w"].eq(2).all()


@pytest.mark.failure("I35b")
@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"{}", b'{"weight_map": 3}', b'{"weight_map": {}}', b'{"weight_map": [["a", "b"]]}', b"\xff\xfe{}",
        b'{"weight_map": ' + b"[" * 3000 + b"]" * 3000 + b"}", b'{"weight_map": {"a": ' + b"9" * 5000 + b"}}",
    ],
)  # fmt: skip
def test_what_is_no_index_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"index\.json: not a safetensors index") as caught:
        CheckpointIndex(tmp_path)
    assert len(str(caught.value)) < 1000


@pytest.mark.failure("I35b")
@pytest.mark.parametrize("length", [300, 5000])
def test_names_too_long_for_a_file_are_missing_shards_and_messages_stay_short(tmp_path: Path, length: int) -> None:
    write_index(tmp_path, {"a": "f" * length})
    with pytest.raises(CheckpointError, match="missing shard") as caught:
        CheckpointIndex(tmp_path)
    assert len(str(caught.value)) < 600
    save_file({"n" * 100_000: torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no tensor matches") as caught:
        of_disk(tmp_path)
    assert len(str(caught.value)) < 1000


# Descriptors


def write_shards(folder: Path, count: int) -> list[Path]:
    files = []
    for layer in range(count):
        files.append(folder / f"model-{layer + 1:05d}-of-{count:05d}.safetensors")
        save_file({expert_name(e, layer): torch.full((5,), 10.0 * layer + e) for e in range(4)}, files[-1])
        os.utime(files[-1], (1, 1))
    return files


FEW = 40  # below what an engine would keep open if it could


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """Let the process open this many more files, and no further one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    free = [number for number in range(len(used) + FEW + 1) if number not in used]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[FEW], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.failure("G26")
@pytest.mark.usefixtures("few_descriptors")
@pytest.mark.parametrize("direct", [True, False])
def test_hundreds_of_shards_need_few_descriptors(tmp_path: Path, direct: bool) -> None:
    count = 213
    write_shards(tmp_path, count)
    bank = ExpertBank.from_safetensors(tmp_path, LAYOUT)
    before = len(os.listdir("/proc/self/fd"))
    with (
        ExpertCache(bank, 40, prefetch=False, options=CacheOptions(link=FileLink(direct=direct))) as cache,
        cache.request() as request,
    ):
        for step in range(2 * count):
            layer = step * 7 % count
            with request.route(layer, torch.tensor([[step % 4, (step + 1) % 4]])) as lease:
                for expert, slot, _ in lease.ready():
                    assert lease.weights["w"][slot].eq(10 * layer + expert).all()
    assert all(bank.layer(layer)["w"][2].eq(10 * layer + 2).all() for layer in range(count))
    in_memory = ExpertBank.from_safetensors(tmp_path, LAYOUT, location="ram")
    assert in_memory.expert(count - 1, 3)["w"].eq(10 * (count - 1) + 3).all()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.failure("G26")
@pytest.mark.usefixtures("few_descriptors")
def test_no_descriptor_left_is_said(tmp_path: Path) -> None:
    write_shards(tmp_path, 2)
    bank = ExpertBank.from_safetensors(tmp_path, LAYOUT)
    kept: list[int] = []
    try:
        with suppress(OSError):
            while True:
                kept.append(os.open("/dev/null", os.O_RDONLY))
        for use, error in (
            (
                lambda: ExpertBank.from_safetensors(tmp_path / "model-00001-of-00002.safetensors", LAYOUT),
                CheckpointError,
            ),
            (lambda: bank.expert(0, 0), CheckpointError),
            (lambda: ExpertCache(bank, 2), TransferError),
        ):
            with pytest.raises(error, match=r"model-00001-of-00002\.safetensors") as caught:
                use()
            assert "ulimit -n" in str(caught.value)
    finally:
        for descriptor in kept:
            os.close(descriptor)
