"""How checkpoints name their experts: which tensors make up each expert of each MoE layer."""

from __future__ import annotations

import itertools
import json
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .checkpoint import CheckpointIndex, short
from .errors import CheckpointError
from .packed.format import Format

__all__ = ["PRESETS", "LayerSource", "Layout", "PackedSource"]

_MOST_DIGITS = 9


@dataclass(frozen=True)
class PackedSource:
    """A matrix of every expert of a layer that is decoded from its streams.

    Parameters
    ----------
    format : Format
    streams : mapping of str to (str or sequence of str)
        By the format's suffix: a list of tensor names, one an expert, or the name of one stacked tensor.
    dtype : torch.dtype
        To decode to.
    """

    format: Format
    streams: Mapping[str, str | Sequence[str]]
    dtype: torch.dtype


# One layer of a checkpoint: for each expert parameter the pieces that make it up, joined along dim 0. A piece is a list
# of tensor names, one an expert, the name of one stacked tensor whose rows are the experts, or a packed matrix.
LayerSource = Mapping[str, Sequence["str | Sequence[str] | PackedSource"]]


@dataclass(frozen=True)
class Layout:
    """How a checkpoint names its experts.

    Parameters
    ----------
    params : mapping of str to sequence of str
        For each expert parameter, as the compute code names it, one or more name templates with ``{layer}`` and
        ``{expert}``. Several templates are joined along dim 0 (gate, then up). A template without ``{expert}`` names
        a stacked tensor whose rows are the experts.
    then : Layout, optional
        Of a second stack, such as a decoder's, whose layers come after these.

    Examples
    --------
    >>> Layout({"w": ["layers.{layer}.experts.{expert}.w"]}).params["w"]
    ('layers.{layer}.experts.{expert}.w',)
    """

    params: Mapping[str, Sequence[str]]
    then: Layout | None = None

    def __post_init__(self) -> None:
        params = {name: (t,) if isinstance(t, str) else tuple(t) for name, t in self.params.items()}
        if not params or not all(params.values()):
            raise CheckpointError(f"a layout needs at least one parameter, each with a name template: {params}")
        for name, templates in params.items():
            for template in templates:
                if template.count("{layer}") != 1 or template.count("{expert}") > 1:
                    raise CheckpointError(
                        f"layout, parameter {name!r}: {template!r} must hold {{layer}} once and {{expert}} at most once"
                    )
        object.__setattr__(self, "params", params)

    @classmethod
    def preset(cls, name: str) -> Layout:
        """The layout of a known model family; see ``moecache.layout.PRESETS`` for the names."""
        if name not in PRESETS:
            raise CheckpointError(f"unknown layout {name!r}; known: {', '.join(sorted(PRESETS))}, or pass a Layout")
        return cls(PRESETS[name], Layout(_SECOND_STACKS[name]) if name in _SECOND_STACKS else None)

    def resolve(
        self,
        index: CheckpointIndex,
        layers: Sequence[int] | None = None,
        *,
        packed: Format | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> tuple[list[LayerSource], list[str]]:
        """Find the tensors of every MoE layer.

        Parameters
        ----------
        index : CheckpointIndex
        layers : sequence of int, optional
            The model's own numbers of the layers wanted; all that match when None, but for layers that only predict
            further tokens (multi-token prediction).
        packed, dtype : Format, torch.dtype
            How tensors of the templates' names are packed where they are, and what they are decoded to.

        Returns
        -------
        sources : list of LayerSource, in ascending layer number
        names : list of str
            One name a layer, the common beginning of its tensors.

        Raises
        ------
        CheckpointError
            No layer matches, a wanted layer is absent, or an expert of a layer is missing; layers were named by number
            and there are two stacks of them.
        """
        if self.then is not None:
            if layers is not None:
                raise CheckpointError(
                    "this layout has two stacks of layers, which no numbers tell apart: expected layers=None"
                )
            (first, names), (second, more) = (
                stack.resolve(index, packed=packed, dtype=dtype) for stack in (replace(self, then=None), self.then)
            )
            return first + second, names + more
        suffix = "" if packed is None else packed.suffixes[0]
        found = {
            template: _match(template, index, suffix) for templates in self.params.values() for template in templates
        }
        present = sorted(set().union(*(by_layer.keys() for by_layer in found.values())))
        wanted = _decoder_layers(index, present) if layers is None else [operator.index(layer) for layer in layers]
        if not wanted:
            raise CheckpointError(
                f"no tensor matches {', '.join(map(repr, found))}; "
                f"the checkpoint holds e.g. {', '.join(map(short, sorted(index.tensors)[:3]))}"
            )
        sources: list[LayerSource] = [self._layer(index, found, layer) for layer in wanted]
        if packed is not None:
            sources = [
                {param: [_packed(index, piece, packed, dtype) for piece in pieces] for param, pieces in source.items()}
                for source in sources
            ]
        return sources, [self._layer_name(layer) for layer in wanted]

    def _layer(
        self, index: CheckpointIndex, found: Mapping[str, Mapping[int, Mapping[int, str]]], layer: int
    ) -> dict[str, list[str | list[str]]]:
        source: dict[str, list[str | list[str]]] = {}
        templates = [template for templates in self.params.values() for template in templates]
        count = 1 + max((max(found[t].get(layer, {}), default=-1) for t in templates), default=-1)
        for param, param_templates in self.params.items():
            pieces: list[str | list[str]] = []
            for template in param_templates:
                names = found[template].get(layer, {})
                if "{expert}" not in template:
                    if not names:
                        raise index.absent(_fill(template, layer), layer)
                    pieces.append(names[-1])
                elif len(names) < count or not names:
                    # The first gap is at most as far as there are names, however large the largest number is.
                    gap = next(expert for expert in itertools.count() if expert not in names)
                    raise index.absent(_fill(template, layer, gap), layer, f"found {len(names)} of {count} experts")
                else:
                    pieces.append([names[expert] for expert in range(count)])
            source[param] = pieces
        return source

    def _layer_name(self, layer: int) -> str:
        filled = [_fill(t, layer).split("{expert}")[0] for templates in self.params.values() for t in templates]
        common = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*filled, strict=False))
        return "".join(column[0] for column in common).rpartition(".")[0]


def _decoder_layers(index: CheckpointIndex, present: Sequence[int]) -> list[int]:
    """Those of the layers that a model decodes with: some checkpoints hold one more, to predict further tokens with.

    Such a layer lies behind the ``num_hidden_layers`` of the configuration beside the files, and has an ``eh_proj``.
    """
    config = Path(index.files[0]).with_name("config.json")
    try:
        described = json.loads(config.read_bytes())
        count = described.get("text_config", described).get("num_hidden_layers")
    except (OSError, ValueError, AttributeError, RecursionError):
        count = None
    if isinstance(count, int) and count > 0 and present and present[0] < count:
        return [layer for layer in present if layer < count]
    further = {int(match[1]) for name in index.tensors if (match := re.search(r"layers\.([0-9]+)\.eh_proj\.", name))}
    return [layer for layer in present if layer not in further] if further < set(present) else list(present)


def _fill(template: str, layer: int, expert: int | str = "{expert}") -> str:
    return template.replace("{layer}", str(layer)).replace("{expert}", str(expert))


def _packed(
    index: CheckpointIndex, piece: str | Sequence[str] | PackedSource, packed: Format, dtype: torch.dtype
) -> str | Sequence[str] | PackedSource:
    """A piece whose tensors hold packed values, with its further streams; any other as it is."""
    if isinstance(piece, PackedSource):
        return piece
    names = [piece] if isinstance(piece, str) else list(piece)
    first = packed.suffixes[0]
    if not all(name.endswith(first) and index.lookup(name).dtype_name in packed.dtypes for name in names):
        return piece
    streams: dict[str, str | Sequence[str]] = {}
    for suffix in packed.suffixes:
        found = [name[: len(name) - len(first)] + suffix for name in names]
        present = [name in index.tensors for name in found]
        if any(present) or suffix not in packed.optional:
            if not all(present):
                raise index.absent(found[present.index(False)], found=f"{packed.name} values need it")
            streams[suffix] = found[0] if isinstance(piece, str) else found
    return PackedSource(packed, streams, dtype)


def _match(template: str, index: CheckpointIndex, suffix: str = "") -> dict[int, dict[int, str]]:
    """Tensor names by layer and expert number; expert -1 where the template is of a stacked tensor.

    Names may end in the suffix.
    """
    digits = "[0-9]+"  # \\d would take those of every script
    pattern = re.escape(template).replace(r"\{layer\}", f"(?P<layer>{digits})")
    pattern = pattern.replace(r"\{expert\}", f"(?P<expert>{digits})")
    matcher = re.compile(f"{pattern}(?:{re.escape(suffix)})?")
    stacked = "{expert}" not in template
    names: dict[int, dict[int, str]] = {}
    for name in index.tensors:
        if match := matcher.fullmatch(name):
            layer = _number(match["layer"], name)
            expert = -1 if stacked else _number(match["expert"], name)
            other = names.setdefault(layer, {}).setdefault(expert, name)
            if other != name:
                raise CheckpointError(
                    f"tensors {short(other)} and {short(name)} are the same expert by their numbers; one is expected"
                )
    return names


def _number(digits: str, name: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise CheckpointError(f"tensor {short(name)}: {short(digits)} is no number of a layer or an expert")
    return int(digits)


def _stacked(prefix: str, *params: str) -> dict[str, list[str]]:
    return {param.removesuffix(".weight"): [f"{prefix}.{param}"] for param in params}


_GATE_UP_DOWN = {
    "gate_up_proj": [
        "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
        "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
    ],
    "down_proj": ["model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"],
}
_W1_W3_W2 = {
    "gate_up_proj": [
        "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
        "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",
    ],
    "down_proj": ["model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight"],
}
_SWITCH = ("wi.weight", "wo.weight")
_NLLB = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
_FUSED = ("gate_up_proj", "down_proj")
_LIKE_QWEN = (
    *("qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "ernie4_5_moe", "longcat_flash"),
    *("afmoe", "axk1", "cohere2_moe", "dots1", "exaone_moe", "flex_olmo", "hunyuan_v1_moe", "hy_v3", "kolibri1"),
    *("laguna", "mellum", "mimo_v2_flash", "solar_open"),
)
_LIKE_MIXTRAL = ("mixtral", "arctic", "minimax", "minimax_m2", "phimoe")

#: Known layouts by family name.
PRESETS: Mapping[str, Mapping[str, Sequence[str]]] = {
    **dict.fromkeys(_LIKE_QWEN, _GATE_UP_DOWN),
    **dict.fromkeys(_LIKE_MIXTRAL, _W1_W3_W2),
    **dict.fromkeys(("fused", "hy_v4", "lara_mini"), _stacked("model.layers.{layer}.mlp.experts", *_FUSED)),
    **dict.fromkeys(
        ("granitemoe", "granitemoeshared"),
        _stacked("model.layers.{layer}.block_sparse_moe", "input_linear.weight", "output_linear.weight"),
    ),
    "gpt_oss": _stacked(
        "model.layers.{layer}.mlp.experts", "gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"
    ),
    "aria_text": _stacked("model.layers.{layer}.mlp.experts", "fc1.weight", "fc2.weight"),
    "diffusion_gemma": _stacked("model.decoder.layers.{layer}.experts", *_FUSED),
    "doge": _stacked("model.layers.{layer}.mlp", "down_embed.weight", "up_embed.weight"),
    "granitemoe_swa": _stacked("model.layers.{layer}.block_sparse_moe.experts", *_FUSED),
    "jetmoe": _stacked("model.layers.{layer}.mlp", "input_linear.weight", "output_linear.weight"),
    "llama4": _stacked("language_model.model.layers.{layer}.feed_forward.experts", *_FUSED),
    "llama4_text": _stacked("model.layers.{layer}.feed_forward.experts", *_FUSED),
    "nllb-moe": _stacked("model.encoder.layers.{layer}.ffn.experts.expert_{expert}", *_NLLB),
    "step3p7": _stacked("layers.{layer}.mlp.experts", *_FUSED),
    "switch_transformers": _stacked("encoder.block.{layer}.layer.1.mlp.experts.expert_{expert}", *_SWITCH),
}
# Of encoder-decoder families: the decoder's.
_SECOND_STACKS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "nllb-moe": _stacked("model.decoder.layers.{layer}.ffn.experts.expert_{expert}", *_NLLB),
    "switch_transformers": _stacked("decoder.block.{layer}.layer.2.mlp.experts.expert_{expert}", *_SWITCH),
}
