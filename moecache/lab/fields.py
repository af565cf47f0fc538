"""What a routing record says, and the names that others give it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..errors import TraceFormatError
from ..tensorfile import brief

__all__ = ["FIELDS", "check_mapping", "columns_of", "named", "other_names", "parse_mapping"]

FIELDS: dict[str, tuple[str, ...]] = {
    "layer": ("layer", "layer_id", "layer_idx", "layer_index", "moe_layer", "moe_layer_id", "moe_layer_idx"),
    "token": ("token", "token_idx", "token_index", "token_pos", "position", "pos", "row"),
    "experts": (
        "experts",
        "expert_ids",
        "topk_ids",
        "topk_idx",
        "topk_indices",
        "selected_experts",
        "selected_ids",
        "routed_experts",
        "expert_indices",
        "indices",
    ),
    "expert": ("expert", "expert_id", "expert_idx", "expert_index"),
    "weights": ("weights", "topk_weights", "gate_weights", "expert_weights", "routing_weights", "scores"),
    "weight": ("weight", "gate", "gate_weight", "score", "prob"),
    "request": (
        "request",
        "request_id",
        "req_id",
        "req",
        "rid",
        "request_idx",
        "sequence",
        "seq_id",
        "prompt_id",
        "prompt_index",
    ),
    "pass": ("pass", "forward", "forward_pass", "step", "engine_step", "call", "iteration"),
    "token_id": ("token_id", "input_id", "vocab_id"),
    "decode": ("decode", "is_decode"),
    "phase": ("phase", "stage"),
}
"""What a record says, and the names it goes by; the first is the one this library writes."""

_COUNTS = frozenset(("count", "counts", "frequency"))


def parse_mapping(texts: Iterable[str]) -> dict[str, str]:
    """``FIELD=NAME`` as options of a command line.

    Raises
    ------
    TraceFormatError
    """
    found: dict[str, str] = {}
    for text in texts:
        field, equals, name = text.partition("=")
        if not equals or not name or field in found:
            raise TraceFormatError(f"--map {brief(text)}: expected FIELD=NAME, each field once, such as experts=my_ids")
        found[field] = name
    check_mapping(found)
    return found


def check_mapping(mapping: Mapping[str, str]) -> None:
    """Refuse a mapping of fields that no record has.

    Raises
    ------
    TraceFormatError
    """
    unknown = [field for field in mapping if field not in FIELDS]
    if unknown:
        raise TraceFormatError(f"no field is called {brief(unknown[0])!r}; a record may say {', '.join(FIELDS)}")


def columns_of(
    names: Iterable[object], where: str, mapping: Mapping[str, str] | None = None
) -> tuple[dict[str, str], list[str]]:
    """Which columns hold what, and those that say nothing a trace keeps.

    Parameters
    ----------
    names : iterable of str
        The columns' own names; capitals do not matter.
    where : str
        For messages.
    mapping : mapping of str to str, optional
        Columns by field, where they have none of the names of :data:`FIELDS` or another meaning.

    Raises
    ------
    TraceFormatError
        Two columns for the same, or one that holds counts instead of tokens.
    """
    mapping = mapping or {}
    fields = _names(mapping)
    found: dict[str, str] = {}
    ignored: list[str] = []
    for name in map(str, names):
        field = fields.get(name) or fields.get(name.strip().lower())
        if field is None or (field in mapping and mapping[field] != name):
            ignored.append(name)
        elif field in found:
            raise TraceFormatError(f"{where}: the columns {brief(found[field])} and {brief(name)} both say the {field}")
        else:
            found[field] = name
    _check(found, ignored, where)
    return found, ignored


def named(field: str, names: Sequence[str], mapping: Mapping[str, str] | None = None) -> list[str]:
    """Those of some names that stand for a field."""
    asked = (mapping or {}).get(field)
    return [name for name in names if (name == asked if asked else name.lower() in FIELDS[field])]


def other_names() -> str:
    """For messages: what the columns of a record may be called besides."""
    return "; ".join(f"{field}: {', '.join(names[1:])}" for field, names in FIELDS.items() if len(names) > 1)


def _names(mapping: Mapping[str, str]) -> dict[str, str]:
    known = {name: field for field, names in FIELDS.items() for name in names}
    return {**known, **{name: field for field, name in mapping.items()}}


def _check(found: Mapping[str, str], ignored: Sequence[str], where: str) -> None:
    if "token" not in found and {name.strip().lower() for name in ignored} & _COUNTS:
        raise TraceFormatError(
            f"{where}: a table of counts has no order of tokens to replay; as layer,expert,count it seeds a history "
            "(moecache history make, or moecache replay TRACE --history COUNTS.csv)"
        )
    if "token" not in found and "token_id" in found:
        raise TraceFormatError(
            f"{where}: {found['token_id']} may be a token's number in the text or in the vocabulary; say --map "
            f"token={found['token_id']} if it is its place in the text, and leave it out if not"
        )
    for one, other in (("experts", "expert"), ("weights", "weight"), ("decode", "phase")):
        if one in found and other in found:
            raise TraceFormatError(
                f"{where}: the columns {brief(found[one])} and {brief(found[other])} both say the {one}"
            )
