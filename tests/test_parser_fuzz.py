"""Parsers of foreign bytes under mutated input: each takes it or says what is wrong, in bounded time and memory.

`make test` runs a small share, `make fuzz-parsers` 100,000 cases a parser. LADDERTRON_SEED
repeats a run.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from laddertron.engine.config.load import ConfigError
from laddertron.engine.config.load import load as load_deployment
from laddertron.engine.daemon.http.connections import ServerOptions, Slot
from laddertron.engine.daemon.http.forms import FormReader
from laddertron.engine.daemon.http.server import make_server
from laddertron.engine.openai.batch_input import check_line
from laddertron.engine.openai.errors import ApiError
from laddertron.engine.text.tokenizer import TextError, TextModel
from laddertron.launchers.control import frames
from laddertron.launchers.control.messages import from_wire
from laddertron.models.config.model_config import from_folder
from laddertron.models.weights.checkpoint import CheckpointError, read_folder, read_header
from laddertron.topology.cost import tuning
from laddertron.topology.cost.cost import Shape
from laddertron.topology.cost.prices import reference
from laddertron.topology.hardware import fabric
from laddertron.topology.json_codec import ReadError
from tiny_text import byte_level

ROOT = Path(__file__).parents[1]
CASES = int(os.environ.get("LADDERTRON_FUZZ_CASES", "200"))  # a parser
CPU_SECONDS = 5.0
MEMORY_KIB = 1 << 20
TOKENS = (
    *(b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"-1", b"0", b"1.5", b"99999999999999999999999", b"[]", b"{}"),
    *(b'""', b"[" * 5000, b'{"a":' * 5000, b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\x00", b"\r\n", b"a" * 9000),
    *(b"9" * 5000, b"&a [*a, *a]", b"!!python/object:os.system", b"2147483648", b"..", b"/", b'"', b",", b":"),
)


def mutated(seed: bytes, rng: random.Random) -> bytes:
    """One to four changes: bytes, pieces, tokens in the place of words and numbers, an end too soon."""
    data = bytearray(seed)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        to = min(len(data), at + rng.choice((1, 2, 8, 64)))
        match rng.randrange(6):
            case 0:
                data[at:to] = rng.randbytes(to - at)
            case 1:
                del data[at:to]
            case 2:
                data[at:at] = data[at:to] * rng.choice((1, 3, 50))
            case 3:
                data[at:at] = rng.choice(TOKENS)
            case 4:
                while at < len(data) and not chr(data[at]).isalnum():
                    at += 1
                to = at
                while to < len(data) and chr(data[to]).isalnum():
                    to += 1
                data[at:to] = rng.choice(TOKENS)
            case 5:
                if rng.random() < 0.2:
                    del data[at:]
    return bytes(data)


@dataclass(frozen=True)
class Parser:
    """What takes bytes (files under a folder), examples that it takes, and how it may refuse."""

    call: Callable[[bytes, Path], object]
    seeds: tuple[bytes, ...]
    refusals: tuple[type[Exception], ...]


def of_file(name: str, call: Callable[[Path], object], folder: bool = False) -> Callable[[bytes, Path], object]:
    def run(data: bytes, where: Path) -> object:
        (where / name).write_bytes(data)
        return call(where if folder else where / name)

    return run


def message_of(data: bytes, _: Path = ROOT) -> object:
    """A message of a peer that is known, whatever its length, from either side."""
    try:
        return from_wire(data, "rank")
    except ReadError:
        return from_wire(data, "server")


def frames_of(data: bytes, _: Path) -> None:
    reader = frames.FrameReader()
    reader.feed(data)
    while (payload := reader.next()) is not None:
        message_of(payload)


def line_of(data: bytes, _: Path) -> None:
    if (error := check_line(data).error) is not None:
        raise error


class Wire(asyncio.Transport):
    """A connection's other end: keeps what the server writes."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written, self.closed = bytearray(), False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def answered(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


SERVER = make_server(answered, ServerOptions())


def http_head(data: bytes, _: Path) -> None:
    """Bytes as a connection brings them, in two pieces: each answer is whole, 200 or the client's doing."""

    async def connection() -> None:
        failed: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
        wire: Any = Wire()
        protocol = SERVER.protocol(Slot("", wire.close))
        protocol.connection_made(wire)
        for piece in (data[: len(data) // 3], data[len(data) // 3 :]):
            if piece and not wire.closed:
                protocol.data_received(piece)
                for _ in range(4):
                    await asyncio.sleep(0)
        protocol.connection_lost(None)
        for _ in range(4):
            await asyncio.sleep(0)
        assert not failed, failed
        for head in wire.written.split(b"HTTP/1.1 ")[1:]:
            assert bytes(head[:3]) in (b"200", b"400", b"431", b"100"), bytes(wire.written[:200])

    asyncio.run(connection())


HEADS = (
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nhelloGET / HTTP/1.1\r\nhost: a\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\n3;a\r\nabc\r\n0\r\n\r\n",
    b"GET /metrics?a=%20b HTTP/1.0\r\nConnection: keep-alive\r\nauthorization: Bearer x\r\n folded\r\n\r\n",
)


def safetensors() -> bytes:
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "b.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        }
    ).encode()
    return struct.pack("<Q", len(header)) + header + bytes(32)


def indexed(folder: Path) -> object:
    """A folder whose index is foreign, beside the one file that it names."""
    (folder / "model-1.safetensors").write_bytes(safetensors())
    return read_folder(folder)


def tuned() -> bytes:
    shape = Shape(2, 2)
    measured = tuning.Tuning(
        backend="native",
        fabric="0" * 64,
        traits=({"host": "a"}, {"host": "b"}),
        versions={"torch": "2"},
        shape=shape,
        choices=(tuning.Choice(4096, "flat"), tuning.Choice(None, "two_level")),
        costs=reference("native", shape),
        points=(tuning.Measured("flat", 4096, 1e-5),),
    )
    with tempfile.TemporaryDirectory() as folder:
        measured.save(Path(folder) / "tuning.json")
        return (Path(folder) / "tuning.json").read_bytes()


def framed(*messages: object) -> bytes:
    texts = [json.dumps(message).encode() for message in messages]
    return b"".join(struct.pack(">I", len(text)) + text for text in texts)


def line(url: str, **body: Any) -> bytes:
    return json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": {"model": "m", **body}}).encode()


WIRE = json.loads((ROOT / "tests/golden/snapshots/wire.json").read_text(encoding="utf-8"))
WIRE_MESSAGES = [json.loads(one["payload"]) for one in WIRE["messages"]]
LINES = (
    line("/v1/completions", prompt=[1, 2, 3], max_tokens=8, temperature=0.5, logit_bias={"3": -1.5}, stop=["a", "b"]),
    line("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=2, n=2),
    line(
        "/v1/completions",
        prompt=["a", "b"],
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
    ),
)
FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}\n\r\n--b--\r\n'
)


def form(data: bytes, _: Path) -> None:
    parser = FormReader(b"b", lambda part: None)
    for at in range(0, len(data), 7):
        parser.feed(data[at : at + 7])
    parser.close()


PARSERS = {
    "safetensors": Parser(of_file("m.safetensors", read_header), (safetensors(),), (CheckpointError,)),
    "weights_index": Parser(
        of_file("model.safetensors.index.json", indexed, folder=True),
        (b'{"metadata": {}, "weight_map": {"a.weight": "model-1.safetensors", "b.weight": "model-1.safetensors"}}',),
        (CheckpointError,),
    ),
    "tokenizer": Parser(
        of_file("tokenizer.json", TextModel.from_folder, folder=True), (byte_level().to_str().encode(),), (TextError,)
    ),
    "model_config": Parser(
        of_file("config.json", from_folder, folder=True),
        ((ROOT / "configs/demo/demo-ladder/config.json").read_bytes(),),
        (ValueError, OSError),
    ),
    "batch_line": Parser(line_of, LINES, (ApiError,)),
    "form": Parser(form, (FORM,), (ValueError,)),
    "control_frames": Parser(
        frames_of,
        (framed(*WIRE_MESSAGES[:8]), framed(*WIRE_MESSAGES[8:])),
        (frames.FrameError, ReadError),
    ),
    "control_messages": Parser(message_of, tuple(json.dumps(one).encode() for one in WIRE_MESSAGES), (ReadError,)),
    "http_head": Parser(http_head, HEADS, ()),
    "fabric": Parser(
        of_file("fabric.json", fabric.load),
        tuple(path.read_bytes() for path in sorted((ROOT / "tests/fixtures/fabrics").glob("[cp]*.json"))),
        (ValueError,),
    ),
    "tuning": Parser(of_file("tuning.json", tuning.load), (tuned(),), (ValueError,)),
    "deployment": Parser(
        of_file("deploy.yaml", load_deployment),
        tuple((ROOT / "configs" / name).read_bytes() for name in ("demo.yaml", "405b/stock.yaml")),
        (ConfigError,),
    ),
}


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_takes_it_or_says_what_is_wrong(name: str, tmp_path: Path, run_seed: int) -> None:
    parser, rng, took = PARSERS[name], random.Random(run_seed), 0
    for seed in parser.seeds:
        parser.call(seed, tmp_path)  # a refused example would never let a case past the first guard
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in range(CASES):
        data, began = mutated(rng.choice(parser.seeds), rng), time.process_time()
        try:
            parser.call(data, tmp_path)
            took += 1
        except parser.refusals:
            pass
        except BaseException as error:  # a library's panic is none of Exception's
            (tmp_path / "case").write_bytes(data)
            pytest.fail(f"case {case}: {type(error).__name__}: {str(error)[:300]}: {data[:300]!r}")
        spent = time.process_time() - began
        assert spent < CPU_SECONDS, f"case {case}: {spent:.1f} s for {data[:300]!r}"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"{name}: {CASES} cases, {took} taken, {grown / 1024:.0f} MiB more")
    assert grown < MEMORY_KIB
