"""The page of models is what running says, shown on a few families; `make matrix` runs all of them."""

from __future__ import annotations

import pytest
from controls import flipped_bytes
from hf_other_families import build_by_class
from matrix import ALL, CONTROL, PAGE, row
from trained import texts_that_differ
from ways import WAYS

# Biases and transposed weights; separate experts and a router with groups; experts that are modules of their own.
FAST = ("gpt_oss", "deepseek_v3", "remote code, sorted rows")
CONTROLS = ("switch_transformers", "llama4_text")


def cells(family: str) -> dict[str, str]:
    (line,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {family} |")]
    return dict(zip([*WAYS, CONTROL], [part.strip() for part in line.split("|")[2:-1]], strict=True))


@pytest.mark.failure("C12", "107")
@pytest.mark.parametrize("family", FAST)
def test_family_in_every_way(family: str) -> None:
    assert row(family) == cells(family)


@pytest.mark.failure("44")
@pytest.mark.parametrize("family", CONTROLS)
def test_the_bytes_of_used_experts_count_and_no_others(family: str, tmp_path) -> None:
    model = build_by_class(family)
    model.save_pretrained(tmp_path)
    assert flipped_bytes(tmp_path, type(model)) == "seen"


@pytest.mark.failure("C12")
def test_texts_of_the_trained_model() -> None:
    """`make matrix` has twelve prompts of 200 tokens."""
    assert texts_that_differ(prompts=3, tokens=60) == 0


def test_the_page_has_every_family() -> None:
    for family in ALL:
        assert set(cells(family)) == {*WAYS, CONTROL}
