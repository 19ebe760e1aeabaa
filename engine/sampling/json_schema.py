"""Prepares a client's JSON schema for the grammar library: removes what only annotates, names what is not enforced, and
finds the keyword for which the library refuses a schema. Pure: the library is called through the given functions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any
from urllib.parse import urljoin

Steps = tuple[str | int, ...]
Reason = Callable[[dict[str, Any]], str]
"""Why the library refuses a schema; "" if it does not."""
MAX_FACTOR = 50_000
"""Of a multipleOf, powers of 2 and 5 apart: the library's automaton has so many states."""
_HALF_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\\Z")
MAX_TRIALS = 200
"""Schemas that are compiled to find the keyword of an error."""

_DIALECT = re.compile(r"https?://json-schema\.org/draft[-/](0[467]|20\d\d-\d\d)\b")
_SCHEMA_KEYS = (
    "additionalItems additionalProperties contains contentSchema else if items not propertyNames then "
    "unevaluatedItems unevaluatedProperties"
)
_OTHER_KEYS = (
    "$anchor $comment $dynamicAnchor $dynamicRef $id $recursiveAnchor $recursiveRef $ref $schema $vocabulary const "
    "contentEncoding contentMediaType default dependentRequired deprecated description enum example examples "
    "exclusiveMaximum exclusiveMinimum format id maxContains maxItems maxLength maxProperties maximum minContains "
    "minItems minLength minProperties minimum multipleOf pattern readOnly required title type uniqueItems writeOnly"
)
_ONE = frozenset(_SCHEMA_KEYS.split())
_MANY = frozenset(("allOf", "anyOf", "items", "oneOf", "prefixItems"))
_NAMED = frozenset(("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"))
_DEFINITIONS = ("$defs", "definitions")
_APPLICATORS = _ONE | _MANY | _NAMED
_KNOWN = _APPLICATORS.union(_OTHER_KEYS.split())
_NO_DEMAND: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "not": (False,),
    "propertyNames": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
}
"""Values with which these keywords allow everything."""


def relaxed(schema: Any, is_enforced: Callable[[str], bool], any_of: bool = False) -> tuple[Any, tuple[str, ...]]:
    """The schema without annotations that the library takes for demands, and what of it is not enforced: "PLACE:
    KEYWORD". `is_enforced`: whether the library knows a string format; `any_of`: whether it takes oneOf for anyOf.
    Raises ValueError for what the library would accept in another meaning, or compile for seconds."""
    notes: list[str] = []
    named: dict[str, tuple[str, Any]] = {}  # the place and the schema of each identifier

    def walk(node: Any, place: str, base: str = "") -> Any:
        if not isinstance(node, dict):
            return node
        out: dict[str, Any] = {}
        for key in ("$id", "$anchor"):
            if isinstance(own := node.get(key), str):
                identifier = urljoin(base, f"#{own}" if key == "$anchor" else own)
                first, other = named.setdefault(identifier, (place, node))
                if other is not node and other != node:
                    raise ValueError(f"{place}: {key}: {first} has {own!r} too, with another schema: rename one")
                base = base if identifier.startswith(f"{base}#") else identifier
        for key, value in node.items():
            if any(type(value) is type(free) and value == free for free in _NO_DEMAND.get(key, ())):
                continue
            if key == "$schema" and not (isinstance(value, str) and _DIALECT.match(value)):
                continue
            if key == "pattern" and isinstance(value, str) and _HALF_ESCAPE.search(value):
                raise ValueError(f"{place}: pattern: it ends in the middle of an escape")
            if key == "multipleOf" and _is_fine(value):
                raise ValueError(f"{place}: multipleOf: it has a factor above {MAX_FACTOR}: use minimum and maximum")
            if key == "format" and isinstance(value, str) and not is_enforced(value):
                notes.append(f"{place}: format {value}")
                continue
            if key == "$id" and isinstance(value, str) and value.startswith("#"):  # in drafts 4 to 7
                out["$anchor"] = value[1:]
                continue
            if (any_of and key == "oneOf") or (key not in _KNOWN and not key.startswith("x-")):
                notes.append(f"{place}: {key}")
            out[key] = _mapped(key, value, lambda child, steps: walk(child, _pointer(place, steps), base))
        return out

    return walk(schema, "#"), tuple(notes)


def _is_fine(multiple: Any) -> bool:
    """Whether a multipleOf has a factor above MAX_FACTOR."""
    if not isinstance(multiple, (int, float)) or not math.isfinite(multiple):
        return False
    digits = abs(int("".join(map(str, Decimal(repr(multiple)).as_tuple().digits))))
    for prime in (2, 5):
        while digits and digits % prime == 0:
            digits //= prime
    return digits > MAX_FACTOR


def located(schema: dict[str, Any], reason: Reason) -> str:
    """The place, the keywords and the library's reason of a refused schema: those of the deepest subschema that is
    refused with nothing around it but the root's definitions."""
    trials, place, node, wrap = 0, "#", schema, _Wrap()
    why = reason(schema)

    def refused(wrapped: Any) -> str:
        nonlocal trials
        trials += 1
        return reason(wrapped) if trials <= MAX_TRIALS else ""

    while True:
        for steps, child in _children(node):
            inner = wrap.around(node, steps)
            if (refusal := refused(inner(child))) and not refused(inner({})):
                place, node, wrap, why = _pointer(place, steps), child, inner, refusal
                break
        else:
            break
    keywords = [key for key in node if not refused(wrap({name: node[name] for name in node if name != key}))]
    if not keywords:  # several errors
        keywords = [key for key in node if refused(wrap({key: node[key]}))]
    keywords = [key for key in keywords if key not in _APPLICATORS and key != "type"] or keywords
    return f"{place}: {', '.join(keywords) or 'the schema'}: {why}"


class _Wrap:
    """Puts a subschema at its place in a schema that is otherwise empty, except for definitions."""

    def __init__(self, shared: dict[str, Any] | None = None, steps: Steps = (), outer: _Wrap | None = None) -> None:
        self._shared, self._steps, self._outer = shared or {}, steps, outer

    def __call__(self, child: dict[str, Any]) -> dict[str, Any]:
        if self._outer is None:
            return child
        keyword, rest = str(self._steps[0]), self._steps[1:]
        around: Any = child
        if rest:
            around = [child] if isinstance(rest[0], int) else {**self._shared.get(keyword, {}), rest[0]: child}
        reference = {"$ref": _pointer("#", self._steps)} if keyword in _DEFINITIONS else {}
        return self._outer({**self._shared, keyword: around, **reference})

    def around(self, node: dict[str, Any], steps: Steps) -> _Wrap:
        return _Wrap({key: node[key] for key in (*_DEFINITIONS, "$id", "$schema") if key in node}, steps, self)


def _mapped(key: str, value: Any, visit: Callable[[Any, Steps], Any]) -> Any:
    """The value of a keyword with each of its subschemas replaced."""
    if key in _NAMED and isinstance(value, dict):
        return {name: visit(child, (key, name)) for name, child in value.items()}
    if key in _MANY and isinstance(value, list):
        return [visit(child, (key, index)) for index, child in enumerate(value)]
    return visit(value, (key,)) if key in _ONE else value


def _children(node: dict[str, Any]) -> list[tuple[Steps, dict[str, Any]]]:
    """The steps to each subschema, definitions first, since others refer to them."""
    children: list[tuple[Steps, dict[str, Any]]] = []
    for key, value in sorted(node.items(), key=lambda item: item[0] not in _DEFINITIONS):
        _mapped(key, value, lambda child, steps: children.append((steps, child)) if isinstance(child, dict) else None)
    return children


def _pointer(place: str, steps: Steps) -> str:
    return "/".join((place, *(str(step).replace("~", "~0").replace("/", "~1") for step in steps)))
