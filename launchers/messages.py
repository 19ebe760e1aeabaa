"""What the daemon and the ranks say to each other: frozen data, and its checked JSON form.

`to_wire` and `from_wire` are each other's inverse; from_wire raises SchemaError on anything else (unknown type or
field, wrong kind, out of bounds). `RANK_SAYS` and `SERVER_SAYS` list who may send what. Request and TokensEvent have
their JSON form in `wire_requests.py`. Knows no sockets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ..engine.request import ModelLimits, Request, TokensEvent
from .checked import Fields, SchemaError
from .wire_requests import (
    MAX_ID,
    event_from_wire,
    event_to_wire,
    limits_from_wire,
    limits_to_wire,
    request_from_wire,
    request_to_wire,
)

MAX_WORLD = 65536
MAX_TEXT = 1 << 20
MAX_EVENTS = 65536
MAX_SERIES = 4096
_MAX_INT = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Welcome:
    """Server -> rank, first: what to run. `config` is the resolved configuration as JSON text."""

    config: str
    replica: int
    world_size: int
    version: str


@dataclass(frozen=True, slots=True)
class Ping:
    """Server -> rank, every second: the channel is alive."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Server -> rank 0."""

    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """Server -> rank 0: every choice of the request ends with finish "cancelled"."""

    request_id: str


@dataclass(frozen=True, slots=True)
class StopChoice:
    """Server -> rank 0: a stop string matched, the choice ends with finish "stop" after n_tokens."""

    request_id: str
    choice: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Server -> rank 0: no more requests will come."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Server -> every rank: end in order; from now on the end of the channel is no accident."""


@dataclass(frozen=True, slots=True)
class Dump:
    """Server -> every rank: answer with a DumpReply of the same id. The client does that by itself."""

    dump_id: int


@dataclass(frozen=True, slots=True)
class Hello:
    """Rank -> server, in answer to Welcome: who I am. `boot_id` and `start_time` (ticks since boot, /proc/self/stat)
    tell this very process from a later one with its pid."""

    rank: int
    local_rank: int
    hostname: str
    pid: int
    start_time: int
    boot_id: str
    version: str


@dataclass(frozen=True, slots=True)
class Announce:
    """Rank -> server: digests that must be the same on every rank, by name (config, weights, ...)."""

    digests: dict[str, str]


@dataclass(frozen=True, slots=True)
class Loading:
    """Rank -> server: `fraction` of the start-up is done; `detail` says what it is doing."""

    fraction: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """Rank -> server: loaded and waiting for steps."""

    limits: ModelLimits


@dataclass(frozen=True, slots=True)
class Tokens:
    """Rank 0 -> server: what all ranks agreed on."""

    events: tuple[TokensEvent, ...]


@dataclass(frozen=True, slots=True)
class Running:
    """Rank 0 -> server: requests that enter the coming step for the first time, and those put back to wait."""

    started: tuple[str, ...] = ()
    parked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Beat:
    """Rank -> server, every second, from a thread of its own. Times in seconds.

    `step` counts finished steps. `busy_s` is the time since the last progress, inside a step or between two, 0 when
    waiting for work; `step_tokens` the tokens of the step under way, 0 outside one. `last_tokens` and `last_s` describe
    the last finished step: step timeouts are derived from them. `collective` counts the collectives started, in program
    order; `waiting` names the one that the rank waits in ("" if it computes)."""

    step: int = 0
    busy_s: float = 0.0
    step_tokens: int = 0
    last_tokens: int = 0
    last_s: float = 0.0
    collective: int = 0
    waiting: str = ""
    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """Rank -> server, its last word. `consequence`: it only suffers from another rank's end (a collective failed).
    `refused`: the model or the configuration cannot be run, now or later."""

    text: str
    consequence: bool = False
    refused: bool = False


@dataclass(frozen=True, slots=True)
class DumpReply:
    """Rank -> server: stacks by thread name, and what the worker adds (its last collectives)."""

    dump_id: int
    data: dict[str, Any]


Command = Submit | Cancel | StopChoice | Drain | Shutdown
"""What `ControlClient.poll` returns."""
ServerMessage = Welcome | Ping | Submit | Cancel | StopChoice | Drain | Shutdown | Dump
RankMessage = Hello | Announce | Loading | Ready | Tokens | Running | Beat | Failure | DumpReply
Message = ServerMessage | RankMessage
Direction = Literal["server", "rank"]

SERVER_SAYS = frozenset({"welcome", "ping", "submit", "cancel", "stop_choice", "drain", "shutdown", "dump"})
RANK_SAYS = frozenset({"hello", "announce", "loading", "ready", "tokens", "running", "beat", "failure", "dump_reply"})


def to_wire(message: Message) -> dict[str, Any]:
    """As plain JSON values."""
    match message:
        case Tokens(events):
            return {"type": "tokens", "events": [event_to_wire(event) for event in events]}
        case Beat():
            return {"type": "beat", **{name: getattr(message, name) for name in Beat.__slots__}}
        case Submit(request):
            return {"type": "submit", "request": request_to_wire(request)}
        case Cancel(request_id):
            return {"type": "cancel", "request_id": request_id}
        case StopChoice(request_id, choice, n_tokens):
            return {"type": "stop_choice", "request_id": request_id, "choice": choice, "n_tokens": n_tokens}
        case Running(started, parked):
            return {"type": "running", "started": list(started), "parked": list(parked)}
        case Ready(limits):
            return {"type": "ready", "limits": limits_to_wire(limits)}
        case _:
            # the rest are flat: text, numbers, one mapping
            return {"type": _WORDS[type(message)], **{name: getattr(message, name) for name in message.__slots__}}


def from_wire(data: dict[str, Any], sender: Direction) -> Message:
    """Raises SchemaError for what `sender` may not say or says wrongly."""
    word = data.get("type")
    if not isinstance(word, str) or word not in (SERVER_SAYS if sender == "server" else RANK_SAYS):
        raise SchemaError(f"{sender} said {str(word)[:40]!r}, which is no message of its")
    fields = Fields(data, word)
    fields.raw("type")
    message = _from_rank(word, fields) if sender == "rank" else _from_server(word, fields)
    fields.done()
    return message


def _from_server(word: str, f: Fields) -> ServerMessage:
    match word:
        case "submit":
            return Submit(request_from_wire(f.raw("request")))
        case "cancel":
            return Cancel(f.text("request_id", MAX_ID))
        case "stop_choice":
            return StopChoice(
                f.text("request_id", MAX_ID), f.integer("choice", 0, _MAX_INT), f.integer("n_tokens", 0, _MAX_INT)
            )
        case "welcome":
            return Welcome(
                f.text("config", 16 * MAX_TEXT),
                f.integer("replica", 0, MAX_WORLD),
                f.integer("world_size", 1, MAX_WORLD),
                f.text("version", 64),
            )
        case "ping":
            return Ping()
        case "drain":
            return Drain()
        case "shutdown":
            return Shutdown()
        case _:
            return Dump(f.integer("dump_id", 0, _MAX_INT))


def _from_rank(word: str, f: Fields) -> RankMessage:
    match word:
        case "tokens":
            return Tokens(tuple(event_from_wire(item) for item in f.items("events", MAX_EVENTS)))
        case "beat":
            return _beat(f)
        case "running":
            return Running(f.texts("started", MAX_EVENTS, MAX_ID), f.texts("parked", MAX_EVENTS, MAX_ID))
        case "hello":
            return _hello(f)
        case "announce":
            digests = f.raw("digests")
            if not isinstance(digests, dict) or len(digests) > 64:
                raise SchemaError("announce: digests is not a mapping of at most 64 texts")
            if not all(len(k) <= 64 and isinstance(v, str) and len(v) <= 256 for k, v in digests.items()):
                raise SchemaError("announce: digests is not a mapping of short names to texts")
            return Announce(digests)
        case "loading":
            return Loading(f.number("fraction"), f.text("detail", MAX_ID))
        case "ready":
            return Ready(limits_from_wire(f.raw("limits")))
        case "failure":
            return Failure(f.text("text", MAX_TEXT), f.flag("consequence"), f.flag("refused"))
        case _:
            reply = f.raw("data")
            if not isinstance(reply, dict):
                raise SchemaError("dump_reply: data is not an object")
            return DumpReply(f.integer("dump_id", 0, _MAX_INT), reply)


def _hello(f: Fields) -> Hello:
    return Hello(
        f.integer("rank", 0, MAX_WORLD),
        f.integer("local_rank", 0, MAX_WORLD),
        f.text("hostname", MAX_ID),
        f.integer("pid", 1, 2**31 - 1),
        f.integer("start_time", 0, _MAX_INT),
        f.text("boot_id", 64),
        f.text("version", 64),
    )


def _beat(f: Fields) -> Beat:
    return Beat(
        f.integer("step", 0, _MAX_INT),
        f.number("busy_s"),
        f.integer("step_tokens", 0, _MAX_INT),
        f.integer("last_tokens", 0, _MAX_INT),
        f.number("last_s"),
        f.integer("collective", 0, _MAX_INT),
        f.text("waiting", 256),
        f.numbers("counters", MAX_SERIES),
        f.numbers("gauges", MAX_SERIES),
    )


_WORDS: dict[type, str] = {
    Welcome: "welcome",
    Ping: "ping",
    Drain: "drain",
    Shutdown: "shutdown",
    Dump: "dump",
    Hello: "hello",
    Announce: "announce",
    Loading: "loading",
    Failure: "failure",
    DumpReply: "dump_reply",
}
