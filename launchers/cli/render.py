"""A LaunchCommand as text for people: quoted so that a shell takes it back, a reason beside every word. Pure."""

from __future__ import annotations

import shlex

from ..compose.mpi import LaunchCommand


def render(command: LaunchCommand, title: str) -> str:
    """A comment for each choice, an `export` for each variable, then the command, one choice a line. What
    laddertron adds at start is named, not shown."""
    shown = [(_words(part.words), part.reason) for part in command.parts]
    width = min(48, max((len(words) for words, _ in shown), default=0))
    lines = [f"# {title}"]
    lines += [f"#   {words:<{width}}  {reason}" for words, reason in shown]
    for name, variable in command.variables.items():
        lines.append(f"export {name}={shlex.quote(variable.value)}  # {variable.reason}")
    lines += [f"# {name} as it is in this shell" for name in command.inherited]
    lines += [f"# {name} is set by laddertron when it starts this" for name in command.forward]
    lines.append(" \\\n  ".join(shlex.join(part.words) for part in command.parts))
    return "\n".join(lines)


def _words(words: tuple[str, ...]) -> str:
    text = shlex.join(words)
    return text if len(text) <= 48 else text[:47] + "…"
