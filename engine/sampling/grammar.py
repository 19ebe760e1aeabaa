"""Structured output through llguidance: the grammars of requests at work on one rank's shard of the logits.

A grammar arrives in the library's own JSON (`{"grammars": [...]}`, made by engine/openai/structured_output.py); the
door has it checked (`GrammarSlots.check`); every rank compiles it for its slot, masks its shard of the logits by it and
advances it with each drawn id. An extra (`laddertron[grammar]`): without it `available` is False and any grammar is a
ValueError that says so. No torch.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
_TRIAL_IDS, _STRIDE = 16, 7919  # a prime: ids from all over what is allowed
_JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}
"""White space between JSON's parts is bounded: small models like to go on with blanks for ever."""


def validate(spec: str) -> None:
    """Raises ValueError with the library's reason if a grammar is too long or cannot be used."""
    if len(spec) > MAX_SPEC:
        raise ValueError(f"a grammar of {len(spec)} characters: at most {MAX_SPEC} are allowed")
    message = _library().LLMatcher.validate_grammar(_with_options(spec), None, limits=_limits())
    if message and not message.startswith("WARNING"):
        raise ValueError(f"the grammar cannot be used: {_brief(message)}")


def _with_options(spec: str) -> str:
    """The spec with our options in each JSON schema that brings none. Raises ValueError if it is not JSON."""
    try:
        tree = json.loads(spec)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the grammar is not llguidance's JSON: {_brief(str(error))}") from error
    parts = tree.get("grammars") if isinstance(tree, dict) else None
    for part in parts if isinstance(parts, list) else []:
        schema = part.get("json_schema") if isinstance(part, dict) else None
        if isinstance(schema, dict):
            schema.setdefault("x-guidance", _JSON_OPTIONS)
    return json.dumps(tree)


def _library() -> Any:
    if llguidance is None:
        raise ValueError("structured output needs the llguidance library: install laddertron[grammar]")
    return llguidance


def _limits() -> Any:
    # A fifth of the library's own limit: a nested repetition may cost a step some 50 ms, not a second and 300 MB.
    # Half of its items a row, whose square an ambiguous grammar costs: some 15 ms a step, not 60 for hundreds of steps.
    return _library().LLParserLimits(verbose_errors=False, initial_lexer_fuel=200_000, max_items_in_row=1000)


def _brief(message: str) -> str:
    return " ".join(message.split())[:300]


class GrammarState:
    """Where one sequence is in its grammar, by a matcher of the library. A failed one (a spec that slipped through the
    door, a resource limit of the library) allows nothing."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fork(self) -> GrammarState:
        """Another one at the same place: this one stays there."""
        return GrammarState(self._matcher.deep_copy())

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
        return out

    def advance(self, token: int) -> None:
        if not (self._matcher.is_stopped() and not self._matcher.is_error()):
            self._matcher.consume_token(token)

    def accepts(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may follow, one behind the other."""
        if self._matcher.is_error() or self._matcher.is_stopped():
            return 0
        return int(self._matcher.validate_tokens(list(tokens)))

    def failure(self) -> str | None:
        """Why nothing may come next, or None if it works."""
        return _brief(self._matcher.get_error()) if self._matcher.is_error() else None


class Grammars:
    """Structured output, by slot; those that keep nothing of a slot have a `state` alone."""

    def admit(self, slot: int, spec: str, output: Sequence[int]) -> None:
        """A sequence of grammar `spec` that has put out `output` so far (more than nothing after a preemption). A spec
        that fails allows nothing."""

    def release(self, slot: int) -> None: ...

    def state(self, slot: int) -> GrammarState:
        raise NotImplementedError


class NoGrammars(Grammars):
    """Stands where grammars cannot be had: a request that wants one all the same ends alone, with the reason. It is
    every sequence's matcher, and a failed one."""

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
    """The grammars of one rank's slots, for the sampler: where one allows nothing, it ends that request alone, with
    `failure`'s words."""

    def __init__(self, tokenizer_folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Raises ValueError if the library is missing or cannot read the folder's tokenizer.json."""
        options: dict[str, Any] = {"n_vocab": vocab_size}
        if eos_token_ids:
            options["eos_token"] = list(eos_token_ids)
        self._tokenizer = _library().LLTokenizer(str(tokenizer_folder / "tokenizer.json"), **options)
        self._slots: dict[int, GrammarState] = {}
        self._prototypes: OrderedDict[str, Any] = OrderedDict()

    def check(self, spec: str) -> None:
        """For the door: `validate`, then a walk of _TRIAL_IDS ids into the grammar, which finds those that allow no
        text, or ask more of a step than the library takes. Raises ValueError."""
        if spec in self._prototypes:
            return
        validate(spec)
        everything, at = range(self._tokenizer.vocab_size), -1
        try:
            self.admit(at, spec, ())
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
        prototype = self._prototypes.pop(spec, None)
        if prototype is None:
            prototype = _library().LLMatcher(self._tokenizer, self._options(spec), log_level=0, limits=_limits())
        self._prototypes[spec] = prototype
        if len(self._prototypes) > MAX_PROTOTYPES:
            self._prototypes.popitem(last=False)
        state = self._slots[slot] = GrammarState(prototype.deep_copy())
        for token in output:
            state.advance(token)

    @staticmethod
    def _options(spec: str) -> str:
        try:
            return _with_options(spec)
        except ValueError:
            return spec  # the library says what is wrong with it, and the matcher is a failed one

    def release(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def state(self, slot: int) -> GrammarState:
        return self._slots[slot]
