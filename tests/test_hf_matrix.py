"""The page of models is what running says, shown on a few families; `make matrix` runs all of them."""

from __future__ import annotations

import pytest
from matrix import ALL, PAGE, WAYS, row

from moecache.hf.discovery import REFUSED

# Stacked and separate experts, biases, a router with groups, a class that computes by itself.
FAST = ("gpt_oss", "deepseek_v3", "step3p7")


def cells(family: str) -> dict[str, str]:
    (line,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {family} |")]
    return dict(zip(WAYS, [part.strip() for part in line.strip("|").split("|")[1:]], strict=True))


@pytest.mark.failure("C12", "107")
@pytest.mark.parametrize("family", FAST)
def test_family_in_every_way_of_loading(family: str) -> None:
    assert row(family) == cells(family)


def test_the_page_has_every_family_and_every_refusal() -> None:
    for family in ALL:
        assert set(cells(family)) == set(WAYS)
    text = PAGE.read_text()
    assert all(f"| `{name}` | {reason} |" in text for name, reason in REFUSED.items())
