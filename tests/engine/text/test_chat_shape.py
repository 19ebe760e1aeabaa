"""Chat templates as models publish them: each gets messages in the form in which it loses nothing. The oracle is
transformers with the same template; the 70 templates of a public package are a slow test."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from laddertron.engine.text.chat_shape import PROBE_TOOL, ChatShape, choose_shape, probe_call, probe_chat
from laddertron.engine.text.chat_template import ChatOptions, ChatTemplate, TemplateError
from laddertron.engine.text.tokenizer import TextModel
from tiny_text import byte_level, write_folder
from transformers import PreTrainedTokenizerFast

PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
HEAD = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<{{ m.role }}>"
CALLS = "{% for c in m.tool_calls or [] %}({{ c.function.name }}:{{ c.function.arguments|tojson }}){% endfor %}"
TAIL = "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
TEXT = "{{ m.content or '' }}"
NULL_ONLY = (  # as DeepSeek-R1's distilled models: a call is rendered only beside null
    HEAD + "{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
    "({{ c.function.name + ':' + c.function.arguments }}){% endfor %}"
    "{% endif %}{% if m.content is not none %}{{ '' + m.content }}{% endif %}" + TAIL
)
EMPTY_ONLY = HEAD + "{{ m.content }}" + CALLS + TAIL  # null would read None
EXTRA_TURN = HEAD + "{% if m.content is not none %}{{ m.content }}<end>{% endif %}" + CALLS + TAIL
LOOPS = HEAD + "{% for part in m.content %}{{ part.text }}{% endfor %}" + CALLS + TAIL
JOINS = HEAD + TEXT + CALLS.replace("{{ c.function.arguments|tojson }}", "{{ '' + c.function.arguments }}") + TAIL
ITEMS = HEAD + TEXT + (
    "{% for c in m.tool_calls or [] %}({{ c.function.name }}{% for k, v in c.function.arguments|items %}"
    "{{ k }}={{ v }}{% endfor %}){% endfor %}"
) + TAIL  # fmt: skip
NINE = HEAD + TEXT + (
    "{% for c in m.tool_calls or [] %}{% if c.id|length != 9 %}{{ raise_exception('nine') }}{% endif %}{% endfor %}"
) + CALLS + "{{ m.tool_call_id or '' }}" + TAIL  # fmt: skip
BY_ID = HEAD + TEXT + CALLS.replace("c.function.name", "c.id") + "{{ m.tool_call_id or '' }}" + TAIL
ONE_CALL = HEAD + (
    "{% if m.tool_calls %}{% if m.tool_calls|length > 1 %}{{ raise_exception('one') }}{% endif %}"
    + CALLS + "{% else %}"
) + TEXT + "{% endif %}" + TAIL  # fmt: skip
THINKS = HEAD + "{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}" + TEXT + CALLS + TAIL

FIRST_ONLY = (  # as MiniMax-M2 and gpt-oss: a system message is rendered at the start only
    HEAD.replace("{% for m", "{{ messages[0].content if messages[0].role == 'system' }}{% for m")
    + "{% if m.role != 'system' %}" + TEXT + CALLS + "{% endif %}" + TAIL
)  # fmt: skip
LAST_ONLY = (  # as DeepSeek-R1's: the last system message overwrites the others
    "{% set at = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}{% set at.system = m.content"
    " %}{% endif %}{% endfor %}{{ at.system }}"
    + HEAD + "{% if m.role != 'system' %}" + TEXT + CALLS + "{% endif %}" + TAIL
)  # fmt: skip
FULL_TOOLS = HEAD.replace("{{ t.function.name }}", (
    "{{ t.function.name + ': ' + t.function.description }}{% for name in t.function.parameters.properties.keys() %}"
    "{{ name }}{% endfor %}"
)) + TEXT + CALLS + TAIL  # fmt: skip


def render_with(template: ChatTemplate) -> Any:
    def render(messages: Any, tools: Any) -> str | None:
        try:
            return template.render(messages, ChatOptions(variables={"tools": tools} if tools else None))
        except TemplateError:
            return None

    return render


def shape_of(source: str) -> ChatShape:
    return choose_shape(render_with(ChatTemplate(source, {})))


@pytest.mark.parametrize(
    ("source", "fields"),
    [
        (HEAD + TEXT + CALLS + TAIL, {}),
        (NULL_ONLY, {"null_content": True, "text_arguments": True, "apart": ("text beside tool calls",)}),
        (EMPTY_ONLY, {}),
        (EXTRA_TURN, {"null_content": True}),
        (JOINS, {"text_arguments": True}),
        (ITEMS, {}),
        (NINE, {"ids": "nine"}),
        (BY_ID, {"ids": "function"}),
        (ONE_CALL, {"apart": ("text beside tool calls", "several tool calls in one turn")}),
        (THINKS, {"reasoning": "thinking"}),
        (FIRST_ONLY, {"joined": True, "lost": ("system messages after another turn",)}),
        (LAST_ONLY, {"joined": True, "lost": ("system messages after another turn",)}),
        (FULL_TOOLS, {"filled": True}),
    ],
)
def test_a_form_is_chosen_in_which_nothing_is_lost(source: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """And whole conversations keep every word in it."""
    shape = shape_of(source)
    names = ("null_content", "text_arguments", "ids", "reasoning", "joined", "filled", "apart", "lost", "refused")
    default = ChatShape()
    assert {n: getattr(shape, n) for n in names} == {**{n: getattr(default, n) for n in names}, **fields}
    text = TextModel.from_folder(write_folder(tmp_path, byte_level(), source))
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": PARTS},
        {"role": "assistant", "content": "peek", "tool_calls": [probe_call(0), probe_call(1)]},
        *({"role": "tool", "tool_call_id": f"call_zqid{n}", "content": f"answer {n}"} for n in range(2)),
        {"role": "assistant", "content": None, "tool_calls": [probe_call(2)]},
        {"role": "tool", "tool_call_id": "call_zqid2", "content": [{"type": "text", "text": "answer 2"}]},
    ]
    rendered = text.render(chat, ChatOptions(variables={"tools": [PROBE_TOOL]}))
    for word in ("rules", "one", "two", "peek", *(f"zqvalue{n}" for n in range(3)), *(f"answer {n}" for n in range(3))):
        assert rendered.count(word) == 1, (word, rendered)
    assert "None" not in rendered
    assert "'" not in rendered
    assert "\\" not in rendered


def test_content_is_given_as_parts_where_a_template_loops_over_it(tmp_path: Path) -> None:
    shape = shape_of(LOOPS)
    assert {shape.content[role] for role in ("user", "system", "assistant", "tool")} == {"parts"}
    text = TextModel.from_folder(write_folder(tmp_path, byte_level(), LOOPS))
    assert text.render([{"role": "user", "content": "hello"}]) == "<user>hello<assistant>"
    more = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    assert text.render([{"role": "user", "content": PARTS}], more) == "<user>onetwo"


@pytest.mark.parametrize(
    ("source", "lost"),
    [
        (HEAD + "{% if m.role != 'system' %}" + TEXT + CALLS + "{% endif %}" + TAIL, "system messages"),
        (HEAD + TEXT + TAIL, "tool calls"),
        (HEAD + "{% if m.role == 'user' %}" + TEXT + "{% endif %}" + CALLS + TAIL, "assistant text"),
        ("<fixed>", "user text"),
    ],
)
def test_a_conversation_that_no_form_keeps_is_refused_by_its_kind(source: str, lost: Any, tmp_path: Path) -> None:
    text = TextModel.from_folder(write_folder(tmp_path, byte_level(), source))
    assert lost in text.chat.lost
    said = {"role": "assistant", "content": "zqsaid"}
    chat = [{"role": "system", "content": "s"}] if lost.startswith("system") else [said] if "assist" in lost else []
    with pytest.raises(TemplateError, match=lost):
        text.render([*chat, *probe_chat()])
    if lost != "user text":
        assert "hello" in text.render([{"role": "user", "content": "hello"}])


def test_no_system_message_is_lost(tmp_path: Path) -> None:
    """Those at the start are joined where a template renders one, in parts where it takes parts; one after another
    turn is refused."""
    first: dict[str, Any] = {"role": "system", "content": "be kind"}
    second: dict[str, Any] = {"role": "system", "content": PARTS}
    user: dict[str, Any] = {"role": "user", "content": "hi"}
    for number, source in enumerate((FIRST_ONLY, LAST_ONLY, HEAD + TEXT + TAIL)):
        text = TextModel.from_folder(write_folder(tmp_path / str(number), byte_level(), source))
        words = ("be kind", "one", "two", "hi")
        rendered = text.render([first, second, user])
        assert [rendered.count(word) for word in words] == [1] * 4, rendered
        for chat in ([user, first], [first, user, second]):
            if number < 2:
                with pytest.raises(TemplateError, match="system messages after another turn"):
                    text.render(chat)
            else:
                assert "be kind" in text.render(chat)


def test_calls_without_answers_are_not_lost_where_the_template_refuses_answers() -> None:
    shape = shape_of(HEAD + "{% if m.role == 'tool' %}{{ raise_exception('tool') }}{% endif %}" + TEXT + TAIL)
    assert "tool calls" in shape.lost


def test_a_tool_needs_its_name_only(tmp_path: Path) -> None:
    """A template that needs more gets an empty description and no parameters."""
    text = TextModel.from_folder(write_folder(tmp_path, byte_level(), FULL_TOOLS))
    functions: tuple[dict[str, Any], ...] = (
        {},
        {"description": "when"},
        {"parameters": {"type": "object"}},
        {"parameters": None},
    )
    for function in functions:
        tools = ({"type": "function", "function": {"name": "now", **function}},)
        rendered = text.render([{"role": "user", "content": "hi"}], ChatOptions(variables={"tools": tools}))
        assert rendered.startswith(f"[now: {function.get('description', '')}]")


@pytest.mark.parametrize("arguments", ["", '{"city": "Ro', "[1]", '{"a": "b\nc"}'])
@pytest.mark.parametrize("source", [HEAD + TEXT + CALLS + TAIL, JOINS, ITEMS])
def test_arguments_that_are_no_object_are_kept(source: str, arguments: str, tmp_path: Path) -> None:
    """As an answer that was cut off leaves them: the conversation goes on."""
    chat = probe_chat()
    chat[1]["tool_calls"][0]["function"]["arguments"] = arguments
    text = TextModel.from_folder(write_folder(tmp_path, byte_level(), source))
    rendered = text.render(chat)
    for letters in ("Ro",) if "Ro" in arguments else ("1",) if "1" in arguments else ("zqlookup",):
        assert letters in rendered


def test_tools_choose_the_template_that_is_named_for_them(tmp_path: Path) -> None:
    """In tokenizer_config.json and as a file, as transformers does; a chat without tools has the default."""
    listed = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": HEAD + TEXT + CALLS + TAIL}]
    write_folder(tmp_path / "a", byte_level(), [{**listed[0], "template": HEAD + TEXT + TAIL}, listed[1]])
    by_name = {"default": HEAD + TEXT + TAIL, "tool_use": listed[1]["template"]}
    write_folder(tmp_path / "c", byte_level(), by_name)
    write_folder(tmp_path / "b", byte_level(), None)
    (tmp_path / "b" / "chat_template.jinja").write_text(HEAD + TEXT + TAIL)
    (tmp_path / "b" / "additional_chat_templates").mkdir()
    (tmp_path / "b" / "additional_chat_templates" / "tool_use.jinja").write_text(listed[1]["template"])
    for folder in (tmp_path / "a", tmp_path / "b", tmp_path / "c"):
        text = TextModel.from_folder(folder)
        assert text.chat.takes_tools
        assert not text.chat.lost
        other = PreTrainedTokenizerFast.from_pretrained(folder)
        for tools in ([PROBE_TOOL], None):
            chat = probe_chat() if tools else [{"role": "user", "content": "hi"}]
            shaped = ChatShape().shaped(chat)
            want = other.apply_chat_template(shaped, tools=tools, tokenize=False, add_generation_prompt=True)
            assert text.render(chat, ChatOptions(variables={"tools": tools} if tools else None)) == want
    assert any("tool_use.jinja" in name for name in TextModel.from_folder(tmp_path / "b").files)


CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": PARTS}],
    [*probe_chat(1, "x"), {"role": "assistant", "content": "end"}, {"role": "user", "content": "more"}],
    probe_chat(2, None, True),
    probe_chat(1, None, False, True),
]


@pytest.mark.slow
def test_published_templates_render_as_transformers_renders_them(tmp_path: Path) -> None:
    """The templates in llama-cpp-python's source, which pip fetches: every conversation that is not refused."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "llama-cpp-python"]
    subprocess.run([*command, "-d", str(tmp_path), "llama-cpp-python"], check=True, timeout=600)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        files = [
            m for m in archive.getmembers() if "/llama.cpp/models/templates/" in m.name and m.name.endswith("jinja")
        ]
        sources = {Path(m.name).stem: archive.extractfile(m).read().decode() for m in files}  # type: ignore[union-attr]
    write_folder(tmp_path / "t", byte_level())
    other = PreTrainedTokenizerFast.from_pretrained(tmp_path / "t")
    compared = 0
    for name, source in sources.items():
        template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
        shape = choose_shape(render_with(template))
        for chat in CHATS:
            for tools in (None, [PROBE_TOOL]):
                text = render_with(template)(shape.shaped(chat), tools)
                if text is None or (shape.null_content and len(chat) > 2):  # transformers removes nulls, and fails
                    continue
                want = other.apply_chat_template(
                    shape.shaped(chat), tools=tools, chat_template=source, tokenize=False, add_generation_prompt=True
                )
                assert text == want, (name, json.dumps(chat))
                compared += 1
    assert len(sources) >= 70
    assert compared > 400
