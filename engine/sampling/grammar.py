"""Structured output through llguidance. A grammar arrives in the library's JSON (engine/openai/structured_output.py),
checked (`GrammarSlots.check`); every rank compiles it for its slot, masks its shard and advances it with each drawn id.
Without the extra (`laddertron[grammar]`) `available` is False and any grammar is a ValueError. No torch.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .grammar_trigger import Position, Trigger, Vocabulary
from .json_schema import located, relaxed

try:
    import llguidance
except ImportError:
    llguidance = None

available = llguidance is not None

MAX_SPEC = 1 << 19
"""Characters of a grammar; the plan that admits a request carries it to every rank."""
MAX_PROTOTYPES = 64
COMPILE_SECONDS, _HELD_SECONDS = 0.5, 4.0
"""Limits on CPU time: to compile one grammar, which delays a step of every request, and for all cached prototypes,
since time is a measure of memory. A prime `multipleOf` of a million takes 5 s and 300 MB, but none of the library's
fuel."""
_TRIAL_IDS, _STRIDE = 16, 7919  # a prime: ids from all over what is allowed
MAX_GBNF_CHARS, MAX_GBNF_RULES = 1 << 16, 1000
"""The library converts GBNF in a time that grows with the square of each."""
MAX_WHITESPACE = 32
"""The most white-space characters in a row where only white space may repeat: small models may emit blanks for ever."""
_PROBES = 64
_SPACES = {"whitespace_flexible", "whitespace_pattern"}
_GBNF_RULE = re.compile(r"^\s*([\w-]+)\s*::=", re.MULTILINE)
_GBNF_TEXT = r'"(?:[^"\\\n]|\\.)*"|\[(?:[^\]\\\n]|\\.)*\]'
_GBNF_TOKEN = re.compile(rf"{_GBNF_TEXT}|#[^\n]*")
_GBNF_NEXT = re.compile(rf"{_GBNF_TEXT}|\s*\n\s*(?![\w-]+\s*::=|\Z)")
_GBNF_TWICE = re.compile(rf"{_GBNF_TEXT}|(?<=[*+?}}])(?=\s*\)\s*[*+?{{])")
_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([^xuUnrt]))")


def validate(spec: str) -> tuple[str, tuple[str, ...]]:
    """The grammar as the library takes it, and what of it is not enforced ("PLACE: KEYWORD"): GBNF becomes lark, and
    JSON schemas lose what only annotates. Raises ValueError, with the place in a schema, if it cannot be used."""
    if len(spec) > MAX_SPEC:
        raise ValueError(f"a grammar of {len(spec)} characters: at most {MAX_SPEC} are allowed")
    tree = _tree(spec)
    notes: list[str] = []
    try:
        for part in _parts(tree):
            if isinstance(schema := part.get("json_schema"), dict):
                part["json_schema"], more = _accepted(schema)
                notes += more
            elif isinstance(lark := part.get("lark_grammar"), str) and _GBNF_RULE.search(lark):
                part["lark_grammar"] = _lark_of(lark)
    except RecursionError as error:
        raise ValueError("the grammar cannot be used: it is nested too deeply") from error
    spec = json.dumps(tree, ensure_ascii=False, separators=(",", ":"))
    if message := _refusal(spec):
        raise ValueError(f"the grammar cannot be used: {message}")
    return spec, tuple(notes)


def _accepted(schema: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The schema as the library accepts it, and what is not enforced. Raises ValueError."""
    given = schema.get("x-guidance")
    guidance = {name: given[name] for name in given if name != "lenient"} if isinstance(given, dict) else {}

    def refusal(schema: dict[str, Any]) -> str:
        return _refusal(json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": guidance}}]}))

    for any_of in (False, True):
        if any_of:
            guidance = {**guidance, "coerce_one_of": True}
        try:
            relaxed_schema, notes = relaxed(schema, _enforces, any_of)
        except ValueError as error:
            raise ValueError(f"the grammar cannot be used: {error}") from None
        if not refusal(relaxed_schema):
            return {**relaxed_schema, "x-guidance": guidance} if guidance else relaxed_schema, notes
    raise ValueError(f"the grammar cannot be used: {located(relaxed_schema, refusal)}")


@lru_cache(256)  # formats are the clients' words
def _enforces(string_format: str) -> bool:
    """Whether the library knows a string format."""
    schema = {"type": "string", "format": string_format}
    return not _refusal(json.dumps({"grammars": [{"json_schema": schema}]}))


def _refusal(spec: str) -> str:
    """The library's reason to refuse a grammar; "" if it accepts it."""
    spec = _with_options(_tree(spec), MAX_WHITESPACE)
    message = library().LLMatcher.validate_grammar(spec, None, limits=_limits())
    return "" if message.startswith("WARNING") else _brief(message)


def _lark_of(gbnf: str) -> str:
    """Converts a GBNF grammar (`root ::= …`). Raises ValueError. Rules may go on in the next line, as vLLM takes
    them; escapes become characters where the library's converter does not know them, and a repetition of a repetition
    one of a sequence."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    names = _GBNF_RULE.findall(_GBNF_TOKEN.sub(lambda match: "" if match[0][0] == "#" else '""', gbnf))
    if len(gbnf) > MAX_GBNF_CHARS or len(names) > MAX_GBNF_RULES:
        most = f"at most {MAX_GBNF_CHARS} and {MAX_GBNF_RULES} are allowed"
        raise ValueError(f"a GBNF grammar of {len(gbnf)} characters and {len(names)} rules: {most}, write it in lark")
    if twice := next((name for name, count in Counter(names).items() if count > 1), ""):
        raise ValueError(f"the grammar cannot be used: rule {twice!r} is defined twice")

    def plain(match: re.Match[str]) -> str:
        text = match[0]
        if text[0] == "#":
            return ""
        return _GBNF_ESCAPE.sub(_character, text) if text[:1] in ('"', "[") else " "

    def separated(match: re.Match[str]) -> str:
        return match[0] or ' ""'

    try:
        return str(gbnf_to_lark(_GBNF_TWICE.sub(separated, _GBNF_NEXT.sub(plain, _GBNF_TOKEN.sub(plain, gbnf)))))
    except Exception as error:  # of a class of its own, or any other: it reads beyond the end
        raise ValueError(f"the grammar cannot be read as GBNF: {_brief(str(error) or repr(error))}") from error


def _character(escape: re.Match[str]) -> str:
    code = int(escape[1] or escape[2] or f"{ord(escape[3]):x}", 16)
    return f"\\x{code:02X}" if code < 128 else chr(code)


def _tree(spec: str) -> Any:
    """Raises ValueError if the spec is not JSON."""
    try:
        return json.loads(spec)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the grammar is not llguidance's JSON: {_brief(str(error))}") from error


def _parts(tree: Any) -> list[dict[str, Any]]:
    parts = tree.get("grammars") if isinstance(tree, dict) else None
    return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []


def _with_options(tree: Any, most: int) -> str:
    """A grammar's JSON with laddertron's white space in each schema that says nothing about it."""
    pattern = rf"[\x20\x0A\x0D\x09]{{1,{most}}}"
    for part in _parts(tree):
        schema = part.get("json_schema")
        if isinstance(schema, dict) and isinstance(given := schema.get("x-guidance", {}), dict):
            spaces = {} if _SPACES & given.keys() else {"whitespace_flexible": True, "whitespace_pattern": pattern}
            schema["x-guidance"] = {**spaces, **given}
    return json.dumps(tree)


def library() -> Any:
    if llguidance is None:
        raise ValueError("structured output needs the llguidance library: install laddertron[grammar]")
    return llguidance


def _limits() -> Any:
    # A fifth of the library's own limit: a nested repetition may cost a step some 50 ms, not a second and 300 MB.
    # Half of its items a row, whose square an ambiguous grammar costs: some 15 ms a step, not 60 for hundreds of steps.
    return library().LLParserLimits(verbose_errors=False, initial_lexer_fuel=200_000, max_items_in_row=1000)


def _brief(message: str) -> str:
    return " ".join(message.split())[:300]


class _Blanks:
    """A tokenizer's white-space tokens, and the most characters of them in a row."""

    def __init__(self, vocabulary: Vocabulary, most: int) -> None:
        self.most, self.tokenizer, self.vocabulary = most, vocabulary.tokenizer, vocabulary

    @property
    def ids(self) -> npt.NDArray[np.bool_]:
        return self.vocabulary.blank

    def run(self, before: int, token: int) -> int:
        """Characters of white space at the end, after one more token."""
        text = self.tokenizer.decode_bytes([token])
        return len(text) - len(text.rstrip()) + (before if text.isspace() else 0)


class GrammarState:
    """One sequence's position in its grammar. A failed matcher (a resource limit of the library) allows nothing."""

    def __init__(
        self,
        matcher: Any,
        blanks: _Blanks | None = None,
        run: int = 0,
        last: int = -1,
        trigger: Trigger | None = None,
        before: Position | None = None,
    ) -> None:
        """run: characters of white space at the end; last: the token before; before: the position before the content,
        None within it."""
        self._matcher, self._blanks, self._run, self._last = matcher, blanks, run, last
        self._trigger, self._before = trigger, before

    def fork(self) -> GrammarState:
        """A copy with the same state, which advances independently."""
        matcher = self._matcher.deep_copy()
        return GrammarState(matcher, self._blanks, self._run, self._last, self._trigger, self._before)

    def _content(self, pending: tuple[int, ...], vocabulary: Vocabulary) -> npt.NDArray[np.bool_]:
        """The tokens that the grammar allows after these of the content, [vocabulary]."""
        content = GrammarState(self._matcher.deep_copy(), self._blanks)
        for token in pending:
            content.advance(token)
        return content.allowed(range(len(vocabulary.raw)))

    @property
    def ended(self) -> bool:
        """Whether nothing but the end may come."""
        return self._before is None and bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def allowed(self, ids: range) -> npt.NDArray[np.bool_]:
        """Which of these global ids may come next, [len(ids)]; after the end the EOS ids alone."""
        matcher = self._matcher
        if matcher.is_error() or len(ids) == 0:
            return np.zeros(len(ids), np.bool_)
        if self._trigger is not None and self._before is not None:
            return self._trigger.allowed(self._before, self._content)[ids.start : ids.stop]
        packed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            return np.zeros(len(ids), np.bool_)
        start = ids.start // 8
        bits = np.unpackbits(packed[start : ids.stop // 8 + 1], bitorder="little")
        out: npt.NDArray[np.bool_] = bits[ids.start - 8 * start :][: len(ids)].astype(np.bool_)
        if self._blanks is not None and self._run >= self._blanks.most:
            blank = self._blanks.ids
            everything = np.unpackbits(packed, bitorder="little")[: len(blank)].astype(np.bool_)
            if self._blanks_alone(np.flatnonzero(everything & ~blank)):
                out &= ~blank[ids.start : ids.stop]
        return out

    def _blanks_alone(self, others: npt.NDArray[np.intp]) -> bool:
        """Whether none of these allowed tokens may repeat between blanks: then white space only separates tokens, and
        is not text as in a string."""
        for other in others[:: len(others) // _PROBES + 1].tolist():
            words = [other, self._last, other, self._last, other]
            if self.accepts(words) == len(words):
                return False
        return len(others) > 0

    def advance(self, token: int) -> None:
        if self._trigger is not None and self._before is not None:
            self._before = self._trigger.step(self._before, token)
            if self._before.phase == "content":
                pending, self._before = self._before.pending, None
                for content in pending:
                    self.advance(content)
            return
        if not (self._matcher.is_stopped() and not self._matcher.is_error()):
            self._matcher.consume_token(token)
            if self._blanks is not None:
                self._run, self._last = self._blanks.run(self._run, token), token

    def accepts(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, in order, the grammar accepts."""
        if self._matcher.is_error() or self._matcher.is_stopped():
            return 0
        if self._before is not None:
            state = self.fork()
            for count, token in enumerate(tokens):
                if not state.allowed(range(token, token + 1))[0]:
                    return count
                state.advance(token)
            return len(tokens)
        return int(self._matcher.validate_tokens(list(tokens)))

    def failure(self) -> str | None:
        """The reason why no token is allowed, or None."""
        return _brief(self._matcher.get_error()) if self._matcher.is_error() else None


class Prototype(NamedTuple):
    """A grammar's matcher in its initial state, the seconds to make it, and what precedes its text."""

    matcher: Any
    seconds: float
    trigger: Trigger | None = None


class Grammars:
    """Structured output by slot; subclasses without state per slot only define `state`."""

    def admit(self, slot: int, spec: str, output: Sequence[int]) -> None:
        """Adds a sequence with grammar `spec` and the output so far (not empty after a preemption). An invalid spec
        allows no token."""

    def release(self, slot: int) -> None: ...

    def state(self, slot: int) -> GrammarState:
        raise NotImplementedError


class NoGrammars(Grammars):
    """The substitute if grammars are unavailable: every sequence's matcher has failed for this reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def state(self, slot: int) -> GrammarState:
        return GrammarState(self)

    def deep_copy(self) -> NoGrammars:
        return self

    def is_error(self) -> bool:
        return True

    def is_stopped(self) -> bool:
        return True

    def consume_token(self, token: int) -> None: ...

    def get_error(self) -> str:
        return self._reason


class GrammarSlots(Grammars):
    """The grammars of one rank's slots. A grammar that allows no token ends only its request, with `failure`."""

    def __init__(
        self,
        tokenizer: Path | str,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        max_whitespace: int = MAX_WHITESPACE,
    ) -> None:
        """`tokenizer`: the path of tokenizer.json, or its text. Raises ValueError if the library is missing or cannot
        read it."""
        options: dict[str, Any] = {"n_vocab": vocab_size}
        if eos_token_ids:
            options["eos_token"] = list(eos_token_ids)
        self.tokenizer = library().LLTokenizer(str(tokenizer), **options)
        self._blanks = _Blanks(Vocabulary(self.tokenizer), max_whitespace)
        self._slots: dict[int, GrammarState] = {}
        self._prototypes: OrderedDict[str, Prototype] = OrderedDict()
        self._checked: OrderedDict[str, tuple[str, tuple[str, ...]]] = OrderedDict()

    def check(self, spec: str) -> tuple[str, tuple[str, ...]]:
        """Checks a client's grammar: `validate`, then a trial of _TRIAL_IDS ids, which detects grammars that allow no
        text or exceed the library's limits for a step. Returns as `validate` does. Raises ValueError."""
        if spec not in self._checked:
            ready = validate(spec)
            self._try(ready[0])
            self._checked[spec] = ready
            if len(self._checked) > MAX_PROTOTYPES:
                self._checked.popitem(last=False)
        return self._checked[spec]

    def _try(self, spec: str) -> None:
        everything, at = range(self.tokenizer.vocab_size), -1
        try:
            self.admit(at, spec, ())
            if (seconds := self._prototypes[spec].seconds) > COMPILE_SECONDS:
                why = f"it takes {seconds:.1f} s to compile, at most {COMPILE_SECONDS:g} s are allowed"
                raise ValueError(f"the grammar cannot be used: {why} (is a multipleOf large?)")
            for step in range(_TRIAL_IDS):
                state = self._slots[at]
                ids = np.flatnonzero(state.allowed(everything))
                if len(ids) == 0:
                    why = state.failure() or ""
                    if not why or why.startswith("NoExtensionBias"):
                        why = f"it allows nothing after {step} tokens (does a rule or a $ref lead back to itself?)"
                    raise ValueError(f"the grammar cannot be used: {why}")
                if state.ended:
                    break
                state.advance(int(ids[step * _STRIDE % len(ids)]))
        except ValueError:
            self._prototypes.pop(spec, None)
            raise
        finally:
            self.release(at)

    def admit(self, slot: int, spec: str, output: Sequence[int]) -> None:
        prototype = self._prototypes.pop(spec, None) or self._compiled(spec)
        self._prototypes[spec] = prototype
        seconds = sum(prototype.seconds for prototype in self._prototypes.values())
        while len(self._prototypes) > MAX_PROTOTYPES or (seconds > _HELD_SECONDS and len(self._prototypes) > 1):
            seconds -= self._prototypes.popitem(last=False)[1].seconds
        trigger = prototype.trigger
        before = None if trigger is None else trigger.first
        state = GrammarState(prototype.matcher.deep_copy(), self._blanks, trigger=trigger, before=before)
        self._slots[slot] = state
        for token in output:
            state.advance(token)

    def _compiled(self, spec: str) -> Prototype:
        began = time.thread_time()
        trigger = None
        with contextlib.suppress(ValueError):  # the library says what is wrong with it, and the matcher is a failed one
            tree = _tree(spec)
            if isinstance(tree, dict) and (preamble := tree.pop("preamble", None)) is not None:
                trigger = Trigger(self._blanks.vocabulary, **preamble)
            spec = _with_options(tree, self._blanks.most)
        matcher = library().LLMatcher(self.tokenizer, spec, log_level=0, limits=_limits())
        return Prototype(matcher, time.thread_time() - began, trigger)

    def release(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def state(self, slot: int) -> GrammarState:
        return self._slots[slot]
