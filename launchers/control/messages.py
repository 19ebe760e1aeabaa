"""Messages between a job's owner and its ranks: frozen data and its checked JSON form. from_wire raises ReadError for
an unknown type or field, a wrong kind, a value out of bounds, or a message that this sender may not send.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar, cast

from annotated_types import Ge, Lt, MaxLen
from pydantic import Discriminator, StringConstraints

from ...engine.job import MetricRow
from ...engine.request import (
    Count,
    ModelLimits,
    Name,
    Request,
    SamplingParams,
    Size,
    TokenLogprob,
    TokensEvent,
    params_to_json,
)
from ...models.weights.identity import Sample
from ...topology import json_codec
from ...topology.placement.machines import MAX_ADDRESSES, Machine

MAX_TEXT = 1 << 20
MAX_EVENTS = 65536
MAX_NAME = 512
MAX_WAITING = 256
MAX_MESSAGE = 4096
LOWEST_LOGPROB = -9999.0
"""The JSON value of the logprob of a masked token, as in OpenAI's API: JSON has no infinity."""

Index = Annotated[int, Ge(0), Lt(65536)]
Pid = Annotated[int, Ge(1), Lt(2**31)]
Descriptor = Annotated[int, Ge(-1), Lt(2**31)]
ShortText = Annotated[str, MaxLen(64)]
Hex = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]


SILENCE_S = 10.0
"""The shortest silence after which a rank exits."""


@dataclass(frozen=True, slots=True)
class Challenge:
    """Server -> unauthenticated peer, first."""

    nonce: Hex


@dataclass(frozen=True, slots=True)
class Answer:
    """Unauthenticated peer -> server. `pulse`: a second connection of the rank, on which it sends only Pulse and gets
    only Ping."""

    nonce: Hex
    rank: Index
    mac: Hex
    pulse: bool = False


@dataclass(frozen=True, slots=True)
class Proof:
    """Server -> rank; later frames are sealed."""

    mac: Hex


@dataclass(frozen=True, slots=True)
class Welcome:
    """Server -> rank, first: what to run. `config`: the resolved configuration as JSON text. `standby`: start without
    weights, send Standing, and wait for Load. `silence_s`: the rank must exit if it receives nothing for this long."""

    type: Literal["welcome"] = field(default="welcome", kw_only=True)
    config: Annotated[str, MaxLen(16 * MAX_TEXT)]
    replica: Index
    peers: Size
    version: ShortText
    standby: bool = False
    silence_s: float = SILENCE_S


@dataclass(frozen=True, slots=True)
class Assembled:
    """Server -> every rank: each rank of the job is connected, so none waits in MPI for one that has not started.
    `hosts`: the hostname of each."""

    type: Literal["assembled"] = field(default="assembled", kw_only=True)
    hosts: Annotated[tuple[Name, ...], MaxLen(65536)] = ()


@dataclass(frozen=True, slots=True)
class Doors:
    """Server -> every rank: where each rank listens for the others' tests, once all do."""

    type: Literal["doors"] = field(default="doors", kw_only=True)
    places: Annotated[tuple[Name, ...], MaxLen(65536)]


@dataclass(frozen=True, slots=True)
class Load:
    """Server -> every standby rank: load the weights and serve."""

    type: Literal["load"] = field(default="load", kw_only=True)


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Server -> a standby rank: the process on its host that retains its packed weights in a memfd, and the descriptor
    (see Ready)."""

    type: Literal["held_weights"] = field(default="held_weights", kw_only=True)
    pid: Pid
    start_time: Count
    file: Descriptor


@dataclass(frozen=True, slots=True)
class Ping:
    """Server -> rank, every second, to show that the channel works."""

    type: Literal["ping"] = field(default="ping", kw_only=True)


@dataclass(frozen=True, slots=True)
class Submit:
    """Server -> rank 0."""

    type: Literal["submit"] = field(default="submit", kw_only=True)
    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """Server -> rank 0: every choice of the request ends with finish "cancelled"."""

    type: Literal["cancel"] = field(default="cancel", kw_only=True)
    request_id: Name


@dataclass(frozen=True, slots=True)
class StopChoice:
    """Server -> rank 0: a stop string matched, the choice ends with finish "stop" after n_tokens."""

    type: Literal["stop_choice"] = field(default="stop_choice", kw_only=True)
    request_id: Name
    choice: Count
    n_tokens: Count


@dataclass(frozen=True, slots=True)
class Drain:
    """Server -> rank 0: no more requests will be submitted."""

    type: Literal["drain"] = field(default="drain", kw_only=True)


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Server -> every rank: shut down; the end of the channel is no error from now on."""

    type: Literal["shutdown"] = field(default="shutdown", kw_only=True)


@dataclass(frozen=True, slots=True)
class Dump:
    """Server -> every rank: reply with a DumpReply of the same id. ControlClient does that by itself."""

    type: Literal["dump"] = field(default="dump", kw_only=True)
    dump_id: Count


@dataclass(frozen=True, slots=True)
class Hello:
    """Rank -> server, in reply to Welcome: the identity of the rank's process. `boot_id` and `start_time` (ticks since
    boot, /proc/self/stat) distinguish it from a later process with the same pid; `hostname`, `boot_id` and `addresses`
    are its Machine's; `memory_limit`: bytes that its cgroups allow, 0: without a limit."""

    type: Literal["hello"] = field(default="hello", kw_only=True)
    rank: Index
    local_rank: Index
    hostname: Name
    pid: Pid
    start_time: Count
    boot_id: ShortText
    version: ShortText
    addresses: Annotated[tuple[ShortText, ...], MaxLen(MAX_ADDRESSES)] = ()
    memory_limit: Count = 0

    @property
    def machine(self) -> Machine:
        return Machine(self.hostname, self.boot_id, self.addresses)


@dataclass(frozen=True, slots=True)
class Door:
    """Rank -> server: where it listens for the others' tests of the network, as `address port`."""

    type: Literal["door"] = field(default="door", kw_only=True)
    place: Name


@dataclass(frozen=True, slots=True)
class Announce:
    """Rank -> server: what it has read of the model so far, before and after it loads. digests: by name (config, the
    model's small files, ...), which must be equal on all ranks; samples: of folders of weights, by part, see
    engine/identity.py."""

    type: Literal["announce"] = field(default="announce", kw_only=True)
    digests: Annotated[dict[ShortText, Annotated[str, MaxLen(256)]], MaxLen(64)]
    samples: Annotated[dict[ShortText, Sample], MaxLen(4)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Loading:
    """Rank -> server: `fraction` of the start is done; `detail`: the current activity."""

    type: Literal["loading"] = field(default="loading", kw_only=True)
    fraction: float
    detail: Name = ""


@dataclass(frozen=True, slots=True)
class Standing:
    """Rank -> server: the group is connected, and this rank waits for Load. `resident`: bytes of resident memory;
    `room`: whether its weights and KV cache fit into its device's free memory."""

    type: Literal["standing"] = field(default="standing", kw_only=True)
    resident: Count
    room: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """Rank -> server: loaded and waiting for steps. `file`: its descriptor of the memfd with its packed weights, for
    ranks of a hot standby; -1: none."""

    type: Literal["ready"] = field(default="ready", kw_only=True)
    limits: ModelLimits
    file: Descriptor = -1


@dataclass(frozen=True, slots=True)
class Tokens:
    """Rank 0 -> server: tokens on which all ranks agreed."""

    type: Literal["tokens"] = field(default="tokens", kw_only=True)
    events: Annotated[tuple[TokensEvent, ...], MaxLen(MAX_EVENTS)]


@dataclass(frozen=True, slots=True)
class Running:
    """Rank 0 -> server: requests that enter the next step for the first time, and preempted ones."""

    type: Literal["running"] = field(default="running", kw_only=True)
    started: Annotated[tuple[Name, ...], MaxLen(MAX_EVENTS)] = ()
    parked: Annotated[tuple[Name, ...], MaxLen(MAX_EVENTS)] = ()


@dataclass(frozen=True, slots=True)
class Beat:
    """Rank -> server, every second, from a separate thread. Times in seconds. `step` counts finished steps;
    `last_tokens` and `last_s` describe the last one: step timeouts are derived from them. `busy_s`: since the last
    progress, 0 when waiting for work; `step_tokens`: of the running step, 0 outside one. `collective` counts started
    collectives, in program order; `waiting` names the one in which the rank waits ("" if none)."""

    type: Literal["beat"] = field(default="beat", kw_only=True)
    step: Count = 0
    busy_s: float = 0.0
    step_tokens: Count = 0
    last_tokens: Count = 0
    last_s: float = 0.0
    collective: Count = 0
    waiting: Annotated[str, MaxLen(MAX_WAITING)] = ""
    rows: Annotated[tuple[MetricRow, ...], MaxLen(4096)] = ()


@dataclass(frozen=True, slots=True)
class Pulse:
    """Rank -> server, on a connection of its own, while its heartbeats are late: the process computes, or its threads
    wait for a processor. Sent by a thread without Python (pulse.c)."""

    type: Literal["pulse"] = field(default="pulse", kw_only=True)


@dataclass(frozen=True, slots=True)
class Failure:
    """Rank -> server, last. `consequence`: another rank failed first. `refused`: the model or configuration cannot
    run. `unreached`: the rank that this one cannot connect to, or (a consequence) whose data did not come; -1 for
    another failure."""

    type: Literal["failure"] = field(default="failure", kw_only=True)
    text: Annotated[str, MaxLen(MAX_TEXT)]
    consequence: bool = False
    refused: bool = False
    unreached: Annotated[int, Ge(-1), Lt(65536)] = -1


@dataclass(frozen=True, slots=True)
class DumpReply:
    """Rank -> server: stacks by thread name, and the worker's additions (its last collectives)."""

    type: Literal["dump_reply"] = field(default="dump_reply", kw_only=True)
    dump_id: Count
    data: dict[str, Any]


StateMessage = Door | Announce | Loading | Standing | Ready | Running
"""A rank's state."""
Command = Load | HeldWeights | Submit | Cancel | StopChoice | Drain | Shutdown
"""Messages that `ControlClient.poll` returns."""
ServerMessage = Welcome | Assembled | Doors | Ping | Dump | Command
RankMessage = Hello | StateMessage | Tokens | Beat | Pulse | Failure | DumpReply
Message = ServerMessage | RankMessage
Direction = Literal["server", "rank"]


_FROM: dict[Direction, Any] = {
    "server": Annotated[ServerMessage, Discriminator("type")],
    "rank": Annotated[RankMessage, Discriminator("type")],
}
M = TypeVar("M", Challenge, Answer, Proof)


def to_wire(message: Message | Challenge | Answer | Proof) -> bytes:
    """Encodes a message. Raises ValueError for non-finite numbers, except log-probabilities."""
    if type(message) is Submit:
        from pydantic_core import to_json  # a third of the time for a prompt of a million ids

        rest = _encoder.encode(Submit(replace(message.request, prompt=()))).encode()
        return rest.replace(b'"prompt":[]', b'"prompt":%b' % to_json(message.request.prompt), 1)
    return _encoder.encode(message).encode()


def from_wire(payload: bytes, sender: Direction) -> Message:
    """Decodes a message. Raises ReadError for one that `sender` may not send, or an invalid one."""
    return cast("Message", json_codec.from_json(_FROM[sender], payload))


def from_unproven(cls: type[M], payload: bytes) -> M:
    """Decodes a message of a peer that is not authenticated yet. Raises ReadError."""
    return json_codec.build(cls, json_codec.parse(payload))


def _plain(value: Any) -> dict[str, Any]:
    """A dataclass's fields; frequent messages leave out fields that have their defaults."""
    if type(value) is TokensEvent:
        return _event(value)
    if type(value) is SamplingParams:
        return params_to_json(value)
    return {name: getattr(value, name) for name in value.__slots__}


def _event(event: TokensEvent) -> dict[str, Any]:
    # by hand: each step has an event a sequence, and comparing every field with its default costs five times as much
    data: dict[str, Any] = {
        "request_id": event.request_id,
        "choice": event.choice,
        "start": event.start,
        "tokens": event.tokens,
    }
    if event.finish is not None:
        data["finish"] = event.finish
    if event.stop_token is not None:
        data["stop_token"] = event.stop_token
    if event.message is not None:
        data["message"] = event.message[:MAX_MESSAGE]
    if event.cached_tokens:
        data["cached_tokens"] = event.cached_tokens
    if event.logprobs is not None:
        data["logprobs"] = [_finite(item) for item in event.logprobs]
    if event.prompt_logprobs is not None:
        data["prompt_logprobs"] = [item and _finite(item) for item in event.prompt_logprobs]
    return data


def _finite(item: TokenLogprob) -> TokenLogprob:
    return TokenLogprob(
        item.token,
        _bounded(item.logprob),
        tuple([(token, _bounded(value)) for token, value in item.top]),
        item.digest,
    )


def _bounded(logprob: float) -> float:
    return logprob if LOWEST_LOGPROB < logprob < -LOWEST_LOGPROB else LOWEST_LOGPROB


_encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False, default=_plain)
