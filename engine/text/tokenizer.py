"""A checkpoint's tokenizer, special tokens and chat template: the same ids as transformers' AutoTokenizer, without
torch and transformers. Encode untrusted or long text through engine/text/pool.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer

from .chat_probes import find_reasoning, find_tool_format
from .chat_shape import ChatShape, Messages, Render, choose_shape, tools_are_rendered
from .chat_template import DEFAULTS, ChatTemplate, TemplateError, template_sources
from .chat_template import ChatOptions as ChatOptions
from .content_marks import ContentMarks
from .detokenizer import Pieces
from .own_templates import OWN_TEMPLATES
from .rank_file import is_rank_file, read_ranks
from .text_files import RANKS, changed_files, text_files

MAX_TOKENIZER_BYTES = 1 << 28
MAX_CONFIG_BYTES = 1 << 24
MAX_ID = 1 << 24
"""The library iterates over all ids up to the largest: an id of two billion takes it 12 s."""
_LLAMA_CLASSES = {"LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "CodeLlamaTokenizerFast"}


class TextError(ValueError):
    """The checkpoint's tokenizer files cannot be used; the message names the file and the fix."""


@dataclass(frozen=True, slots=True)
class ChatSupport:
    """What a chat template takes and what its model writes. `shape`: the form of messages; the others as in
    ChatShape."""

    takes_tools: bool = False
    tool_format: str | None = None
    reasoning: str | None = None
    shape: str = ""
    lost: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    def with_formats(self, tool_format: str, reasoning: str) -> ChatSupport:
        """As the deployment says (model.tool_format, model.reasoning_format); auto: as found by probes."""
        support = self
        if tool_format != "auto":
            support = replace(support, tool_format=None if tool_format == "none" else tool_format)
        if reasoning != "auto":
            support = replace(support, reasoning=None if reasoning == "none" else reasoning)
        return support


class TextModel:
    """One tokenizer and template. `eos_ids`: end tokens of tokenizer_config.json and generation_config.json. `files`:
    see text_files."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        config: dict[str, Any],
        templates: Mapping[str, str],
        eos_ids: tuple[int, ...],
        files: Mapping[str, str] = MappingProxyType({}),
        special_in_content: bool = True,
    ) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.folder, self.tokenizer, self.files = folder, tokenizer, files
        self.pieces = Pieces(tokenizer)
        self.special = _special_tokens(config)
        self.bos_id = tokenizer.token_to_id(self.special["bos_token"]) if "bos_token" in self.special else None
        self.eos_ids = eos_ids
        self._sources = templates
        self._templates: dict[str, tuple[ChatTemplate, ChatShape]] = {}
        self._bos_rule = _bos_rule(config)
        self._marks = None if special_in_content else ContentMarks(tokenizer)

    @classmethod
    def from_folder(cls, folder: Path, special_in_content: bool = True) -> TextModel:
        """Reads the tokenizer's JSON files and chat template. Raises TextError naming a missing or unreadable file."""
        files = text_files(folder)
        config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
        path, tokenizer = _read_tokenizer(folder, config)
        if (largest := max(tokenizer.get_vocab().values(), default=0)) > MAX_ID:
            raise TextError(f"{path} has a token with the id {largest}; at most {MAX_ID} is read: fetch the file again")
        if not tokenizer.get_vocab_size():
            raise TextError(f"{path} has an empty vocabulary: fetch the file again")
        try:
            templates = template_sources(folder, config) or _own_template(folder)
        except (TemplateError, ValueError) as error:
            raise TextError(f"{folder}: {error}") from error
        eos_ids = _eos_ids(tokenizer, config, _read_json(folder / "generation_config.json"))
        if changed := changed_files(files, text_files(folder)):
            raise TextError(f"{folder / changed[0]}: changed while it was read: start again once its copy is complete")
        return cls(folder, tokenizer, config, templates, eos_ids, files, special_in_content)

    @property
    def vocab_size(self) -> int:
        """The number of ids of the tokenizer (the model's vocabulary may be padded)."""
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encodes a plain prompt, with a beginning-of-sequence token if the checkpoint requires it."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._bos_rule is not None and self.bos_id is not None:
            has = bool(ids) and ids[0] == self.bos_id
            if self._bos_rule and not has:
                return [self.bos_id, *ids]
            if not self._bos_rule and has:
                return self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The ids of each word at a text's start, and after a space if as many other ids spell it (vLLM's rule)."""
        spellings: dict[tuple[int, ...], None] = {}
        for word in words:
            plain, spaced = (
                tuple(self.tokenizer.encode(before + word.lstrip(), add_special_tokens=False).ids)
                for before in ("", " ")
            )
            if plain:
                spellings[plain] = None
                if len(spaced) == len(plain) and spaced[0] != plain[0]:
                    spellings[spaced] = None
        return tuple(spellings)

    @cached_property
    def chat(self) -> ChatSupport:
        """Rendered by probes, which may never return: the daemon sets what a text worker found out."""
        name = "tool_use" if "tool_use" in self._sources else "default"
        if not self._sources:
            return ChatSupport()
        template, shape = self._template(name)
        render = _renderer(template)
        takes_tools = tools_are_rendered(render)
        tool_format = find_tool_format(render, shape) if takes_tools else None
        reasoning = find_reasoning(render, shape)
        return ChatSupport(takes_tools, tool_format, reasoning, str(shape), shape.lost, shape.refused)

    def _template(self, name: str) -> tuple[ChatTemplate, ChatShape]:
        if name not in self._templates:
            template = ChatTemplate(self._sources[name], self.special)
            self._templates[name] = template, choose_shape(_renderer(template))
        return self._templates[name]

    def render(self, messages: Messages, options: ChatOptions = DEFAULTS) -> str:
        """Renders the messages by the template, or by the one for tools, in the form that it takes; for
        `encode_rendered`. Raises TemplateError. May never return: see chat_template.py."""
        if not self._sources:
            raise TemplateError("this checkpoint has no chat template: send plain prompts to /v1/completions")
        tools = bool(options.variables and options.variables.get("tools"))
        template, shape = self._template("tool_use" if tools and "tool_use" in self._sources else "default")
        if kind := shape.refusal(messages):
            raise TemplateError(f"the checkpoint's chat template loses {kind}: send the conversation without")
        if self._marks is not None:
            messages = self._marks.marked(messages)
            options = replace(options, variables=self._marks.marked(options.variables))
        if options.variables and tools:
            given = shape.shaped_tools(options.variables["tools"])
            options = replace(options, variables={**options.variables, "tools": given})
        return template.render(shape.shaped(messages), options)

    def encode_rendered(self, text: str, add_special_tokens: bool) -> list[int]:
        """Encodes a rendered chat; control tokens that its messages spell become text if the model does not allow
        them. Raises TemplateError."""
        first, *rest = [text] if self._marks is None else self._marks.pieces(text)
        return self.encode(first, add_special_tokens) + [i for piece in rest for i in self.encode(piece, False)]

    def encode_chat(self, messages: list[dict[str, Any]], options: ChatOptions = DEFAULTS) -> list[int]:
        """Encodes a chat. The template contains its special tokens, so none are added unless requested."""
        return self.encode_rendered(self.render(messages, options), options.add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special))


def _read_tokenizer(folder: Path, config: dict[str, Any]) -> tuple[Path, Tokenizer]:
    """The tokenizer of tokenizer.json, or else of ranks, and which file it is. Raises TextError."""
    path = folder / "tokenizer.json"
    if ranks := is_rank_file(folder, config):
        path = folder / RANKS
    if not path.is_file():
        others = [name for name in ("tokenizer.model", RANKS) if (folder / name).is_file()]
        also = f" ({others[0]} alone is not read)" if others else ""
        raise TextError(
            f"{path} is missing{also}: save it there with transformers' AutoTokenizer(…).save_pretrained(folder)"
        )
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise TextError(f"{path} has {path.stat().st_size} bytes; at most {MAX_TOKENIZER_BYTES} are read")
    try:
        return path, read_ranks(path, config) if ranks else Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exceptions, and its panics are none
        raise TextError(f"{path} cannot be read as a tokenizer: {error}") from error


def _own_template(folder: Path) -> dict[str, str]:
    """The template for a family whose folder contains none; {} if there is none here either. Raises TextError."""
    template = OWN_TEMPLATES.get(str(_read_json(folder / "config.json").get("model_type")))
    return {} if template is None else {"default": template}


def _renderer(template: ChatTemplate) -> Render:
    def render(messages: Messages, tools: list[dict[str, Any]] | None, **variables: Any) -> str | None:
        try:
            return template.render(messages, ChatOptions(variables={**variables, "tools": tools}))
        except TemplateError:
            return None

    return render


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise TextError(f"{path} has {path.stat().st_size} bytes; at most {MAX_CONFIG_BYTES} are read")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TextError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise TextError(f"{path} holds a {type(data).__name__}; an object is expected")
    return data


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Name (bos_token, …) -> text; the files write a token as a string or as an object with `content`."""
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _bos_rule(config: dict[str, Any]) -> bool | None:
    """Whether to add the beginning-of-sequence token according to the config; None if tokenizer.json determines it."""
    rule = config.get("add_bos_token")
    return rule if isinstance(rule, bool) and str(config.get("tokenizer_class")) in _LLAMA_CLASSES else None


def _eos_ids(tokenizer: Tokenizer, config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    listed = generation.get("eos_token_id")
    ids = [i for i in (listed if isinstance(listed, list) else [listed]) if isinstance(i, int)]
    eos = _special_tokens(config).get("eos_token")
    named = tokenizer.token_to_id(eos) if eos is not None else None
    return tuple(dict.fromkeys([*([named] if named is not None else []), *ids]))
