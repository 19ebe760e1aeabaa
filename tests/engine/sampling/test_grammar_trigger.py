"""Where a grammar begins: every mask against the definition by text, for marks as text and as special tokens, opened by
the prompt or not, with calls or none; and what was drawn, read back by the parser of answers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from laddertron.engine.sampling import grammar
from laddertron.engine.sampling.grammar_trigger import MOST_BLANKS
from laddertron.engine.text.chat_formats import CHANNEL_MARKS, REASONING_FORMATS, TOOL_FORMATS, call_marks
from laddertron.engine.text.chat_parts import ChatParts, message_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

pytestmark = pytest.mark.skipif(not grammar.available, reason="llguidance is not installed: laddertron[grammar]")

CHOICES = [b'{"name": 1}', b"[2]", b"{}", b"<x>", b" z"]
LARK = '%llguidance {"no_forcing": true}\nstart: ' + " | ".join(json.dumps(choice.decode()) for choice in CHOICES)
GRAMMAR = json.dumps({"grammars": [{"lark_grammar": LARK}]})
TOOL = "sky"


class Case:
    """A tokenizer whose marks are special tokens or pieces of text, and a preamble."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.reasoning = rng.choice([None, *REASONING_FORMATS])
        self.thinking = self.reasoning is not None and rng.random() < 0.5
        self.format = rng.choice([None, *(name for name in TOOL_FORMATS if name != "array")])
        calls = [] if self.format is None else call_marks(self.format, [TOOL])
        marks = list(REASONING_FORMATS[self.reasoning]) if self.reasoning else []
        self.open, self.close = (mark.encode() for mark in marks or ("", ""))
        self.calls = tuple(call.encode() for call in calls)
        self.special = [mark for mark in (*marks, *calls) if rng.random() < 0.5 and not mark.startswith("{")]
        if self.special and "gpt_oss" in (self.reasoning, self.format):  # its marks are several tokens
            self.special = [*{*CHANNEL_MARKS, *(mark for mark in self.special if "<|" not in mark)}]
        encoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        texts = [*marks, *calls, *(choice.decode() for choice in CHOICES), "\n\n", " \n", ">\n", ">x", "so "]
        for _ in range(60):
            text = rng.choice(texts) + rng.choice(["", "", *texts])
            start = rng.randrange(len(text))
            vocab.setdefault(encoder.pre_tokenize_str(text[start : start + rng.randint(1, 9)])[0][0], len(vocab))
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer, tokenizer.decoder = encoder, decoders.ByteLevel()
        tokenizer.add_special_tokens(["<eos>", "<other>", *self.special])
        tokenizer.save(str(folder / "tokenizer.json"))
        self.eos, self.other = (int(tokenizer.token_to_id(name) or 0) for name in ("<eos>", "<other>"))
        self.slots = grammar.GrammarSlots(folder / "tokenizer.json", tokenizer.get_vocab_size(), (self.eos,))
        self.words = [self.slots.tokenizer.decode_bytes([i]) for i in range(tokenizer.get_vocab_size())]
        preamble = {"reasoning": marks or None, "thinking": self.thinking, "calls": calls}
        self.spec = f'{{"preamble":{json.dumps(preamble)},{GRAMMAR[1:]}'

    def read(self, text: bytes) -> tuple[str, bytes]:
        """The definition: what an answer's text is so far, and the part of it that is compared with the grammar."""
        begun = text.lstrip() if self.reasoning and not self.thinking else text
        reasons = self.thinking or (self.reasoning is not None and begun.startswith(self.open))
        if reasons:
            before, mark, rest = (text if self.thinking else begun[len(self.open) :]).partition(self.close)
            if not mark:
                return "called" if any(call in before for call in self.calls) else "reasoning", b""
            rest = rest.lstrip(b"\n")
            return ("call" if rest.startswith(self.calls) and self.calls else "after"), rest
        return ("call" if begun.startswith(self.calls) and self.calls else "begin"), text

    def allows(self, text: bytes, token: int) -> bool:
        """Whether a token may follow a text."""
        phase, content = self.read(text)
        word, reasons = self.words[token], phase in ("reasoning", "called")
        if token == self.eos:
            return phase in ("call", "called") or (not reasons and content in CHOICES)
        if token == self.other or not word:
            return reasons or phase == "call"
        after, rest = self.read(text + word)
        if reasons:  # content begins with a token
            return not rest
        if phase == "after" and not content and word.startswith(b"\n"):
            return not word.strip(b"\n")
        if after in ("reasoning", "called", "call"):
            return True
        lead = rest.lstrip() if self.reasoning and after == "begin" else rest
        marks = (*self.calls, *((self.open,) if self.reasoning and after == "begin" else ()))
        mixed = lead != rest and lead and not text.strip() and word.strip()  # no mark in a token with white space
        toward = any(mark.startswith(lead) for mark in marks) and not (mixed and word[:1].isspace())
        return toward or any(choice.startswith(rest) for choice in CHOICES)


@pytest.mark.parametrize("seed", range(24))
def test_every_mask_is_that_of_the_definition(tmp_path: Path, seed: int) -> None:
    case, rng = Case(tmp_path, seed), random.Random(seed)
    for walk in range(12):
        case.slots.admit(0, case.spec, ())
        state, ids, text = case.slots.state(0), list[int](), b""
        while True:
            mask = state.allowed(range(len(case.words)))
            blanks = len(text) - len(text.lstrip())
            breaks = case.read(text)[0] == "after" and text.endswith(b"\n" * MOST_BLANKS)
            if blanks < MOST_BLANKS and not breaks:
                wrong = [
                    (token, case.words[token], bool(mask[token]))
                    for token in range(len(case.words))
                    if case.allows(text, token) != mask[token]
                ]
                assert not wrong, (seed, case.reasoning, case.thinking, case.format, case.special, text, wrong)
            options = np.flatnonzero(mask).tolist()
            assert options, (seed, text)
            assert state.accepts([options[0]]) == (options[0] != case.eos or case.read(text)[0] in ("call", "called"))
            if walk % 3 == 0:  # as after a preemption, and as drafts see it
                case.slots.admit(0, case.spec, ids)
                assert (case.slots.state(0).allowed(range(len(case.words))) == mask).all()
                state = state.fork()
            phase, content = case.read(text)
            aims = [case.close] if phase in ("reasoning", "called") else [case.open, *case.calls, *CHOICES, b"\n"]
            near = [t for t in options if any(aim[len(content) :].startswith(case.words[t]) for aim in aims if aim)]
            ends = mask[case.eos] and (len(ids) > 60 or rng.random() < 0.3)
            token = case.eos if ends else rng.choice(near or options)
            if len(ids) > 90 and phase in ("reasoning", "called", "call"):
                break
            if token == case.eos:
                _check_parsed(case, text)
                break
            state.advance(token)
            ids.append(token)
            text += b"" if token == case.other else case.words[token]


def _check_parsed(case: Case, text: bytes) -> None:
    """The parser's content is a text of the grammar, or the answer is a call."""
    phase, content = case.read(text)
    types: dict[str, Any] = {TOOL: {}}
    tools = types if case.format else {}
    parser = ChatParts(lambda n: f"c{n}", case.format, tools, reasoning=case.reasoning, thinking=case.thinking)
    message = message_of(parser.push(text.decode(errors="replace"), last=True))
    if phase in ("after", "begin"):
        assert content in CHOICES
        assert (message["content"] or "").encode() == content, (case.reasoning, case.format, text)
