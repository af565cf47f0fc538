"""What a key-value cache says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["capturing", "given", "made", "tokens_held"]

# Under which of them a model is given one depends on its class.
_NAMES = ("past_key_values", "cache", "cache_params")


def given(kwargs: Mapping[str, Any]) -> Any:
    """The key-value cache among the arguments of a forward pass, or None."""
    return next((kwargs[name] for name in _NAMES if kwargs.get(name) is not None), None)


def made(output: Any) -> Any:
    """The key-value cache in what a forward pass returned, or None."""
    items = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()
    return next((item for item in items if hasattr(item, "get_seq_length")), None)


def tokens_held(past: Any, trusted: bool) -> int | None:
    """Tokens in a key-value cache; None if it does not say, or could only by waiting for a device that is `trusted`."""
    try:
        held = past.get_seq_length()
    except ValueError:  # a cache of linear-attention layers only
        return int(past.has_previous_state())
    except AttributeError:
        if not isinstance(past, (tuple, list)):
            return None
        return int(past[0][0].shape[-2]) if past and isinstance(past[0], (tuple, list)) else len(past)
    if isinstance(held, torch.Tensor) and not held.is_cpu and (trusted or capturing()):
        return None
    return int(held)


def capturing() -> bool:
    # Nothing may be read from the device then; the cache refuses the call by name.
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
