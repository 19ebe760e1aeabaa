"""Small models from scratch, on text with the special tokens of tools/train/corpus.py: the loop of fit.py, held-out
perplexity, and a checkpoint folder that declares its wiring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from ...models.config.dialects import stock_json
from ...models.config.model_config import ModelConfig
from ...models.reference import Reference
from ...models.weights.convert import write_json
from .build import CPU, build, initialise
from .corpus import BOS, CHAT_TEMPLATE, END, EOS, SPECIAL_TOKENS, Document
from .export import export
from .fit import Saving, Settings, TrainProgress, fit
from .loss import held_out
from .tokens import Batches


@dataclass(frozen=True, slots=True)
class Trained:
    """The outcome. Perplexity is exp of the mean loss a held-out token has under the weights as they are saved;
    agreement how often a teacher would say the same."""

    model: Reference
    train_tokens: int
    held_out_tokens: int
    held_out_perplexity: float
    agreement: float | None = None


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The id of each special token that texts and chat template spell out. Raises ValueError for a tokenizer that
    cuts one of them into pieces."""
    ids_of = {token: tokenizer.encode(token, add_special_tokens=False).ids for token in SPECIAL_TOKENS}
    if unknown := [token for token, ids in ids_of.items() if len(ids) != 1]:
        raise ValueError(
            f"the tokenizer has no token {', '.join(unknown)}, which marks where texts and turns begin and end: take "
            "the tokenizer of a model that `laddertron train` made, or leave --tokenizer out to train a new one"
        )
    return {token: ids[0] for token, ids in ids_of.items()}


def encode(tokenizer: Tokenizer, documents: Sequence[Document], held_out: bool) -> np.ndarray:
    """All renderings on one side of the split, one after the other, [N] uint32."""
    texts = [text for document in documents if document.held_out is held_out for text in document.renderings]
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    return np.array([i for encoding in encodings for i in encoding.ids], dtype=np.uint32)


def train(
    config: ModelConfig,
    settings: Settings,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    on_step: Callable[[TrainProgress], None] = lambda progress: None,
    device: torch.device = CPU,
    saving: Saving | None = None,
    teacher: Reference | None = None,
) -> Trained:
    """Trains from scratch, with a teacher's share of the loss as settings.distil says. Raises ValueError if the text is
    too short or the tokenizer lacks the special tokens, FloatingPointError if the loss is lost."""
    special_ids(tokenizer)
    ids_N, held_out_N = encode(tokenizer, documents, False), encode(tokenizer, documents, True)
    if len(held_out_N) < 2:
        raise ValueError("the text is too short to hold any of it out; give more of it")
    batches = Batches(ids_N, settings.batch, settings.context, settings.seed)
    model = build(config, device)
    initialise(model, settings.seed)
    fit(model, batches, settings, teacher, saving, on_step)
    evaluation = held_out(model.eval(), held_out_N, settings.context, teacher)
    tokens = settings.steps * settings.batch * settings.context
    return Trained(model, tokens, len(held_out_N), evaluation.perplexity, evaluation.agreement)


def save(folder: Path, trained: Trained, settings: Settings, tokenizer: Tokenizer, about: dict[str, Any]) -> None:
    """The model as a Hugging Face folder of a Llama that declares its wiring; `about` (what it was trained on) goes
    into training.json with the settings and the outcome."""
    folder.mkdir(parents=True, exist_ok=True)
    bos, *eos = map(special_ids(tokenizer).__getitem__, (BOS, EOS, END))
    stock = stock_json(trained.model.config, {"bos_token_id": bos, "eos_token_id": eos})
    export(folder, trained.model, settings.save_dtype, stock)
    write_json(folder / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos, "do_sample": False})
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    words = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": trained.model.config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", words)
    names = ("train_tokens", "held_out_tokens", "held_out_perplexity", "agreement")
    outcome = {name: getattr(trained, name) for name in names}
    write_json(folder / "training.json", {**about, "settings": asdict(settings), **outcome})
