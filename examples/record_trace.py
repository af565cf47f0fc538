"""Record which experts a model uses while it writes, for `moecache replay`.

python examples/record_trace.py tiny.safetensors                      # the tiny model on its own prompts
python examples/record_trace.py chat.safetensors --model PATH --prompts prompts.json --tokens 200
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoTokenizer

import moecache

TINY = Path(__file__).parent / "tiny_moe"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", help="where the trace goes, a .safetensors file")
    parser.add_argument("--model", default=str(TINY / "model"))
    parser.add_argument(
        "--prompts", default=str(TINY / "prompts.json"), help="JSON: a list of texts, or lists of them by kind"
    )
    parser.add_argument("--tokens", type=int, default=100, help="new tokens for each prompt")
    parser.add_argument("--capacity", type=float, default=0.5, help="fraction of the experts kept")
    arguments = parser.parse_args()

    found = json.loads(Path(arguments.prompts).read_text(encoding="utf-8"))
    prompts = [text for texts in found.values() for text in texts] if isinstance(found, dict) else found
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = moecache.load(arguments.model, capacity=arguments.capacity)
    torch.manual_seed(0)
    with model.moecache.record(arguments.output, model=Path(arguments.model).name) as recorder, torch.inference_mode():
        for number, prompt in enumerate(prompts, 1):
            inputs = tokenizer(prompt, return_tensors="pt")
            model.generate(
                **inputs, max_new_tokens=arguments.tokens, do_sample=True, pad_token_id=tokenizer.pad_token_id
            )
            print(f"{number} of {len(prompts)} prompts, {recorder.tokens:,} tokens")
    moecache.detach(model)


if __name__ == "__main__":
    main()
