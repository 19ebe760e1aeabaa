"""Folders as publishers write them, without tokenizer.json (tiktoken's ranks) or without a Jinja template."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from laddertron.engine.text.chat_template import ChatOptions
from laddertron.engine.text.rank_file import KIMI
from laddertron.engine.text.tokenizer import TextError, TextModel
from tiny_text import byte_level, write_folder

MARKS = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|tool_call_begin|>")
LETTERS = (
    *(
        "the ",
        "isn't",
        "THE",
        "Straße ",
        "ſ",
        "x",
        "==",
        "aaaa",
        "0",
        "12345",
        " ",
        "\n",
        "\r\n",
        "\t",
        "\u3000",
        "\x85",
    ),
    *(
        "日本語",
        "こんにちは",
        "Привет ",
        "مرحبا",
        "नमस्ते",
        "한국어",
        "👩‍👩‍👧",
        "é",
        "e\u0301",
        "'S",
        "’ll",
        "_",
        "{",
        "\u2028",
    ),
)


def trained_ranks(rng: random.Random, count: int) -> dict[bytes, int]:
    """Ranks by merging pairs of tokens at random, so that a token can be made of several pairs."""
    tokens = [bytes([byte]) for byte in range(256)]
    texts = [text.encode() for text in (*LETTERS, " " * 40, "a" * 40, "the the isn't", "こんにちは日本")]
    while len(tokens) < count:
        text = rng.choice(texts)
        at = rng.randrange(len(text))
        token = text[at : at + rng.randint(2, 9)]
        parts = any(token[:cut] in tokens and token[cut:] in tokens for cut in range(1, len(token)))
        if parts and token not in tokens:
            tokens.append(token)
    return {token: rank for rank, token in enumerate(tokens)}


def write_ranks(folder: Path, ranks: dict[bytes, int], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    added = {str(len(ranks) + i): {"content": mark, "special": i < 4} for i, mark in enumerate(MARKS)}
    settings = {
        "added_tokens_decoder": added,
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "chat_template": "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% endfor %}",
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_ranks_give_the_ids_of_tiktoken(tmp_path: Path, run_seed: int) -> None:
    """On random text of many scripts, long runs and special tokens; ids decode to the text."""
    rng = random.Random(run_seed)
    ranks = trained_ranks(rng, 700)
    model = TextModel.from_folder(write_ranks(tmp_path, ranks))
    reserved = {f"<|reserved_token_{i}|>": i for i in range(len(ranks) + len(MARKS), len(ranks) + 256)}
    named = {mark: len(ranks) + i for i, mark in enumerate(MARKS)}
    oracle = tiktoken.Encoding("kimi", pat_str=KIMI, mergeable_ranks=ranks, special_tokens={**named, **reserved})
    runs = (" " * 700, "a" * 300, "=" * 99, "\n" * 50, "这" * 40, "<|reserved_token_961|>", *MARKS)
    for _ in range(400):
        text = "".join(rng.choice(rng.choice((LETTERS, runs))) for _ in range(rng.randint(1, 20)))
        text += "".join(chr(rng.choice((rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)))) for _ in range(4))
        ids = model.encode(text)
        assert ids == oracle.encode(text, allowed_special="all")
        assert model.decode(ids, skip_special=False) == text
    assert model.vocab_size == oracle.n_vocab
    assert (model.bos_id, model.eos_ids) == (len(ranks), (len(ranks) + 1,))


def test_a_chat_and_its_grammar_are_served_from_ranks(tmp_path: Path, run_seed: int) -> None:
    pytest.importorskip("llguidance")
    from laddertron.engine.step.build import make_grammars  # torch

    ranks = trained_ranks(random.Random(run_seed), 300)
    model = TextModel.from_folder(write_ranks(tmp_path, ranks))
    start, end = len(ranks) + 3, len(ranks) + 2
    assert model.encode_chat([{"role": "user", "content": "x"}]) == [start, *model.encode("x"), end]

    class Config:
        vocab_size, eos_token_ids = model.vocab_size, (end,)

    config: Any = Config()
    grammars: Any = make_grammars(tmp_path, config)
    grammars.check(json.dumps({"grammars": [{"json_schema": {"type": "integer"}}]}))


@pytest.mark.parametrize("fault", ["gap", "byte", "text", "id", "twice", "class"])
def test_ranks_that_cannot_be_read_exactly_are_refused(tmp_path: Path, fault: str) -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}
    config: dict[str, Any] = {}
    match fault:
        case "gap":
            ranks[b"ab"] = 257
        case "byte":
            del ranks[b"\xff"]
        case "id":
            config = {"added_tokens_decoder": {"9": {"content": "[BOS]"}}}
        case "twice":
            config = {"added_tokens_decoder": {"256": {"content": "[A]"}, "257": {"content": "[A]"}}}
        case "class":
            config = {"auto_map": {}}
    write_ranks(tmp_path, ranks, **config)
    if fault == "text":
        (tmp_path / "tiktoken.model").write_bytes(b"not ranks\n")
    with pytest.raises(TextError, match=r"save_pretrained" if fault == "class" else r"tiktoken\.model cannot be read"):
        TextModel.from_folder(tmp_path)


# DeepSeek-V3.2

BOS, EOS, USER, ANSWER = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}
CALLS = (
    '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get">\n<｜DSML｜parameter name="city"'
    ' string="true">Ulm</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">[1, null]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="get">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)


@pytest.fixture
def deepseek(tmp_path: Path) -> TextModel:
    write_folder(tmp_path, byte_level(), None)
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v32"}')
    return TextModel.from_folder(tmp_path)


def thinking(on: bool, *tools: dict[str, Any]) -> ChatOptions:
    return ChatOptions(variables={"thinking": on, "tools": list(tools) or None})


def test_deepseek_v32_is_written_as_its_publisher_documents(deepseek: TextModel) -> None:
    """Reasoning is open after the last question only; the marks of turns, calls and results."""
    hello: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Hi.", "reasoning_content": "zq"},
        {"role": "user", "content": "hello"},
    ]
    head = f"{BOS}Be brief.{USER}hello{ANSWER}</think>Hi.{EOS}{USER}hello{ANSWER}"
    assert deepseek.render(hello, thinking(True)) == head + "<think>"
    assert deepseek.render(hello, thinking(False)) == head + "</think>"
    assert deepseek.render(hello) == head + "</think>"
    calls: list[dict[str, Any]] = [
        {"id": "a", "type": "function", "function": {"name": "get", "arguments": '{"city": "Ulm", "days": [1, null]}'}},
        {"id": "b", "type": "function", "function": {"name": "get", "arguments": "{}"}},
    ]
    turn: list[dict[str, Any]] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "reasoning_content": "why", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
    ]
    results = "\n\n<function_results>\n<result>1</result>\n<result>2</result>\n</function_results>\n\n"
    asked = deepseek.render(turn, thinking(True, TOOL))
    assert asked.endswith(f"{USER}q{ANSWER}<think>why</think>{CALLS}{EOS}{results}<think>")
    assert asked.startswith(f"{BOS}\n\n## Tools\n")
    assert json.dumps(TOOL["function"]) in asked
    assert deepseek.render(turn, thinking(False)) == f"{BOS}{USER}q{ANSWER}</think>{CALLS}{EOS}{results}</think>"


def test_probes_find_the_formats_of_deepseek_v32(deepseek: TextModel) -> None:
    chat = deepseek.chat
    assert (chat.tool_format, chat.reasoning, chat.lost, chat.refused) == ("deepseek_v32", "think", (), ())


def test_a_template_in_the_folder_comes_first(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v32"}')
    assert "<|user|>" in TextModel.from_folder(tmp_path).render([{"role": "user", "content": "a"}])
