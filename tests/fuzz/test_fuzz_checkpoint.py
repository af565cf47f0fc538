"""Headers and indexes of checkpoints that nobody sane wrote: what the format's own library refuses is refused, what it reads
is read the same way, and nothing else is ever raised."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing import SECONDS, SETTINGS, bounded, for_seconds
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from moecache import ExpertBank
from moecache.checkpoint import CheckpointIndex
from moecache.errors import CheckpointError

pytestmark = pytest.mark.timeout(300 + 2 * SECONDS)

SIZES = {"F32": 4, "BF16": 2, "U8": 1, "I64": 8, "BOOL": 1, "F8_E4M3": 1, "F64": 8}
NAMES = [
    "a",
    "layers.0.experts.0.w",
    "layers.0.experts.1.w",
    "layers.0.experts.00.w",
    "layers.1.experts.٣.w",
    "",
    "é\u2028",
    "__metadata__",
]
ODD: list[Any] = [-1, 0, 1, 3, 2**31, 2**63, 2**64, 10**30, 1.0, 0.5, True, None, "8", [], [0], {}, "F32", "F4", "NOPE"]


@st.composite
def headers(draw: st.DrawFn) -> tuple[bytes, int]:
    """The text of a header, sound or nearly so, and how many bytes its tensors need."""
    fields: list[tuple[str, Any]] = []
    at = 0
    for name in draw(st.lists(st.sampled_from(NAMES[:5]), max_size=5, unique=True)):
        dtype, shape = draw(st.sampled_from(sorted(SIZES))), draw(st.lists(st.integers(0, 4), max_size=3))
        count = SIZES[dtype]
        for size in shape:
            count *= size
        fields.append((name, {"dtype": dtype, "shape": shape, "data_offsets": [at, at + count]}))
        at += count
    if draw(st.booleans()):
        fields.insert(0, ("__metadata__", {"format": "pt"}))
    for _ in range(draw(st.integers(0, 2))):
        _damage(draw, fields)
    pairs = [f"{json.dumps(name)}:{json.dumps(value)}" for name, value in fields]
    text = ("{" + ",".join(pairs) + "}").encode("utf-8", "surrogatepass")
    for _ in range(draw(st.sampled_from((0, 0, 0, 1)))):
        place = draw(st.integers(0, len(text)))
        put = draw(
            st.sampled_from((b" ", b"\x00", b",", b"\xff", b'"', b"}", b"[" * 2000, b"9" * 30, b"\xef\xbb\xbf", b"NaN"))
        )
        text = text[:place] + put + text[place + draw(st.integers(0, 2)) :]
    return text, at


def _damage(draw: st.DrawFn, fields: list[tuple[str, Any]]) -> None:
    if not fields:
        fields.append((draw(st.sampled_from(NAMES)), draw(st.sampled_from(ODD))))
        return
    n = draw(st.integers(0, len(fields) - 1))
    name, value = fields[n]
    match draw(st.integers(0, 6)):
        case 0:
            fields.append((name, value))  # twice
        case 1:
            fields[n] = (draw(st.sampled_from(NAMES)), value)
        case 2:
            fields[n] = (name, draw(st.sampled_from(ODD)))
        case 3 if isinstance(value, dict) and value:
            key = draw(st.sampled_from(sorted(value)))
            fields[n] = (name, {**value, key: draw(st.sampled_from(ODD))})
        case 4 if isinstance(value, dict) and "data_offsets" in value:
            moved = [end + draw(st.sampled_from((-4, -1, 0, 1, 4))) for end in value["data_offsets"]]
            fields[n] = (name, {**value, "data_offsets": moved})
        case 5 if isinstance(value, dict) and value:
            left = dict(value)
            del left[draw(st.sampled_from(sorted(left)))]
            fields[n] = (name, left)
        case _:
            fields.append(
                (draw(st.sampled_from(NAMES)), {"dtype": "U8", "shape": [0], "data_offsets": [0, 0], "more": 1})
            )


@st.composite
def files(draw: st.DrawFn) -> bytes:
    text, nbytes = draw(headers())
    stated = len(text) + draw(st.sampled_from((0, 0, 0, 0, 0, -1, 1, 8, 10**9, 2**63)))
    data = bytes(range(256)) * (nbytes // 256 + 1)
    whole = (
        max(stated, 0).to_bytes(8, "little")
        + text
        + data[: max(nbytes + draw(st.sampled_from((0, 0, 0, 0, -1, 1, 7))), 0)]
    )
    return whole[: len(whole) - draw(st.sampled_from((0, 0, 0, 0, 0, 1, len(text), len(whole))))]


def theirs(path: Path) -> dict[str, tuple[str, list[int], bytes | None]] | None:
    """What the format's own library reads, or None if it refuses."""
    found: dict[str, tuple[str, list[int], bytes | None]] = {}
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                dtype = part.get_dtype()
                raw = None
                if dtype in SIZES:
                    tensor = file.get_tensor(name)
                    raw = tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
                found[name] = (dtype, part.get_shape(), raw)
    except (SafetensorError, OSError):
        return None
    return found


def ours(path: Path) -> dict[str, tuple[str, list[int], bytes | None]] | None:
    try:
        with bounded(path.stat().st_size):
            index = CheckpointIndex(path)
        content = path.read_bytes()
        return {
            name: (
                extent.dtype_name,
                list(extent.shape),
                content[extent.offset : extent.offset + extent.nbytes] if extent.dtype_name in SIZES else None,
            )
            for name, extent in index.tensors.items()
        }
    except CheckpointError as error:
        refusal = str(error)
    assert len(refusal) < 2000, "a message of an unreadable length"
    return None


def judge(path: Path) -> None:
    expected, found = theirs(path), ours(path)
    if expected is None:
        assert found is None, f"accepted, though safetensors refuses it: {path.read_bytes()[:300]!r}"
    elif found is not None:
        assert found == expected
    else:
        # A name in other digits, or two spellings of one number, are tensors to safetensors and no experts to us; of a name that stands
        # twice with the same place it takes the last.
        named = any("experts" in name for name in expected)
        assert named or names_twice(path), f"refused, though safetensors reads {expected}"


def names_twice(path: Path) -> bool:
    """Whether an object of a header has a key twice."""
    content, twice = path.read_bytes(), []

    def noted(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.append(len(dict(pairs)) < len(pairs))
        return dict(pairs)

    json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")], object_pairs_hook=noted)
    return any(twice)


@pytest.mark.failure("B8b", "128")
@for_seconds
@given(whole=files())
@SETTINGS
def test_headers_are_taken_exactly_where_safetensors_takes_them(whole: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(whole)
        judge(path)


def _sound(folder: Path) -> None:
    from safetensors.torch import save_file

    for shard in range(2):
        tensors = {f"layers.{shard}.experts.{e}.w": torch.full((2, 3), float(10 * shard + e)) for e in range(3)}
        save_file(tensors, folder / f"shard-{shard}.safetensors")


LEAF: Callable[[], st.SearchStrategy[Any]] = lambda: st.sampled_from(  # noqa: E731
    [
        *ODD,
        "shard-0.safetensors",
        "shard-1.safetensors",
        "../outside.safetensors",
        "/etc/passwd",
        "x" * 300,
        "a\x00b",
        ".",
    ]
)


@st.composite
def indexes(draw: st.DrawFn) -> bytes:
    names = [f"layers.{layer}.experts.{expert}.w" for layer in range(2) for expert in range(3)]
    entries: dict[str, Any] = {name: f"shard-{name[7]}.safetensors" for name in names}
    for _ in range(draw(st.integers(0, 3))):
        name = draw(
            st.sampled_from([*names, "lm_head.weight", "layers.0.experts.99999999999.w", "layers.0.experts.20000000.w"])
        )
        entries[name] = draw(LEAF())
    if draw(st.booleans()):
        entries.pop(draw(st.sampled_from(names)), None)
    whole: Any = {"metadata": draw(LEAF()), "weight_map": entries}
    if draw(st.integers(0, 7)) == 0:
        whole = draw(st.sampled_from([entries, [], None, {"weight_map": draw(LEAF())}]))
    text = json.dumps(whole).encode()
    if draw(st.integers(0, 7)) == 0:
        text = draw(
            st.sampled_from(
                [b"\xef\xbb\xbf" + text, b"[" * 3000, text[:-3], text + b"}", b"", b"\xff", b'{"weight_map":' * 2000]
            )
        )
    return text


@pytest.mark.failure("B8b", "G27b", "I35b", "H35")
@for_seconds
@given(text=indexes())
@SETTINGS
def test_indexes_are_read_or_refused_and_lead_nowhere_else(text: bytes) -> None:
    layout = {"w": "layers.{layer}.experts.{expert}.w"}
    with tempfile.TemporaryDirectory() as outer:
        folder = Path(outer) / "model"
        folder.mkdir()
        _sound(folder)
        os.link(folder / "shard-0.safetensors", Path(outer) / "outside.safetensors")
        (folder / "model.safetensors.index.json").write_bytes(text)
        try:
            with bounded(len(text) + 2000), ExpertBank.from_safetensors(folder, layout) as bank:
                files = bank.sources({(0, "w"): 0}).files
                found = [bank.expert(layer, expert)["w"] for layer in range(2) for expert in range(3)]
        except CheckpointError as error:
            files, found, refusal = (), None, str(error)
        if found is None:
            assert len(refusal) < 2000
            return
        assert all(Path(file).parent.samefile(folder) for file in files), files
        assert [float(w[0, 0]) for w in found] == [0, 1, 2, 10, 11, 12]
