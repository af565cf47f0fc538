"""transformers: importing this package registers the experts implementation ``"moecache"``.

>>> import moecache.hf
>>> from transformers import AutoModelForCausalLM
>>> model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="moecache")  # doctest: +SKIP
>>> cache = moecache.hf.attach(model, capacity="8GiB")  # doctest: +SKIP

With that argument the experts never enter the model: their parameters stay on the meta device and ``attach`` finds
their bytes in the checkpoint. Without it nothing about loading changes.
"""

from .attach import attach, detach, load
from .experts import register
from .loading import keep_experts_out

__all__ = ["attach", "detach", "load"]

register()
keep_experts_out()
