"""A LaunchCommand as text for people: quoted so that a shell takes it back, a reason beside every word. Pure."""

from __future__ import annotations

import shlex

from .mpi import LaunchCommand

HIDDEN = "(set by laddertron, not shown)"


def render(command: LaunchCommand, title: str) -> str:
    """A comment for each choice, an `export` for each variable, then the command, one choice a line. Secrets are named
    and never shown."""
    shown = [(_words(words), reason) for words, reason in command.comments]
    width = min(48, max((len(words) for words, _ in shown), default=0))
    lines = [f"# {title}"]
    lines += [f"#   {words:<{width}}  {reason}" for words, reason in shown]
    for name, variable in command.variables.items():
        if name in command.secrets:
            lines.append(f"# {name} {HIDDEN}")
        else:
            lines.append(f"export {name}={shlex.quote(variable.value)}  # {variable.reason}")
    lines.append(" \\\n  ".join(shlex.join(part.words) for part in command.parts))
    return "\n".join(lines)


def _words(words: tuple[str, ...]) -> str:
    text = shlex.join(words)
    return text if len(text) <= 48 else text[:47] + "…"
