"""A checkpoint folder's text files, small: tokenizers of the kinds the supported families use, and a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

CHAT = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BYTES = pre_tokenizers.ByteLevel.alphabet


def byte_level() -> Tokenizer:
    """Byte-level BPE (Llama 3, Qwen): 256 bytes, a few merges, special tokens, a BOS by post-processor."""
    words = ["<s>", "</s>", *sorted(BYTES()), "Ġt", "Ġth", "Ġthe", "an", "and", "ing"]
    merges = [("Ġ", "t"), ("Ġt", "h"), ("Ġth", "e"), ("a", "n"), ("an", "d")]
    vocab = {word: i for i, word in enumerate(w for w in words if w != "ing")}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>", "<|end|>")])
    tokenizer.add_special_tokens([AddedToken(f"<|{r}|>", special=True) for r in ("system", "user", "assistant")])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    return tokenizer


def byte_fallback() -> Tokenizer:
    """SentencePiece-like BPE with byte fallback (Llama 2, Mistral)."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *[f"<0x{b:02X}>" for b in range(256)],
        "▁",
        *"abcdefghijklmnopqrstuvwxyz",
        "é",
        "▁t",
    ]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "t")], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def unprefixed() -> Tokenizer:
    """The same without a space before each text."""
    tokenizer = byte_fallback()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def metaspace() -> Tokenizer:
    """A decoder that is not written out in engine/text/detokenizer.py."""
    words = ["<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz", "▁t", "th"]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[("▁", "t"), ("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer | None = None, template: Any = CHAT, **config: Any) -> Path:
    """tokenizer.json and tokenizer_config.json under `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_level()).save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast", **config}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
