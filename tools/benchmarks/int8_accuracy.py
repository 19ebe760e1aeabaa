"""What int8 weights cost in accuracy: held-out perplexity of the demo models, logits of a random one; JSON lines.

    python tools/benchmarks/int8_accuracy.py

The plain reference model in fp32, with the layers' matrices as they are stored and as models/cpu/products.c rounds them
(one scale a row; tests/tools/benchmarks/test_int8.py holds the kernel to the same rounding).
"""

from __future__ import annotations

from pathlib import Path

import torch
from common import say
from laddertron.models import reference
from laddertron.models.config.model_config import from_folder
from laddertron.models.reference import Reference
from laddertron.tools.train import corpus, train
from laddertron.tools.train.build import initialise
from laddertron.tools.train.loss import held_out
from tokenizers import Tokenizer

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CONTEXT = 256


def round_layers(model: Reference) -> None:
    """Every matrix of a layer to 8-bit integers with a scale for each output row, in place."""
    for name, parameter in model.named_parameters():
        if "layers." in name and parameter.ndim == 2:
            weight = parameter.data
            unit = weight.abs().amax(1, keepdim=True) / 127
            parameter.data = (weight / unit.clamp(min=1e-30)).round() * unit


def main() -> None:
    torch.set_grad_enabled(False)
    for name in ("demo-standard", "demo-ladder"):
        model = reference.load(CONFIGS / name)
        tokenizer = Tokenizer.from_file(str(CONFIGS / name / "tokenizer.json"))
        ids = train.encode(tokenizer, corpus.python_documentation(), True)
        before = held_out(model, ids, CONTEXT).perplexity
        round_layers(model)
        after = held_out(model, ids, CONTEXT).perplexity
        say(model=name, tokens=len(ids), stored=round(before, 3), int8=round(after, 3))
    config = from_folder(CONFIGS / "demo-standard")
    model = Reference(config)
    initialise(model, 0)
    drawn = torch.randint(config.vocab_size, (4, 128), generator=torch.Generator().manual_seed(0))
    stored = reference.logits(model, drawn)
    copy = Reference(config)
    copy.load_state_dict(model.state_dict())
    bf16 = reference.logits(copy.to(torch.bfloat16), drawn).float()
    round_layers(model)
    int8 = reference.logits(model, drawn)
    size = stored.std().item()
    off = {"logits_off_by_int8": int8, "logits_off_by_bf16": bf16}
    say(model="random weights", **{name: round((x - stored).std().item() / size, 5) for name, x in off.items()})


if __name__ == "__main__":
    main()
