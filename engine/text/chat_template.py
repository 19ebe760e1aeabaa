"""Renders a checkpoint's chat template in Jinja's immutable sandbox, with the helpers that templates expect. It does
not stop endless loops: render in a process that can be killed (engine/text/pool.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser

from .text_files import NAMED_TEMPLATES

MAX_TEMPLATE_BYTES = 1 << 20
_MARK = "\ue0c0\ue0c1 "  # private-use characters: no message's own text


class TemplateError(ValueError):
    """The checkpoint has no usable chat template, or it refused these messages; the message has the reason."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options for rendering a chat: the fields of vLLM's chat requests that affect the template."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    variables: dict[str, Any] | None = None


DEFAULTS = ChatOptions()


class _GenerationBlock(Extension):
    """Renders the body of `{% generation %}…{% endgeneration %}`, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's tojson without HTML escapes."""
    allowed = {k: v for k, v in options.items() if k in ("separators", "sort_keys")}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **allowed)


class ChatTemplate:
    """One compiled template and the special tokens it may name (bos_token, eos_token, …)."""

    def __init__(self, source: str, special: dict[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, LoopControlExtension]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the checkpoint's chat template does not compile: {error}") from error
        self._special = special

    def render(self, messages: list[dict[str, Any]], options: ChatOptions = DEFAULTS) -> str:
        """Renders the prompt's text; `continue_final_message` leaves the last message open. Raises TemplateError."""
        if options.continue_final_message:
            messages = [*messages[:-1], {**messages[-1], "content": _marked(messages[-1]["content"])}]
        given = {"messages": messages, "add_generation_prompt": options.add_generation_prompt}
        names = {"tools": None, "documents": None, **self._special, **(options.variables or {}), **given}
        try:
            text = self._template.render(names)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the checkpoint's chat template refused the messages: {error.message}") from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"[:300]
            raise TemplateError(f"the checkpoint's chat template failed on the messages: {reason}") from error
        return _cut_at_mark(text) if options.continue_final_message else text


def _marked(content: Any) -> Any:
    """A message's content with the mark at its end."""
    if isinstance(content, list):
        return [*content[:-1], {**content[-1], "text": content[-1]["text"] + _MARK}]
    return (content or "") + _MARK


def _cut_at_mark(text: str) -> str:
    """Cuts `text` after the last message's text. The mark ends in a space: if that is missing, the template strips
    messages, and would have stripped that text, too."""
    at = text.rfind(_MARK.strip())
    if at < 0:
        raise TemplateError("continue_final_message: the chat template does not render the last message's words")
    return text[:at] if text.startswith(_MARK, at) else text[:at].rstrip()


def template_sources(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """The templates of a checkpoint folder by name, of which "default" is one unless there are none:
    chat_template.jinja, else tokenizer_config.json's `chat_template` (a string, or several by name), else
    chat_template.json; and those in additional_chat_templates."""
    beside = folder / "chat_template.jinja"
    value: object = _read(beside) if beside.is_file() else config.get("chat_template")
    if value is None and (folder / "chat_template.json").is_file():
        try:
            other = json.loads((folder / "chat_template.json").read_text(encoding="utf-8"))
        except RecursionError:
            other = None
        if not isinstance(other, dict):
            raise TemplateError("chat_template.json is not an object with a chat_template")
        value = other.get("chat_template")
    named: dict[str, object] = {} if value is None else {"default": value}
    if isinstance(value, dict):
        named = value
    elif isinstance(value, list):
        named = {
            str(t["name"]): t["template"] for t in value if isinstance(t, dict) and {"name", "template"} <= t.keys()
        }
    named |= {path.stem: _read(path) for path in sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))}
    if (named or isinstance(value, (dict, list))) and "default" not in named:
        raise TemplateError(f'chat_template has {sorted(named)} without "default": name one so')
    sources = {}
    for name, source in named.items():
        if not isinstance(source, str):
            raise TemplateError(f"chat_template is a {type(source).__name__}; a string, or several by name, are read")
        if len(source) > MAX_TEMPLATE_BYTES:
            raise TemplateError(
                f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_BYTES} are read"
            )
        sources[name] = source
    return sources


def _read(path: Path) -> str:
    if path.stat().st_size > MAX_TEMPLATE_BYTES:
        raise TemplateError(f"{path} has {path.stat().st_size} bytes; at most {MAX_TEMPLATE_BYTES} are read")
    return path.read_text(encoding="utf-8")
