"""Every family in every way of loading: equal bit by bit with misses, or refused by name before its first forward.

``python tests/matrix.py`` runs all of it and writes docs/guide/models.md; ``tests/test_hf_matrix.py`` runs a few families
and compares them with that page.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from hf_families import FAMILIES, OWN_FORWARD, WHOLE_MODELS, aligned, build, build_small

import moecache
import moecache.hf
from moecache.errors import MoeCacheError
from moecache.hf.discovery import REFUSED

PAGE = Path(__file__).parent.parent / "docs" / "guide" / "models.md"
IDS = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))
IMPLEMENTATIONS = ("grouped_mm", "eager", "batched_mm")
DTYPES = (torch.float32, torch.bfloat16)
ALL = tuple(dict.fromkeys([*FAMILIES, *WHOLE_MODELS, *OWN_FORWARD]))


HEAD = """\
Made by `make matrix`, which runs every cell: the outputs for a batch and for a prompt of one token equal those of the model without a
cache, bit by bit, with misses and, at slots for three experts, evictions. The first two columns are run in float32 and bfloat16, the
others in bfloat16; the first three with each of `grouped_mm`, `eager` and `batched_mm`, the others with what transformers chooses. A cell
says where the experts lay: `disk`, in the checkpoint's files, or `ram`, in memory; or which error refused it before its first forward."""
FOOT = """\
Other families run as well where their experts dispatch through transformers' experts interface (`tests/test_hf_discovery.py` tries every
such class). So do classes of their own, as remote code may bring, with `num_experts`, parameters with a row for each expert, and
`forward(self, hidden_states, top_k_index, top_k_weights)`: write your experts that way and nothing else is needed. Such a class computes
by itself whatever implementation is named, and `attach(experts_implementation=...)` refuses all but `eager` for it."""


def made(family: str, dtype: torch.dtype) -> Any:
    return build(family, dtype) if family in FAMILIES else build_small(family, dtype)


@torch.no_grad()
def logits(model: Any) -> list[torch.Tensor]:
    """Of a batch, and of one token."""
    found = []
    for ids in (IDS, IDS[:1, :1]):
        output = model(ids)
        found.append(output.logits if hasattr(output, "logits") else output.last_hidden_state)
    return found


def check(model: Any, cache: moecache.ExpertCache, expected: list[torch.Tensor]) -> str:
    found = logits(model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), "bits differ"
    stats = cache.stats()
    assert stats.misses > 0, "no misses"
    if cache.capacity < sum(cache.num_experts):
        assert stats.evictions > 0, "no evictions"
        assert stats.resident_bytes < stats.expert_bytes_total
    return cache.bank.location


def load(folder: Path, cls: Any, **options: Any) -> Any:
    return aligned(cls.from_pretrained(folder, experts_implementation="moecache", **options))


def by_class(folder: Path, cls: Any, name: str) -> tuple[Any, Any]:
    model = load(folder, cls)
    return model, moecache.attach(model, 3, experts_implementation=name)


def resident(folder: Path, cls: Any, name: str) -> tuple[Any, Any]:
    model = aligned(cls.from_pretrained(folder, experts_implementation=name))
    return model, moecache.attach(model, 3)


def all_resident(folder: Path, cls: Any, name: str) -> tuple[Any, Any]:
    model = load(folder, cls)
    return model, moecache.attach(model, 1.0, bank="ram", experts_implementation=name)


def by_device_map(folder: Path, cls: Any, name: str) -> tuple[Any, Any]:
    model = load(folder, cls, device_map="cpu")
    return model, moecache.attach(model, 3, experts_implementation=name)


def by_moecache(folder: Path, cls: Any, name: str) -> tuple[Any, Any]:
    model = aligned(moecache.load(folder, capacity=3, experts_implementation=name))
    return model, model.moecache


def by_state_dict(folder: Path, cls: Any, name: str) -> tuple[Any, Any]:
    whole = cls.from_pretrained(folder)
    model = cls.from_pretrained(
        None, config=whole.config, state_dict=whole.state_dict(), experts_implementation="moecache"
    )
    return model, moecache.attach(aligned(model), 3, experts_implementation=name)


# In both dtypes; the others in bfloat16 only.
FIRST = (by_class, resident)
# With every implementation; the others with the one that transformers chooses.
EVERY = (by_class, resident, all_resident)

WAYS: dict[str, Callable[[Path, Any, str], tuple[Any, Any]]] = {
    "`from_pretrained`, experts kept out": by_class,
    "`from_pretrained`, experts in memory": resident,
    "kept out, every expert resident": all_resident,
    "`device_map`": by_device_map,
    "`moecache.load`": by_moecache,
    "`state_dict=`": by_state_dict,
}


def cell(way: Callable[[Path, Any, str], tuple[Any, Any]], folder: Path, cls: Any, expected: dict[str, Any]) -> str:
    """What a way of loading comes to: where the experts lay, or the error that refused it."""
    places = set()
    for name in expected if way in EVERY else list(expected)[:1]:
        try:
            model, cache = way(folder, cls, name)
        except MoeCacheError as error:
            places.add(f"refused ({type(error).__name__})")
            continue
        places.add(check(model, cache, expected[name]))
        moecache.detach(model)
    return ", ".join(sorted(places))


def row(family: str) -> dict[str, str]:
    """Cells of a family by way of loading."""
    rows = []
    for dtype in DTYPES:
        with tempfile.TemporaryDirectory() as folder:
            model = made(family, dtype)
            model.save_pretrained(folder)
            cls = type(model)
            expected = {}
            for name in IMPLEMENTATIONS:
                if family in OWN_FORWARD and name != "eager":
                    continue
                expected[name] = logits(aligned(cls.from_pretrained(folder, experts_implementation=name)))
            rows.append({})
            for name, way in WAYS.items():
                known = way is not by_moecache or hasattr(transformers, cls.__name__)
                if known and (way in FIRST or dtype == torch.bfloat16):
                    rows[-1][name] = cell(way, Path(folder), cls, expected)
    assert rows[0].items() <= rows[1].items(), f"{family}: {rows}"
    return {name: rows[1].get(name, "") for name in WAYS}


def page(rows: dict[str, dict[str, str]]) -> str:
    """The text of docs/guide/models.md."""
    table = [
        "| `model_type` | " + " | ".join(WAYS) + " |",
        "|---|" + "---|" * len(WAYS),
        *(f"| {family} | " + " | ".join(rows[family][way] for way in WAYS) + " |" for family in rows),
    ]
    refused = ["| class of the experts | it |", "|---|---|"]
    refused += [f"| `{name}` | {reason} |" for name, reason in sorted(REFUSED.items())]
    versions = f"With transformers {transformers.__version__} and torch {torch.__version__.partition('+')[0]}."
    return "\n".join(["# Models", "", HEAD, versions, "", *table, "", FOOT, "", "## Refused by name", "", *refused, ""])


def rows_of(families: Iterable[str]) -> dict[str, dict[str, str]]:
    found = {}
    for family in families:
        if family in transformers.CONFIG_MAPPING:
            found[family] = row(family)
            print(family, *sorted(set(found[family].values())), file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    logging.getLogger("moecache").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(rows_of(sys.argv[1:] or ALL)))
