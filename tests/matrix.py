"""Every family in every way of loading and running: equal bit by bit with misses, or refused by name.

``python tests/matrix.py`` runs all of it and writes docs/guide/models.md; ``tests/test_hf_matrix.py`` runs a few families
and compares them with that page.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from controls import flipped_bytes
from hf_families import FAMILIES, WHOLE_MODELS, build, build_small
from hf_other_families import BY_CLASS, DISPATCH, build_by_class
from trained import texts_that_differ
from ways import WAYS, Way, outputs, resident

import moecache
import moecache.hf
from moecache.errors import MoeCacheError

PAGE = Path(__file__).parent.parent / "docs" / "guide" / "models.md"
IMPLEMENTATIONS = ("grouped_mm", "eager", "batched_mm")
DTYPES = (torch.float32, torch.bfloat16)
ALL = tuple(dict.fromkeys([*FAMILIES, *WHOLE_MODELS, *BY_CLASS]))
CONTROL = "a byte flipped"

HEAD = """\
Made by `make matrix`, which runs every cell: the logits of a batch, of a prompt of one token and of an answer of twelve tokens for a batch
of two, and the answer, equal those of the model without a cache, bit by bit, with misses and, at slots for the experts of one token and one
more, evictions (`pipeline`, `generate_batch` and `torch.compile` compare what they give, with misses). The first four columns are run in
float32 and bfloat16 and with each of `grouped_mm`, `eager` and `batched_mm` that reaches the family; the others in bfloat16 with what
transformers chooses. A cell says where the experts lay: `disk`, in the checkpoint's files, or `ram`, in memory; or which error refused it.
Empty cells: what the family has not (a head, a decoder alone), or what fails without a cache as well. In the last column a byte of the
checkpoint is flipped: one of an expert that a prompt uses changes its logits, one of another does not."""
FOOT = """\
Other families run as well where their experts dispatch through transformers' experts interface (`tests/test_hf_discovery.py` tries every
such class). So do classes of their own, as remote code may bring:

* experts that are modules of their own in a `ModuleList` or `ModuleDict` whose name says `expert`, as in the remote code of Arctic and
  of earlier DeepSeek, Mixtral, Phi and Qwen models (the last three rows are such code, loaded by `trust_remote_code=True` in
  `tests/test_hf_adapters.py`). The code around them runs twice a step: first its experts only take note of what they are called with, then
  they are computed as they land, then they answer; router and shared experts run once. It may not change its hidden states in place, nor
  give an expert what another has returned: `attach` tries it, and refuses it by name;
* a class with `num_experts`, parameters with a row for each expert, and `forward(self, hidden_states, top_k_index, top_k_weights)`: write
  your experts that way and nothing else is needed.

Such classes compute by themselves whatever implementation is named, and `attach(experts_implementation=...)` refuses all but `eager` for
them. Three families are special: Llama 4 computes every expert for every token, with rows of zeros where it was not chosen; experts with
such rows alone are left out (a model with infinite or NaN weights is not followed). Experts of JetMoE are single projections, four modules
a layer, and are counted by step, not by token. Identity experts of LongCat-Flash have no bytes and are not cached.

Not in the table: a `DistributedConfig` over several ranks and a `device_map` over several places are refused (`AttachError`), as is an
adapter on experts themselves (`UnsupportedModelError`)."""


def made(family: str, dtype: torch.dtype) -> Any:
    if family in BY_CLASS:
        return build_by_class(family, dtype)
    return build(family, dtype) if family in FAMILIES else build_small(family, dtype)


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def check(cache: moecache.ExpertCache, found: list[torch.Tensor], expected: list[torch.Tensor], *, long: bool) -> str:
    assert same(found, expected), "bits differ"
    stats = cache.stats()
    assert stats.misses > 0, "no misses"
    if cache.capacity < sum(cache.num_experts):
        assert stats.evictions > 0 or not long, "no evictions"
        assert stats.resident_bytes < stats.expert_bytes_total
    return cache.bank.location


def cell(way: Way, folder: Path, cls: Any, expected: dict[str, list[torch.Tensor]]) -> str:
    """What a way comes to: where the experts lay, the error that refused it, or nothing where it fails without a cache."""
    places = set()
    run = way.run or outputs
    for name in expected if way.every_implementation else list(expected)[:1]:
        try:
            model, cache = way.attached(folder, cls, name)
            found = run(model)
        except MoeCacheError as error:
            places.add(f"refused ({type(error).__name__})")
            continue
        except Exception:
            assert fails_without_a_cache(way, folder, cls, name)
            places.add("")
            continue
        if way.reference is None and way.run is None:
            wanted = expected[name]
        else:
            wanted = run((way.reference or resident)(folder, cls, name))
        places.add(check(cache, found, wanted, long=way.run is None))
        cache.close()
    return ", ".join(sorted(places))


def fails_without_a_cache(way: Way, folder: Path, cls: Any, name: str) -> bool:
    try:
        (way.run or outputs)((way.reference or resident)(folder, cls, name))
    except Exception:
        return True
    return False


def row(family: str) -> dict[str, str]:
    """Cells of a family by way."""
    rows = []
    for dtype in DTYPES:
        with tempfile.TemporaryDirectory() as folder:
            model = made(family, dtype)
            model.save_pretrained(folder)
            cls = type(model)
            names = ("eager",) if family in BY_CLASS and family not in DISPATCH else IMPLEMENTATIONS
            expected = {name: outputs(resident(Path(folder), cls, name)) for name in names}
            rows.append(
                {
                    title: cell(way, Path(folder), cls, expected)
                    for title, way in WAYS.items()
                    if way.suits(cls) and (way.both_dtypes or dtype == torch.bfloat16)
                }
            )
            if dtype == torch.float32:
                control = flipped_bytes(Path(folder), cls)
    assert rows[0].items() <= rows[1].items(), f"{family}: {rows}"
    return {**{title: rows[1].get(title, "") for title in WAYS}, CONTROL: control}


def page(rows: dict[str, dict[str, str]], trained: str) -> str:
    """The text of docs/guide/models.md."""
    titles = [*WAYS, CONTROL]
    table = [
        "| `model_type` | " + " | ".join(titles) + " |",
        "|---|" + "---|" * len(titles),
        *(f"| {family} | " + " | ".join(rows[family][title] for title in titles) + " |" for family in rows),
    ]
    versions = f"With transformers {transformers.__version__} and torch {torch.__version__.partition('+')[0]}."
    return "\n".join(["# Models", "", HEAD, versions, "", *table, "", trained, "", FOOT, ""])


def rows_of(families: Iterable[str]) -> dict[str, dict[str, str]]:
    found = {}
    for family in families:
        if family in transformers.CONFIG_MAPPING or family in BY_CLASS:
            found[family] = row(family)
            print(family, *found[family].values(), sep=" | ", file=sys.stderr, flush=True)
    return found


def trained_line(prompts: int = 12, tokens: int = 200) -> str:
    differ = texts_that_differ(prompts, tokens)
    return (
        f"The trained model of `examples/tiny_moe`, as plain `from_pretrained` loads it, against the same with a quarter of its experts "
        f"in a cache over the checkpoint: {prompts} prompts, {tokens} greedy tokens each, {differ} texts differ."
    )


if __name__ == "__main__":
    logging.getLogger("moecache").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    text = page(rows_of(sys.argv[1:] or ALL), trained_line())
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text)
