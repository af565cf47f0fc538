"""Options that several commands share, as people write them."""

from __future__ import annotations

from pathlib import Path

import typer

from ..capacity import nbytes_of
from ..errors import CapacityError
from ..trace import Trace
from .fields import parse_mapping
from .formats import read_trace

__all__ = ["MAP", "NUM_EXPERTS", "REQUEST_TOKENS", "TOP_K", "capacities_of", "capacity_texts", "read"]

NUM_EXPERTS = typer.Option(None, min=1, help="Experts of a layer, for files that do not say.")
TOP_K = typer.Option(None, min=1, help="Experts of a token, for files of one expert a row without token numbers.")
REQUEST_TOKENS = typer.Option(None, min=1, help="Begin a request every so many tokens, for files that name none.")
MAP = typer.Option([], "--map", help="FIELD=NAME: what a column or array is called, such as experts=my_ids.")


def read(
    path: Path,
    num_experts: int | None = None,
    top_k: int | None = None,
    request_tokens: int | None = None,
    mapping: list[str] | None = None,
) -> Trace:
    """As :func:`moecache.lab.read_trace`, with ``FIELD=NAME`` texts."""
    return read_trace(
        path, num_experts, mapping=parse_mapping(mapping or []), top_k=top_k, request_tokens=request_tokens
    )


def capacity_texts(text: str) -> list[str]:
    """Capacities separated by commas: ``0.1``, ``10%``, ``64``, ``8GiB``.

    Raises
    ------
    typer.BadParameter
    """
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        try:
            _parsed(part)
        except (ValueError, CapacityError):
            raise typer.BadParameter(
                f"{text!r}: expected experts or fractions separated by commas, such as 0.1, 25%, 64 or 8GiB"
            ) from None
    return parts


def capacities_of(texts: list[str], trace: Trace, expert_nbytes: float | None) -> list[int | float]:
    """What capacities stand for, in experts or as fractions.

    Raises
    ------
    CapacityError
        Bytes, where the size of an expert is not known.
    """
    found: list[int | float] = []
    for text in texts:
        value, is_bytes = _parsed(text)
        if not is_bytes:
            found.append(value)
        elif expert_nbytes is None:
            raise CapacityError(f"capacity {text}: how many experts that is depends on their size; say --expert-bytes")
        else:
            found.append(min(int(value / expert_nbytes), sum(trace.num_experts)))
    return found


def _parsed(text: str) -> tuple[int | float, bool]:
    # A capacity, and whether it is bytes.
    if text.endswith("%"):
        return float(text[:-1]) / 100, False
    if text[-1:].isalpha():
        return nbytes_of(text), True
    return float(text) if "." in text else int(text), False
