"""A small, honest training loop on models/reference.py: AdamW, warm-up and cosine, held-out perplexity, and a
checkpoint folder in Hugging Face's form that declares its wiring. Called by `laddertron train`.

Knows one process and whole tensors. Same settings, seed, corpus, torch and thread count give the same weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from .config import Dtype, ModelConfig
from .corpus import BOS, CHAT_TEMPLATE, END, EOS, Document
from .reference import Reference


@dataclass(frozen=True, slots=True)
class Settings:
    """How to train. `tokens` is the budget: tokens predicted in all; `warmup` the share of steps that warms up."""

    tokens: int
    batch: int = 4
    context: int = 256
    learning_rate: float = 5e-3
    warmup: float = 0.05
    weight_decay: float = 0.1
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    save_dtype: Dtype = "bfloat16"

    @property
    def steps(self) -> int:
        return max(1, self.tokens // (self.batch * self.context))


@dataclass(frozen=True, slots=True)
class Progress:
    """After a step: the mean loss of a token in it (nats) and the learning rate it took."""

    step: int
    steps: int
    loss: float
    learning_rate: float


@dataclass(frozen=True, slots=True)
class Trained:
    """The outcome. Perplexity is exp of the mean loss a held-out token has under the weights as they are saved."""

    model: Reference
    train_tokens: int
    held_out_tokens: int
    held_out_perplexity: float


def learning_rate(settings: Settings, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth of the peak; step counts from 0."""
    warm = max(1, round(settings.warmup * settings.steps))
    if step < warm:
        return settings.learning_rate * (step + 1) / warm
    way = (step - warm) / max(1, settings.steps - warm)
    return settings.learning_rate * (0.55 + 0.45 * math.cos(math.pi * way))


def encode(tokenizer: Tokenizer, documents: Sequence[Document], held_out: bool) -> Tensor:
    """All renderings on one side of the split, one after the other, [N] int64."""
    texts = [text for document in documents if document.held_out is held_out for text in document.renderings]
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    return torch.tensor([i for encoding in encodings for i in encoding.ids], dtype=torch.int64)


def initialise(model: Reference, seed: int) -> None:
    """Normal weights of deviation 0.5 / sqrt(D); what writes to the residual is smaller by sqrt of how often it is
    written to. Every wiring draws the same numbers for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    deviation = 0.5 / math.sqrt(model.config.hidden_size)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.ndim == 2:
            writes = name.endswith(("o_proj.weight", "down_proj.weight"))
            scale = deviation / math.sqrt(2 * model.config.num_layers) if writes else deviation
            nn.init.normal_(parameter, std=scale, generator=generator)


def _batches(ids_N: Tensor, settings: Settings) -> Callable[[int], Tensor]:
    """step -> [batch, context + 1]; each epoch cuts the text at a new offset and shuffles the pieces."""
    window = settings.context
    per_epoch = (len(ids_N) - window - 1) // window // settings.batch
    if per_epoch < 1:
        needed = window * (settings.batch + 1) + 1
        raise ValueError(
            f"the text has {len(ids_N)} tokens, a step needs {needed}: use more text, or less batch or context"
        )

    def batch(step: int) -> Tensor:
        epoch, place = divmod(step, per_epoch)
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + epoch)
        offset = int(torch.randint(window, (1,), generator=generator))
        order = torch.randperm((len(ids_N) - offset - 1) // window, generator=generator)
        starts = order[place * settings.batch : (place + 1) * settings.batch] * window + offset
        return ids_N[starts[:, None] + torch.arange(window + 1)]

    return batch


def _loss(model: Reference, ids: Tensor, reduction: str) -> Tensor:
    logits_BTV: Tensor = model(ids[:, :-1])
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def perplexity(model: Reference, ids_N: Tensor, context: int) -> float:
    """exp(mean loss) over every token but the first, read in pieces of `context` that do not overlap."""
    total = 0.0
    for start in range(0, len(ids_N) - 1, context):
        total += float(_loss(model, ids_N[None, start : start + context + 1], "sum"))
    return math.exp(total / (len(ids_N) - 1))


def train(
    config: ModelConfig,
    settings: Settings,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    on_step: Callable[[Progress], None] = lambda progress: None,
) -> Trained:
    """Trains from scratch. Raises ValueError if the text is too short, FloatingPointError if the loss is lost."""
    ids_N, held_out_N = encode(tokenizer, documents, False), encode(tokenizer, documents, True)
    if len(held_out_N) < 2:
        raise ValueError("the text is too short to hold any of it out; give more of it")
    model = Reference(config)
    initialise(model, settings.seed)
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=True,
    )
    batch = _batches(ids_N, settings)
    for step in range(settings.steps):
        rate = learning_rate(settings, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.dtype == "bfloat16"):
            loss = _loss(model, batch(step), "mean")
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if not math.isfinite(value := loss.item()):
            raise FloatingPointError(f"loss {value} at step {step}: use a smaller learning rate than {rate:g}")
        on_step(Progress(step + 1, settings.steps, value, rate))
    model.to(getattr(torch, settings.save_dtype)).float().eval()
    result = perplexity(model, held_out_N, settings.context)
    return Trained(model, settings.steps * settings.batch * settings.context, len(held_out_N), result)


def _config_json(config: ModelConfig, settings: Settings, bos: int, eos: list[int]) -> dict[str, Any]:
    wiring = config.wiring
    declared: dict[str, Any] = {"kind": "desync" if wiring.desync_every else wiring.name}
    if wiring.desync_every:
        declared |= {"every": wiring.desync_every, "tensor_parallel_size": wiring.trained_tp}
    elif wiring.name == "hybrid":
        declared["ladder_layers"] = [i for i, kind in enumerate(wiring.kinds) if kind == "ladder"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "laddertron_wiring": declared,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": settings.save_dtype,
        "bos_token_id": bos,
        "eos_token_id": eos,
    }


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save(folder: Path, trained: Trained, settings: Settings, tokenizer: Tokenizer, about: dict[str, Any]) -> None:
    """The model as a Hugging Face folder of a Llama that declares its wiring; `about` (what it was trained on) goes
    into training.json beside the settings and the outcome."""
    folder.mkdir(parents=True, exist_ok=True)
    model, dtype = trained.model, getattr(torch, settings.save_dtype)
    tensors = {name: tensor.detach().to(dtype).contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    bos, *eos = (tokenizer.encode(token, add_special_tokens=False).ids[0] for token in (BOS, EOS, END))
    _write_json(folder / "config.json", _config_json(model.config, settings, bos, eos))
    _write_json(folder / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos, "do_sample": False})
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    words = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": model.config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", words)
    outcome = {key: getattr(trained, key) for key in ("train_tokens", "held_out_tokens", "held_out_perplexity")}
    _write_json(folder / "training.json", {**about, "settings": asdict(settings), **outcome})
