"""The available hosts from configuration, hostfile, batch system or fabric, as data. Only `read_hosts` reads files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...engine.config.load import Deployment
from ...topology.hardware.fabric import Fabric

MAX_HOSTS = 100_000


class LaunchError(ValueError):
    """The deployment cannot be launched here; the message has the values, the rule and the fix."""


@dataclass(frozen=True, slots=True)
class Host:
    """`slots` ranks on `name`. `devices`: the GPUs of the ranks, in the order of ranks; None: the first `slots` ones.
    `interface`: the one that the placement chose to connect to the other hosts, or ""; `cores`: of its seats, by local
    rank, () without a fabric."""

    name: str
    slots: int
    devices: tuple[int, ...] | None = None
    interface: str = ""
    cores: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class HostAllocation:
    """The available hosts and their `source`. Every node of an `allocation` must be used."""

    hosts: tuple[Host, ...]
    source: str
    allocation: bool = False


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_GROUP = re.compile(r"([^\[\],]*)\[([^\[\]]*)\]")


def expand_nodelist(text: str) -> tuple[str, ...]:
    """Slurm's `gpu[01-03,7],login` -> gpu01, gpu02, gpu03, gpu7, login. Raises LaunchError."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        names.extend(_expand(part, text))
        if len(names) > MAX_HOSTS:
            raise LaunchError(f"node list {text[:80]!r}… names more than {MAX_HOSTS} hosts")
    if not names or text.count("[") != text.count("]"):
        raise LaunchError(f"node list {text!r}: expected the form of SLURM_JOB_NODELIST, such as gpu[01-03,7],login")
    return tuple(names)


def _expand(part: str, node_list: str) -> list[str]:
    match = _GROUP.search(part)
    if match is None:
        return [part]
    names: list[str] = []
    for item in match[2].split(","):
        low, dash, high = item.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()) or not 0 <= int(high or low) - int(low) <= MAX_HOSTS:
            raise LaunchError(
                f"node list {node_list!r}: {item!r} must be a number or an ascending range, such as 01-03"
            )
        for number in range(int(low), int(high or low) + 1):
            head, rest = part[: match.start()] + match[1] + str(number).zfill(len(low)), part[match.end() :]
            names.extend(head + tail for tail in (_expand(rest, node_list) if rest else [""]))
            if len(names) > MAX_HOSTS:
                raise LaunchError(f"node list {node_list[:80]!r}… names more than {MAX_HOSTS} hosts")
    return names


def parse_hostfile(text: str, where: str) -> tuple[Host, ...]:
    """Lines `name slots=8`, `name:8` or `name`; `#` begins a comment. Raises LaunchError with `where` and the line."""
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, _, count = words[0].partition(":")
        for word in words[1:]:
            key, _, value = word.partition("=")
            if key in ("slots", "max_slots", "max-slots"):
                count = value if key == "slots" else count
            else:
                raise LaunchError(f"{where}:{number}: {word!r} is not slots=N; a line is `node1 slots=8` or `node1:8`")
        literal = words[0].count(":") > 1
        if literal or not _NAME.fullmatch(name) or (count and not count.isdecimal()) or count == "0":
            raise LaunchError(
                f"{where}:{number}: {line.strip()!r}: a line is `node1 slots=8` or `node1:8`; for IPv6 a name that "
                "resolves to it"
            )
        if any(host.name == name for host in hosts):
            raise LaunchError(f"{where}:{number}: duplicate host {name}: name each host once")
        hosts.append(Host(name, int(count or 0)))
    if not hosts:
        raise LaunchError(f"{where}: no hosts in it; a line is `node1 slots=8`")
    return tuple(hosts)


def parse_nodefile(text: str, where: str) -> tuple[Host, ...]:
    """PBS_NODEFILE and LSB_DJOB_HOSTFILE: a host's name once for each of its slots. Raises LaunchError."""
    counts = Counter(text.split())
    if not counts:
        raise LaunchError(f"{where}: no hosts in it")
    return tuple(Host(name, count) for name, count in counts.items())


def spread(hosts: Sequence[Host], ranks: int) -> tuple[Host, ...]:
    """Distributes the ranks evenly over the hosts if that fits; else returns the hosts unchanged."""
    share, rest = divmod(ranks, len(hosts))
    if rest == 0 and share and all(h.slots == 0 or h.slots >= share for h in hosts):
        return tuple(replace(h, slots=share) for h in hosts)
    # a host that does not say how many it takes can take them all
    return tuple(replace(h, slots=h.slots or ranks) for h in hosts)


def read_hosts(deployment: Deployment, environ: Mapping[str, str], fabric: Fabric | None) -> HostAllocation:
    """Hosts of the config, its hostfile, the allocation that `environ` describes, the fabric, or else this one."""
    launch, ranks = deployment.launch, deployment.parallel.world.size
    devices = {n.hostname: len(n.devices) for n in fabric.nodes} if fabric is not None else {}

    def filled(hosts: Sequence[Host], gpus: int = 0) -> tuple[Host, ...]:
        per_node = launch.ranks_per_node
        sized = [replace(h, slots=per_node or devices.get(h.name) or gpus or h.slots) for h in hosts]
        return tuple(sized) if all(devices.get(h.name) or gpus or per_node for h in hosts) else spread(sized, ranks)

    configured, source = tuple[Host, ...](), "launch.hosts"
    if launch.hosts:
        configured = tuple(Host(name, int(slots or 0)) for name, _, slots in (h.partition(":") for h in launch.hosts))
    elif launch.hostfile is not None:
        configured, source = (
            parse_hostfile(_text(launch.hostfile, "launch.hostfile"), launch.hostfile),
            "launch.hostfile",
        )
    if configured:
        filled_in = filled([replace(h, slots=0) for h in configured])
        return HostAllocation(tuple(s if s.slots else f for s, f in zip(configured, filled_in, strict=True)), source)
    if environ.get("SLURM_JOB_NODELIST"):
        names = expand_nodelist(environ["SLURM_JOB_NODELIST"])
        gpus = environ.get("SLURM_GPUS_ON_NODE", "")
        hosts = filled([Host(name, 0) for name in names], int(gpus) if gpus.isdecimal() else 0)
        return HostAllocation(hosts, "SLURM_JOB_NODELIST", allocation=True)
    for variable in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE"):
        if environ.get(variable):
            hosts = parse_nodefile(_text(environ[variable], variable), f"{variable}={environ[variable]}")
            return HostAllocation(filled(hosts), variable, allocation=True)
    if fabric is not None:
        return HostAllocation(filled([Host(n.hostname, 0) for n in fabric.nodes]), "launch.fabric")
    return HostAllocation((Host("localhost", launch.ranks_per_node or ranks),), "this host, since none is listed")


def _text(path: str, what: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"{what}: {path} cannot be read: {error}") from None
