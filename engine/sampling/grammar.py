"""Structured output through llguidance. A grammar arrives in the library's JSON (engine/openai/structured_output.py),
checked (`GrammarSlots.check`); every rank compiles it for its slot, masks its shard and advances it with each drawn id.
Without the extra (`laddertron[grammar]`) `available` is False and any grammar is a ValueError. No torch.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

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
MAX_WHITESPACE = 32
"""The most white-space characters in a row where only white space may repeat: small models may emit blanks for ever."""
_PROBES = 64


def validate(spec: str) -> None:
    """Raises ValueError with the library's reason if a grammar is too long or cannot be used."""
    if len(spec) > MAX_SPEC:
        raise ValueError(f"a grammar of {len(spec)} characters: at most {MAX_SPEC} are allowed")
    message = library().LLMatcher.validate_grammar(_with_options(spec, MAX_WHITESPACE), None, limits=_limits())
    if message and not message.startswith("WARNING"):
        raise ValueError(f"the grammar cannot be used: {_brief(message)}")


def _with_options(spec: str, most: int) -> str:
    """Adds laddertron's options to each JSON schema without options. Raises ValueError if the spec is not JSON."""
    try:
        tree = json.loads(spec)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the grammar is not llguidance's JSON: {_brief(str(error))}") from error
    parts = tree.get("grammars") if isinstance(tree, dict) else None
    for part in parts if isinstance(parts, list) else []:
        schema = part.get("json_schema") if isinstance(part, dict) else None
        if isinstance(schema, dict):
            pattern = rf"[\x20\x0A\x0D\x09]{{1,{most}}}"
            schema.setdefault("x-guidance", {"whitespace_flexible": True, "whitespace_pattern": pattern})
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

    def __init__(self, tokenizer: Any, most: int) -> None:
        self.most, self.tokenizer = most, tokenizer

    @cached_property
    def ids(self) -> npt.NDArray[np.bool_]:
        """Mask of tokens that consist of white space, [vocabulary]."""
        count = self.tokenizer.vocab_size
        return np.array([self.tokenizer.decode_bytes([token]).isspace() for token in range(count)])

    def run(self, before: int, token: int) -> int:
        """Characters of white space at the end, after one more token."""
        text = self.tokenizer.decode_bytes([token])
        return len(text) - len(text.rstrip()) + (before if text.isspace() else 0)


class GrammarState:
    """One sequence's position in its grammar. A failed matcher (a resource limit of the library) allows nothing."""

    def __init__(self, matcher: Any, blanks: _Blanks | None = None, run: int = 0, last: int = -1) -> None:
        """run: characters of white space at the end; last: the token before."""
        self._matcher, self._blanks, self._run, self._last = matcher, blanks, run, last

    def fork(self) -> GrammarState:
        """A copy with the same state, which advances independently."""
        return GrammarState(self._matcher.deep_copy(), self._blanks, self._run, self._last)

    @property
    def ended(self) -> bool:
        return bool(self._matcher.is_stopped())

    def allowed(self, ids: range) -> npt.NDArray[np.bool_]:
        """Which of these global ids may come next, [len(ids)]; after the end the EOS ids alone."""
        matcher = self._matcher
        if matcher.is_error() or len(ids) == 0:
            return np.zeros(len(ids), np.bool_)
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
        if not (self._matcher.is_stopped() and not self._matcher.is_error()):
            self._matcher.consume_token(token)
            if self._blanks is not None:
                self._run, self._last = self._blanks.run(self._run, token), token

    def accepts(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, in order, the grammar accepts."""
        if self._matcher.is_error() or self._matcher.is_stopped():
            return 0
        return int(self._matcher.validate_tokens(list(tokens)))

    def failure(self) -> str | None:
        """The reason why no token is allowed, or None."""
        return _brief(self._matcher.get_error()) if self._matcher.is_error() else None


class Prototype(NamedTuple):
    """A grammar's matcher in its initial state, and the seconds to make it."""

    matcher: Any
    seconds: float


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
        self._blanks = _Blanks(self.tokenizer, max_whitespace)
        self._slots: dict[int, GrammarState] = {}
        self._prototypes: OrderedDict[str, Prototype] = OrderedDict()

    def check(self, spec: str) -> None:
        """Checks a client's grammar: `validate`, then a trial of _TRIAL_IDS ids, which detects grammars that allow no
        text or exceed the library's limits for a step. Raises ValueError."""
        if spec in self._prototypes:
            return
        validate(spec)
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
        state = self._slots[slot] = GrammarState(prototype.matcher.deep_copy(), self._blanks)
        for token in output:
            state.advance(token)

    def _compiled(self, spec: str) -> Prototype:
        began = time.thread_time()
        matcher = library().LLMatcher(self.tokenizer, self._options(spec), log_level=0, limits=_limits())
        return Prototype(matcher, time.thread_time() - began)

    def _options(self, spec: str) -> str:
        try:
            return _with_options(spec, self._blanks.most)
        except ValueError:
            return spec  # the library says what is wrong with it, and the matcher is a failed one

    def release(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def state(self, slot: int) -> GrammarState:
        return self._slots[slot]
