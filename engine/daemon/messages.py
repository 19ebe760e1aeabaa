"""The messages of a chat, checked: roles, and contents that are text. Images, audio and tools are refused by name."""

from __future__ import annotations

from typing import Any

from .rules import BadRequest, Field, did_you_mean, refused, show, string, wrong_type

MAX_MESSAGES = 8192
MAX_PARTS = 4096

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TOOL_ROLES = ("tool", "function")
_NO_TOOLS = refused("tools are not supported", [])
_OTHERS: dict[str, Field] = {
    "name": string(256),
    "refusal": refused("only messages with content are read"),
    "audio": refused("text only"),
    "tool_calls": _NO_TOOLS,
    "tool_call_id": _NO_TOOLS,
    "function_call": _NO_TOOLS,
}

MESSAGE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["role", "content"],
    "additionalProperties": False,
    "properties": {
        "role": {"enum": list(_ROLES)},
        "content": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": MAX_PARTS,
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                        "additionalProperties": False,
                    },
                },
            ]
        },
        "name": {"anyOf": [{"type": "string", "maxLength": 256}, {"type": "null"}]},
        **{name: {"type": "null"} for name in _OTHERS if name != "name"},
    },
}


def check_messages(name: str, value: Any) -> tuple[dict[str, str], ...]:
    """Messages as templates take them: role, content (one string), name. `developer` is `system` in another word."""
    if type(value) is not list:
        raise wrong_type(name, value, "an array of messages")
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise BadRequest(f"{name} has {len(value)} messages: 1 to {MAX_MESSAGES} are allowed", param=name)
    return tuple([_message(f"{name}[{i}]", message) for i, message in enumerate(value)])


def _message(name: str, message: Any) -> dict[str, str]:
    if type(message) is not dict:
        raise wrong_type(name, message, "an object with role and content")
    out = {}
    for key, value in message.items():
        if key == "role":
            out["role"] = _role(f"{name}.role", value)
        elif key == "content":
            out["content"] = value if type(value) is str else _parts(f"{name}.content", value)
        elif key not in _OTHERS:
            hint = did_you_mean(key, ("role", "content", *_OTHERS))
            raise BadRequest(
                f"unknown field {name}.{key[:64]}{hint}", param=f"{name}.{key[:64]}", code="unknown_parameter"
            )
        elif value is not None and (kept := _OTHERS[key].rule(f"{name}.{key}", value)) is not None:
            out[key] = kept
    for key in ("role", "content"):
        if key not in out:
            raise BadRequest(f"{name}.{key} is missing", param=f"{name}.{key}", code="missing_required_parameter")
    return out


def _role(name: str, value: Any) -> str:
    role = _ROLES.get(value) if type(value) is str else None
    if role is not None:
        return role
    if type(value) is not str:
        raise wrong_type(name, value, "a string")
    if value in _TOOL_ROLES:
        raise BadRequest(f"{name}={value!r}: tools are not supported", param=name, code="unsupported_value")
    raise BadRequest(f"{name}={show(value)}: {', '.join(_ROLES)} are supported", param=name)


def _parts(name: str, value: Any) -> str:
    """Text parts, joined by line breaks."""
    if type(value) is not list:
        raise wrong_type(name, value, "a string or an array of text parts")
    if not 1 <= len(value) <= MAX_PARTS:
        raise BadRequest(f"{name} has {len(value)} parts: 1 to {MAX_PARTS} are allowed", param=name)
    texts = []
    for i, part in enumerate(value):
        where = f"{name}[{i}]"
        if type(part) is not dict:
            raise wrong_type(where, part, "an object with type and text")
        kind = part.get("type")
        if kind != "text":
            raise BadRequest(
                f"{where}.type={show(kind)}: only text parts are supported (no images, audio or files)",
                param=f"{where}.type",
                code="unsupported_value",
            )
        if type(part.get("text")) is not str:
            raise BadRequest(f"{where}.text must be a string", param=f"{where}.text", code="invalid_type")
        if len(part) > 2:
            other = next(k for k in part if k not in ("type", "text"))[:64]
            raise BadRequest(f"unknown field {where}.{other}", param=f"{where}.{other}", code="unknown_parameter")
        texts.append(part["text"])
    return "\n".join(texts)
