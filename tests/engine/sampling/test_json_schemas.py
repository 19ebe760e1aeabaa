"""A table of schemas: each is refused by its place and keyword, or what is drawn at random obeys it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from laddertron.engine.sampling import grammar
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

pytestmark = pytest.mark.skipif(not grammar.available, reason="llguidance is not installed: laddertron[grammar]")

Schema = Any
EOS = 256
TEXT: Schema = {"type": "string", "maxLength": 3}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 40}
PAIR: Schema = {"type": "object", "properties": {"a": COUNT, "b": TEXT}, "additionalProperties": False}
DRAFT = "http://json-schema.org/draft-{}/schema#"

CONSTANTS: tuple[Any, ...] = (None, False, 1.5, "", '\u2028"\\', [1, [None]], {}, 10**20)

ENFORCED: dict[str, Schema] = {
    "type": {"type": ["integer", "null"]},
    "enum": {"enum": ["x", 1, 1.5, None, {"a": [True]}, []]},
    "const": {"const": {"a": "é\n", "b": [1, None]}},
    "minimum": {"type": "integer", "minimum": -3, "exclusiveMaximum": 2},
    "draft 4 bounds": {"type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 9},
    "multipleOf": {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 30},
    "pattern": {"type": "string", "pattern": "^[a-c]{1,3}-\\d$"},
    "pattern within": {"type": "string", "pattern": "b", "maxLength": 4},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 3},
    "date": {"type": "string", "format": "date"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "required": {"type": "object", "required": ["z", "a"], "properties": {"a": COUNT}, "additionalProperties": COUNT},
    "additionalProperties": {"type": "object", "properties": {"a": TEXT}, "additionalProperties": COUNT},
    "patternProperties": {"type": "object", "patternProperties": {"^a": COUNT}, "additionalProperties": False},
    "maxProperties": {"type": "object", "additionalProperties": COUNT, "minProperties": 1, "maxProperties": 2},
    "property false": {"type": "object", "properties": {"a": False, "b": COUNT}, "additionalProperties": False},
    "items": {"type": "array", "items": COUNT, "minItems": 1, "maxItems": 3},
    "prefixItems": {"type": "array", "prefixItems": [COUNT, TEXT], "minItems": 2, "items": False},
    "allOf": {"allOf": [{**PAIR, "required": ["a"]}, {"required": ["b"]}]},
    "anyOf": {"anyOf": [COUNT, {"type": "array", "items": TEXT, "maxItems": 1}]},
    "oneOf apart": {"oneOf": [{**PAIR, "required": ["a"]}, {"type": "boolean"}]},
    "siblings": {"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": -5}]},
    "minProperties 1": {**PAIR, "minProperties": 1},
    "boolean": {"type": "object", "properties": {"a": True}, "additionalProperties": False},
    "annotations": {
        **COUNT, "title": "t", "description": "d", "default": "no count", "examples": ["none"], "deprecated": True,
        "readOnly": True, "writeOnly": False, "$comment": "c", "x-order": 3, "contentMediaType": "text/plain",
    },
    "nothing demanded": {**COUNT, "uniqueItems": False, "not": False, "dependentRequired": {}, "propertyNames": True},
    "format of no text": {"type": "object", "properties": {"format": COUNT}, "required": ["format"]},
    **{f"const {value!r}": {"const": value} for value in CONSTANTS},
    "type list": {"type": ["string", "integer", "null"], "maxLength": 2},
    "enum of a type": {"type": "integer", "enum": [1, "a", None, 2]},
    "patternProperties, several": {
        "type": "object", "patternProperties": {"^a": COUNT, "^b": TEXT}, "additionalProperties": False,
    },
    "lazy pattern": {"type": "string", "pattern": "^(?:a|b)?c+?$"},
    "pattern of classes": {"type": "string", "pattern": r"^[\w.-]{1,3}@\/[^\x00-\x7F]$"},
    "open interval": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "multipleOf of cents": {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 9},
    "odd keys": {"type": "object", "properties": {"": COUNT, "\u00e9\"\n": COUNT}, "required": ["", "\u00e9\"\n"]},
    "no items": {"type": "array", "items": False},
    "maxItems huge": {"type": "array", "items": COUNT, "maxItems": 10**9},
    "maxProperties 0": {"type": "object", "maxProperties": 0},
    "contentSchema": {**TEXT, "contentSchema": COUNT},
    "recursion": {"type": "array", "items": {"anyOf": [COUNT, {"type": "array", "maxItems": 1}]}, "maxItems": 2},
}  # fmt: skip
NOTED: dict[str, tuple[Schema, str, Schema]] = {
    "unknown format": ({**TEXT, "format": "idn-email"}, "format idn-email", TEXT),
    "format of numbers": ({**COUNT, "format": "int32"}, "format int32", COUNT),
    "overlapping oneOf": (
        {"oneOf": [COUNT, {"type": "number", "minimum": 0, "maximum": 9}]}, "oneOf",
        {"anyOf": [COUNT, {"type": "number", "minimum": 0, "maximum": 9}]},
    ),
    "alternative keys": (
        {**PAIR, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "oneOf",
        {**PAIR, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    ),
    "misspelt": ({**TEXT, "maxLenght": 1}, "maxLenght", TEXT),
    "of OpenAPI": ({**TEXT, "nullable": True}, "nullable", TEXT),
}  # fmt: skip
REFUSED: dict[str, tuple[Schema, str]] = {
    "uniqueItems": ({"type": "array", "items": COUNT, "uniqueItems": True}, "uniqueItems"),
    "not": ({"not": TEXT}, "not"),
    "if": ({**PAIR, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if, then"),
    "contains": ({"type": "array", "contains": COUNT}, "contains"),
    "dependentRequired": ({**PAIR, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "dependentSchemas": ({**PAIR, "dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas"),
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 2}}, "propertyNames"),
    "unevaluatedProperties": ({**PAIR, "unevaluatedProperties": False}, "unevaluatedProperties"),
    "unevaluatedItems": ({"type": "array", "unevaluatedItems": False}, "unevaluatedItems"),
    "$dynamicRef": ({"$dynamicRef": "#n"}, "$dynamicRef"),
    "contains, any number": ({"type": "array", "contains": COUNT, "minContains": 0}, "minContains"),
    "then": ({"then": COUNT}, "then"),
    "$recursiveRef": ({"$recursiveRef": "#"}, "$recursiveRef"),
    "dependencies": ({"type": "object", "dependencies": {"a": ["b"]}}, "dependencies"),
    "prime multipleOf": ({"type": "integer", "multipleOf": 1_000_003}, "multipleOf"),
    "fine multipleOf": ({"type": "number", "multipleOf": 0.1234567}, "multipleOf"),
    "half an escape": ({"type": "string", "pattern": "a\\\\\\"}, "pattern"),
    "back-reference": ({"type": "string", "pattern": r"(a)\1"}, "pattern"),
    "look-behind": ({"type": "string", "pattern": "(?<!a)b"}, "pattern"),
    "overlapping patternProperties": (
        {"type": "object", "patternProperties": {"^a": COUNT, "a$": TEXT}},
        "patternProperties",
    ),
    "look-ahead": ({"type": "string", "pattern": "^(?!a)"}, "pattern"),
    "remote $ref": ({"$ref": "http://example.org/schema"}, "$ref"),
    "no such type": ({"type": "text"}, "type"),
    "minProperties": ({**PAIR, "minProperties": 2}, "minProperties"),
    "maxLength of no number": ({"type": "string", "maxLength": "3"}, "maxLength"),
}
IMPOSSIBLE: dict[str, tuple[Schema, str]] = {
    "no enum": ({"enum": []}, "enum"),
    "const of another type": ({"type": "string", "const": 1}, "const"),
    "required false": ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "required"),
    "empty interval": (
        {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        "exclusiveMinimum, exclusiveMaximum",
    ),
    "lengths apart": ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength, maxLength"),
}  # fmt: skip
"""Refused where they stand alone: within another schema they may be left out."""
PLACES: dict[str, tuple[Callable[[Schema], Schema], str]] = {
    "alone": (lambda schema: schema, "#"),
    "property": (
        lambda s: {"type": "object", "properties": {"p/q": s}, "required": ["p/q"], "additionalProperties": False},
        "#/properties/p~1q",
    ),
    "item": (lambda s: {"type": "array", "items": s, "minItems": 1, "maxItems": 2}, "#/items"),
    "definition": (
        lambda s: {
            "$id": "http://example.org/root", "$defs": {"d": s}, "type": "array", "maxItems": 1,
            "items": {"$ref": "#/$defs/d"},
        },
        "#/$defs/d",
    ),
    "alternative": (lambda s: {"$schema": DRAFT.format("next"), "anyOf": [s, {"type": "null"}]}, "#/anyOf/0"),
}  # fmt: skip
WHOLE: dict[str, Schema] = {
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object", "additionalProperties": False, "required": ["v", "next"],
                "properties": {"v": COUNT, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            }
        },
    },
    "$anchor": {"$ref": "#here", "$defs": {"d": {"$anchor": "here", **COUNT}}},
    "$id": {"$id": "http://example.org/r", "$ref": "part", "$defs": {"d": {"$id": "part", **COUNT}}},
    "absolute $ref": {"$id": "http://example.org/r", "$ref": "http://example.org/r#/$defs/d", "$defs": {"d": COUNT}},
    "escaped $ref": {"$ref": "#/$defs/a%20b~1c", "$defs": {"a b/c": COUNT}},
    "draft 7": {
        "$schema": DRAFT.format("07"), "definitions": {"d": COUNT}, "type": "array",
        "items": [{"$ref": "#/definitions/d"}], "additionalItems": False,
    },
    "draft 4": {"$schema": DRAFT.format("04"), "type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 9},
    "$ref and more": {"$ref": "#/$defs/d", "maximum": 5, "$defs": {"d": COUNT}},
}  # fmt: skip
CASES = {
    **{
        f"{name}, {place}": (where(schema), "", where(schema))
        for name, schema in ENFORCED.items()
        for place, (where, _) in PLACES.items()
    },
    **{
        f"{name}, {place}": (where(schema), f"{at}: {keyword}", where(checked))
        for name, (schema, keyword, checked) in NOTED.items()
        for place, (where, at) in PLACES.items()
    },
    **{
        f"{name}, {place}": (where(schema), f"{at}: {keyword}", None)
        for name, (schema, keyword) in REFUSED.items()
        for place, (where, at) in PLACES.items()
    },
    **{name: (schema, "", schema) for name, schema in WHOLE.items()},
    **{name: (schema, f"#: {keyword}", None) for name, (schema, keyword) in IMPOSSIBLE.items()},
}


@pytest.fixture(scope="module")
def slots(tmp_path_factory: pytest.TempPathFactory) -> grammar.GrammarSlots:
    """Of a tokenizer whose ids are the characters of byte-level BPE."""
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    folder = tmp_path_factory.mktemp("bytes")
    tokenizer.save(str(folder / "tokenizer.json"))
    return grammar.GrammarSlots(folder / "tokenizer.json", EOS + 1, (EOS,))


def drawn(slots: grammar.GrammarSlots, spec: str, rng: random.Random) -> str:
    """A text of random tokens that the grammar allows; soon those that close something."""
    slots.admit(0, spec, ())
    state, out = slots.state(0), list[int]()
    closing = set(slots.tokenizer.tokenize_str('"]}'))
    while True:
        options = np.flatnonzero(state.allowed(range(EOS + 1))).tolist()
        assert options, (slots.tokenizer.decode_str(out), state.failure())
        ends = [token for token in options if token in closing]
        if EOS in options and (len(out) > 40 or options == [EOS] or rng.random() < 0.5):
            return str(slots.tokenizer.decode_str(out))
        out.append(rng.choice(ends if ends and len(out) > 20 else [token for token in options if token != EOS]))
        state.advance(out[-1])
        assert len(out) < 4000


@pytest.mark.parametrize("name", CASES)
def test_a_schema_is_refused_by_name_or_obeyed(slots: grammar.GrammarSlots, name: str) -> None:
    schema, note, checked = CASES[name]
    spec = json.dumps({"grammars": [{"json_schema": schema}]})
    if checked is None:
        with pytest.raises(ValueError) as caught:
            slots.check(spec)
        assert f": {note}: " in str(caught.value)
        return
    ready, notes = slots.check(spec)
    assert notes == ((note,) if note else ())
    validator = validator_for(checked, default=Draft202012Validator)
    for seed in range(3):
        text = drawn(slots, ready, random.Random(seed))
        validator(checked, format_checker=validator.FORMAT_CHECKER).validate(json.loads(text))


@pytest.mark.parametrize("keyword", ["$id", "$anchor", "draft 7"])
def test_two_schemas_of_one_name_are_refused(slots: grammar.GrammarSlots, keyword: str) -> None:
    """A reference would mean one of them without a word. Two equal schemas may share a name, and so may schemas of
    resources with names of their own."""
    own = {"$id": "#d"} if keyword == "draft 7" else {keyword: "d"}
    counts, words = {**own, **COUNT}, {**own, "type": "string"}

    def schema(first: Schema, second: Schema) -> str:
        whole = {"$id": "http://example.org/r", "$defs": {"a": first, "b": second}, **COUNT}
        return json.dumps({"grammars": [{"json_schema": whole}]})

    with pytest.raises(ValueError, match=r"#/\$defs/b: \$(id|anchor): #/\$defs/a has '#?d' too"):
        slots.check(schema(counts, words))
    slots.check(schema(counts, counts))
    slots.check(schema({"$id": "http://example.org/1/", "$defs": {"x": counts}}, words))


def test_the_table_is_large() -> None:
    assert len(CASES) >= 240


def test_a_client_cannot_have_keywords_ignored(slots: grammar.GrammarSlots) -> None:
    """By the library's own option."""
    with pytest.raises(ValueError, match="#: not: "):
        slots.check(json.dumps({"grammars": [{"json_schema": {"not": {}, "x-guidance": {"lenient": True}}}]}))


GBNF: dict[str, tuple[str, str | None]] = {
    "alternatives": ('root ::= "a" | "b"', "a|b"),
    "comments": ('# x ::= "y"\nroot ::= "a#" # "b"\n# end', "a#"),
    "escapes": (r'root ::= "\u00e9" [\u0041-\u0043] "\x41" "\U0001F600"', "\u00e9[A-C]A\U0001f600"),
    "class escapes": (r"root ::= [\]\-\\^a]{3}", r"[\]\-\\^a]{3}"),
    "repetitions": ('root ::= "a"{2,4} "b"{2} "c"{1,2} "d"{0,1}', "a{2,4}b{2}c{1,2}d?"),
    "repetition of a repetition": ('root ::= ("a"*)* "b" (("c"{2}){1,2} )? "d+)*"', r"a*b(cc){0,2}d\+\)\*"),
    "left recursion": ('root ::= root "a" | "b"', "ba*"),
    "empty alternatives": ('root ::= | "a" | x "c"\nx ::=', "a?|c"),
    "names": ('root ::= my-rule Foo a_b2\nmy-rule ::= "x"\nFoo ::= "y"\na_b2 ::= "z"', "xyz"),
    "line breaks": ('root\t::= "a"\r\n  "b"\r\n  | "c"\r\nx::="d"', "ab|c"),
    "undefined": ("root ::= x", None),
    "no root": ('a ::= "x"', None),
    "defined twice": ('root ::= "a"\nroot ::= "b"', None),
    "endless": ("root ::= a\na ::= b\nb ::= a", None),
    "endless recursion": ('root ::= root "a"', None),
    "wrong bounds": ('root ::= "a"{3,1}', None),
    "nested bounds": ('root ::= (("a"{1000}){1000}){1000}', None),
    "unclosed text": ('root ::= "a', None),
    "unclosed class": ("root ::= [a", None),
    "unclosed group": ('root ::= ("a"', None),
    "nesting": (f"root ::= {'(' * 3000}'a'{')' * 3000}", None),
    "many rules": ("root ::= r0\n" + "\n".join(f'r{i} ::= "a" r{i + 1}' for i in range(3000)), None),
    "long": ("root ::= " + " | ".join(f'"w{i}"' for i in range(20_000)), None),
}


@pytest.mark.parametrize("name", GBNF)
def test_a_gbnf_grammar_is_refused_or_obeyed(slots: grammar.GrammarSlots, name: str) -> None:
    text, pattern = GBNF[name]
    spec = json.dumps({"grammars": [{"lark_grammar": text}]})
    if pattern is None:
        with pytest.raises(ValueError, match="grammar"):
            slots.check(spec)
        return
    ready, _ = slots.check(spec)
    for seed in range(4):
        answer = drawn(slots, ready, random.Random(seed))
        assert re.fullmatch(pattern, answer), answer
