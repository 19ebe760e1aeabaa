"""One launch of a job, from mpirun's start to its last process's exit: control server, keeper, deadlines. The ranks may
have been started from outside (`OuterRanks`). rank_board.py interprets messages, replica.py decides whether to launch
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ... import __version__
from ...engine import child
from ...engine.identity import ModelIdentity
from ...engine.job import RankHeartbeat
from ...topology.placement.machines import boot_id
from ..compose.host_names import HostNames
from ..compose.mpi import LaunchCommand
from ..control import messages, processes
from ..control.control import ENV_ADDRESS, ENV_SECRET, ControlThread, new_secret
from . import missing
from .causes import StartOutput
from .detect import SAME_FILES, Evidence, JobFailure, no_launch
from .keeper import under_keeper
from .options import JobOptions
from .rank_board import NODE_LOST, News, RankBoard

log = logging.getLogger(__name__)

TICK_S = 0.25
LAST_WORDS_S = 2.0
LEAVING_S = 10.0
"""For ranks that this process has not started to leave the channel after Shutdown."""
_LINE_LIMIT = 8192


LauncherOutput = News | messages.Tokens | messages.Running | RankHeartbeat


@dataclass(frozen=True, slots=True)
class OuterRanks:
    """The ranks of a launch inside an outer mpirun, srun or torchrun, which starts and ends them."""

    seats: tuple[str, ...]
    """The host of each rank."""
    meet: Callable[[str, bytes], None]
    """Tells them the channel's address and secret."""


class LaunchOwner(Protocol):
    """The job that a launch belongs to."""

    def on_launch_output(self, output: LauncherOutput, node: str | None) -> None:
        """Called on the event loop. The first Evidence ends the launch: `Launch.failure` returns soon after. `node`: of
        the rank that the news is about."""


class Launch:
    """After `begin` it runs until `failure` returns or `end` is called. The owner always calls `end`."""

    def __init__(
        self,
        owner: LaunchOwner,
        command: LaunchCommand | OuterRanks,
        config_json: str,
        options: JobOptions,
        standby: bool = False,
        serving: Launch | None = None,
        identity: ModelIdentity | None = None,
        fix: str = SAME_FILES,
    ) -> None:
        """standby: its ranks wait without weights until `load`, and are sent where the ranks of `serving` retain
        theirs. identity, fix: see RankBoard."""
        self.owner, self._command, self._options = owner, command, options
        self.seats = command.seats
        secret = new_secret()
        welcome = messages.Welcome(
            config_json, options.replica, options.world.size, __version__, standby, options.timeouts.silence_s
        )
        self._secret, self._serving = secret, serving
        self._server = ControlThread(self, secret, welcome, options.control_host, options.ports)
        self._board = RankBoard(
            options.world,
            options.timeouts,
            time.monotonic(),
            command.seats,
            identity,
            fix,
            socket.gethostname(),
        )
        self._keeper: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._trouble, self._exited = asyncio.Event(), asyncio.Event()
        self._ending = False
        self._scratch = ""
        self._dumps: dict[int, dict[str, Any]] = {}
        self._dumped = asyncio.Event()
        self._dump_id = 0
        self._output: deque[tuple[float, str]] = deque(maxlen=60)
        self._start_output = StartOutput()
        self._asked_at = self._late_at = self._late_s = 0.0
        self.sign_at = 0.0
        """Time of the first evidence of its end, in monotonic seconds."""

    async def begin(self) -> JobFailure | None:
        """Starts the launch. Returns the failure if the channel or the keeper cannot be started."""
        command = self._command
        try:
            address = await self._server.start()
            if isinstance(command, OuterRanks):
                self._tasks = [asyncio.create_task(self._watch())]
                command.meet(address, self._secret)
                return None
            environment = {**command.env, ENV_ADDRESS: address, ENV_SECRET: self._secret.hex()}
            self._scratch = tempfile.mkdtemp(prefix="laddertron-")
            self._keeper = await asyncio.create_subprocess_exec(
                *under_keeper(command.argv, self._options.kill_grace_s, self._scratch, stop=command.stop),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                **child.options(environment, stdin=asyncio.subprocess.PIPE),
            )
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread
            await self.end(orderly=False)
            return no_launch(error)
        log.info("launched %s", command.argv[0], extra={"pid": self._keeper.pid})
        reading = asyncio.create_task(self._read_output(self._keeper))
        exiting = asyncio.create_task(self._wait_for_exit(self._keeper, reading, os.path.basename(command.argv[0])))
        self._tasks = [reading, exiting, asyncio.create_task(self._watch())]
        if command.agent and self._options.hosts is not None:
            self._tasks.append(asyncio.create_task(self._ask_missing(command, self._options.hosts, address)))
        return None

    def send(self, message: messages.ServerMessage, rank: int | None = None) -> None:
        self._server.send(message, rank)

    @property
    def healthy(self) -> bool:
        """True if no rank is suspected, and there is no evidence of its end."""
        return self._board.healthy and not self._ending

    @property
    def failing(self) -> bool:
        """True once there is evidence of its end, or it was asked to end."""
        return self._trouble.is_set() or self._ending

    def load(self) -> None:
        """Sends Load to standby ranks; ranks that have not connected yet get it when they do."""
        self._board.load(time.monotonic())
        self._serving = None
        self.send(messages.Load())

    def weights_of(self, rank: int, boot_id: str) -> messages.HeldWeights | None:
        """The retained weights of a serving rank on the host with this boot id; None if there are none."""
        state = self._board.ranks.get(rank)
        if state is None or state.file < 0 or state.hello is None or state.hello.boot_id != boot_id:
            return None
        return messages.HeldWeights(state.hello.pid, state.hello.start_time, state.file)

    async def failure(self) -> JobFailure:
        """Waits for the first evidence of the end, then for a short time for its explanation."""
        await self._trouble.wait()
        hangs = self._board.evidence[0].kind in ("silent", "stalled", "load_stalled")
        self._ask_dumps()  # after a crash the survivors wait in the collective for a moment, and can name it
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.settle_s):
                # after a hang wait for the stacks, after a crash for mpirun's output
                await (self._dumped if hangs else self._exited).wait()
        return self.verdict()

    async def failure_before(self, over: asyncio.Event) -> JobFailure | None:
        """Like `failure`; None if `over` is set first."""
        failing, leaving = asyncio.create_task(self.failure()), asyncio.create_task(over.wait())
        await asyncio.wait([failing, leaving], return_when=asyncio.FIRST_COMPLETED)
        failure = failing.result() if failing.done() else None
        failing.cancel()
        leaving.cancel()
        return failure

    @property
    def explained(self) -> bool:
        """True if mpirun or its keeper was killed, or mpirun lost a node: then no rank is the cause."""
        killed = any(sign.kind == "launcher_killed" for sign in self._board.evidence)
        return killed or any(NODE_LOST in line for _, line in self._output)

    def verdict(self) -> JobFailure:
        status = self._keeper.returncode if self._keeper is not None else None
        exit_code = status if status is None or status >= 0 else 128 - status
        # only lines printed shortly before the end: earlier ones are about other things
        last_words = tuple(line for at, line in self._output if at > self.sign_at - LAST_WORDS_S)
        stood_still = self._late_s if self.sign_at - self._late_at < LAST_WORDS_S else 0.0
        return self._board.judge(exit_code, last_words, dict(self._dumps), stood_still, self._start_output.lines)

    async def dump(self, timeout_s: float) -> dict[int, dict[str, Any]]:
        """Gets stacks and last collectives of every rank that answers in time."""
        self._ask_dumps()
        if not self._server.connected:
            return {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._dumped.wait()
        return dict(self._dumps)

    def describe(self) -> dict[str, Any]:
        """The state of every rank, as JSON values."""
        return {"ranks": self._board.describe(time.monotonic()), "output": [line for _, line in self._output]}

    async def end(self, *, orderly: bool) -> str | None:
        """Ends every process of the launch and waits until they have exited; returns a description of those that could
        not be killed, or None. `orderly`: first sends Shutdown and waits for at most `shutdown_s`; ranks that are
        loading do not read it. Outer ranks always get it, and some seconds to leave the channel: what started them
        ends the others."""
        self._ending, self._asked_at = True, time.monotonic()
        options = self._options
        stuck = list[str]()
        if isinstance(self._command, OuterRanks):
            self.send(messages.Shutdown())
        elif self._keeper is not None:
            if orderly:
                self.send(messages.Shutdown())
                await self._exits_within(options.shutdown_s)
            assert self._keeper.stdin is not None
            self._keeper.stdin.close()
            self._server.finish_sending()
            if not await self._exits_within(options.kill_grace_s + options.gone_s):
                self._keeper.kill()  # it is suspended, or waits for a process that cannot be killed
            stuck = await self._kill_known()
        if isinstance(self._command, OuterRanks):
            await self._server.all_gone(LEAVING_S if orderly else LAST_WORDS_S)
        else:
            for rank in await self._server.all_gone():
                log.warning("%s: no end of its connection was seen: by now it ended itself", self._board.name(rank))
        await self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)  # the keeper did, unless it was killed
        return f"{', '.join(stuck)} cannot be killed" if stuck else None

    async def _exits_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._exited.wait()
        return self._exited.is_set()

    async def _kill_known(self) -> list[str]:
        """Kills ranks on this host that are no descendants of the keeper (Slurm's); returns the names of survivors."""
        here = (socket.gethostname(), boot_id())
        listed: dict[int, processes.ProcessId] = {}
        for rank, state in self._board.ranks.items():
            if (hello := state.hello) is not None and (hello.hostname, hello.boot_id) == here:
                listed[rank] = processes.ProcessId(hello.pid, hello.start_time)
        for process in listed.values():
            processes.kill(process)
        deadline = time.monotonic() + self._options.kill_grace_s
        return [
            self._board.name(rank)
            for rank, process in listed.items()
            if not await asyncio.to_thread(processes.wait_for, process, deadline - time.monotonic())
        ]

    def _ask_dumps(self) -> None:
        self._dump_id += 1
        self._dumps.clear()
        self._dumped.clear()
        self.send(messages.Dump(self._dump_id))

    # messages of ranks

    def on_message(self, rank: int, message: messages.RankMessage) -> None:
        if isinstance(message, messages.Tokens | messages.Running) and rank != 0:
            text = f"it sent {type(message).__name__}, which only rank 0 may"
            self._tell([self._board.sign(Evidence("protocol", rank, text))])
            return
        news = self._board.heard(rank, message, time.monotonic())
        if isinstance(message, messages.Tokens | messages.Running):
            # also after evidence of a failure: these tokens need not be computed again
            self.owner.on_launch_output(message, None)
        elif isinstance(message, messages.Beat):
            if (hello := self._board.ranks[rank].hello) is not None:
                report = RankHeartbeat(rank, hello.hostname, hello.pid, message.step, time.time(), message.rows)
                self.owner.on_launch_output(report, None)
        elif isinstance(message, messages.Hello):
            if self._options.hosts is not None:
                self._board.hosts[rank] = self._options.hosts.contact(self.seats, rank, message.machine)
            where = {"rank": rank, "node": message.hostname}
            log.info("rank %d is pid %d on %s", rank, message.pid, message.hostname, extra=where)
            if self._serving is not None and (retained := self._serving.weights_of(rank, message.boot_id)) is not None:
                self.send(retained, rank)
            if self._board.loads:
                self.send(messages.Load(), rank)
        elif isinstance(message, messages.DumpReply) and message.dump_id == self._dump_id:
            self._dumps[rank] = message.data
            if self._dumps.keys() >= self._server.connected:
                self._dumped.set()
        self._tell(news)

    def on_gone(self, rank: int, reason: str) -> None:
        if not self._ending:
            self._tell(self._board.gone(rank, reason))

    def _tell(self, news: list[News]) -> None:
        for item in news:
            rank = getattr(item, "rank", None)
            node = self._board.node(rank)
            if isinstance(item, Evidence):
                if self._ending:
                    continue
                who = "" if rank is None else f"{self._board.name(rank)}: "
                # NOTE: the owner logs why a launch ended, so refusals and consequences have a lower level here.
                follows = logging.INFO if self._trouble.is_set() else logging.WARNING
                level = logging.DEBUG if item.kind == "refused" else follows
                log.log(level, "%s%s", who, item.text, extra={"rank": rank, "node": node, "kind": item.kind})
                if self._trouble.is_set():
                    continue
                self.sign_at = time.monotonic()
                self._trouble.set()
            self.owner.on_launch_output(item, node)

    async def _ask_missing(self, command: LaunchCommand, names: HostNames, control: str) -> None:
        """Asks the hosts of missing ranks whether they reach this one, so that a blocked port is not waited for."""
        await asyncio.sleep(missing.AFTER_S)
        hosts = {host: rank for rank, host in self._board.missing() if host and not names.is_here(host)}
        where = self._options.control_host, self._options.ports
        try:
            answers = await asyncio.to_thread(missing.ask, command.agent, command.python, [*hosts], *where, control)
        except OSError as error:
            log.warning("hosts whose ranks have not started cannot be asked: %s", error)
            return
        for host, answer in answers.items():
            if answer.fault and self._board.ranks[hosts[host]].hello is None:
                self._tell([self._board.sign(Evidence("launch", hosts[host], f"{host}: {answer.fault}"))])
            elif answer.note:
                self._board.notes[host] = answer.note

    async def _watch(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)  # deadlines have no event to wait for
            now = time.monotonic()
            late, last = now - last - TICK_S, now
            if late > 2 * TICK_S:
                self._late_at, self._late_s = now, late
                self._board.held_up(late)
            elif not self._ending and not self._trouble.is_set():
                self._tell(self._board.look(now, self._server.heard))

    async def _read_output(self, keeper: asyncio.subprocess.Process) -> None:
        assert keeper.stdout is not None
        rest = b""
        while data := await keeper.stdout.read(1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[-_LINE_LIMIT:]
            for line in lines:
                self.take_line(line)
        self.take_line(rest)

    def take_line(self, line: bytes) -> None:
        text = line[:_LINE_LIMIT].decode(errors="replace").rstrip()
        if text.strip("-= "):  # skip the rules around mpirun's messages
            self._output.append((time.monotonic(), text))
            if not self._board.ready:
                self._start_output.take(text)
            self._options.words.take(text, self._options.replica)

    async def _wait_for_exit(self, keeper: asyncio.subprocess.Process, reading: asyncio.Task[None], name: str) -> None:
        status = await keeper.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await asyncio.wait([reading])  # the last output often has the reason
                if status >= 0 and not self._ending:  # the lost rank ended first, but another thread reads its end
                    await self._server.all_gone(LAST_WORDS_S)
        self._exited.set()
        ours = self._ending and (
            status == -signal.SIGTERM or time.monotonic() > self._asked_at + self._options.kill_grace_s
        )
        if status < 0 and not ours:
            sign = Evidence("launcher_killed", None, f"{name} was ended by signal {-status}")
        else:
            text = f"{name} ended with status {status}"
            if not self._output and (limit := processes.few_descriptors()):
                text += f" without a message: {limit}"
            sign = Evidence("launcher_exit", None, text)
        self._tell([self._board.sign(sign)])
