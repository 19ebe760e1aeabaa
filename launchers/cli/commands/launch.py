"""`laddertron launch`: prints, emits or runs the launcher's command for a deployment. `serve`, and `run` over several
replicas, start their jobs themselves; other commands are started as ranks.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click

from ....engine import child
from ....engine.config.load import Deployment, read
from ...compose.detect_launcher import assume, fabric_of, survey
from ...compose.host_allocation import JobHosts, together
from ...compose.hosts import Host, LaunchError, read_hosts
from ...compose.kubernetes import gaps, leader_worker_set, mpijob
from ...compose.mpi import CONTROL, LaunchCommand, Part, Site, compose, torchrun_hosts, worker_program
from ...compose.slurm import sbatch
from ...job.fleet import Fleet
from ..errors import show_warning
from ..fabric_source import faults_of, set_option

SERVICES, JOBS = ("serve",), ("run", "preflight", "bench", "topo")


def starts_its_own(arguments: Sequence[str], deployment: Deployment) -> bool:
    """Whether the command launches its ranks itself, so that a lost replica or host does not end the others."""
    several = arguments[0] == "run" and deployment.parallel.replicas > 1
    return arguments[0] in (*SERVICES, "preflight") or several


def before_its_fabric(deployment: Deployment, arguments: Sequence[str], environ: Mapping[str, str]) -> Deployment:
    """For `topo --save`: the deployment without launch.fabric, which may be missing or stale, unless it alone has the
    hosts."""
    launch = deployment.launch
    if launch.fabric is None or arguments[0] != "topo" or not any(w.partition("=")[0] == "--save" for w in arguments):
        return deployment
    bare = replace(deployment, launch=replace(launch, fabric=None))
    hosts_given = launch.hosts or launch.hostfile or read_hosts(bare, environ, None).allocation
    return bare if hosts_given or not Path(launch.fabric).exists() else deployment


def site_of(deployment: Deployment, environ: Mapping[str, str], dry_run: bool) -> Site:
    """This machine; a dry run goes on where the launcher is not installed."""
    try:
        return survey(deployment, environ)
    except LaunchError:
        if not dry_run:
            raise
        return assume(deployment, environ)


def hosts_of_all(fleet: Fleet, arguments: Sequence[str]) -> JobHosts:
    """The hosts of all replicas in one job; of `topo`, which records the fabric, with the spare ones."""
    share = together(fleet.shares)
    if arguments[0] != "topo":
        return share
    spares = (Host(name.partition(":")[0], share.hosts[0].slots) for name in fleet.deployment.launch.spare_hosts)
    return replace(share, hosts=(*share.hosts, *spares))


def printed(
    deployment: Deployment,
    site: Site,
    program: Sequence[str],
    alone: bool,
    environ: Mapping[str, str],
    arguments: Sequence[str],
) -> str:
    """The dry run: every command with its reasons. `alone`: the program launches a job per replica, or with `again` one
    job of itself."""
    fleet, again = Fleet(deployment, environ, site=site), arguments[0] == "preflight"
    title, below = f"hosts: {fleet.available.source}", "(started by the command above)"
    if alone and not again:
        jobs = [compose(deployment, site, share, worker_program(site), CONTROL) for share in fleet.shares]
        texts = [render(job, f"replica {n} of {len(jobs)} {below}") for n, job in enumerate(jobs)]
    elif site.kind == "torchrun" and len((all_hosts := hosts_of_all(fleet, arguments)).hosts) > 1:
        commands = torchrun_hosts(deployment, site, all_hosts, program)
        return "\n\n".join(render(c, f"start this on {h.name}") for c, h in zip(commands, all_hosts.hosts, strict=True))
    else:
        job = compose(deployment, site, hosts_of_all(fleet, arguments), program)
        texts = [render(job, f"the ranks {below}" if again else title)]
    if alone:
        starts = "its ranks and waits for them" if again else "a job for each replica"
        texts.insert(0, render(LaunchCommand((Part(tuple(program), f"on this host; it starts {starts}:"),)), title))
    return "\n\n".join(texts)


def emitted(kind: str, deployment: Deployment, arguments: Sequence[str], program: Sequence[str]) -> str:
    fabric = fabric_of(deployment)
    if kind == "slurm":
        return sbatch(deployment, fabric, program, arguments[0] in SERVICES)
    return (mpijob if kind == "mpijob" else leader_worker_set)(deployment, fabric, arguments)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("config", type=click.Path())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="serve|run|preflight|bench|topo [ARGS]…")
@set_option
@click.option("--dry-run", is_flag=True, help="Print the command with a reason for each option.")
@click.option(
    "--emit", type=click.Choice(["slurm", "mpijob", "lws"]), help="Print a batch script or manifests instead."
)
def command(
    config: str, arguments: tuple[str, ...], overrides: tuple[str, ...], dry_run: bool, emit: str | None
) -> None:
    """Start a laddertron command over CONFIG's hosts (default: serve).

    \b
      laddertron launch deploy.yaml --dry-run
      laddertron launch deploy.yaml run -i in.jsonl -o out.jsonl
      laddertron launch deploy.yaml serve --emit slurm > serve.sbatch
      laddertron launch deploy.yaml serve --emit mpijob | kubectl apply -f -

    Hosts come from launch.hosts, launch.hostfile or the allocation (Slurm, PBS, LSF). Default: this host.
    """
    arguments = arguments or ("serve",)
    if arguments[0] not in (*SERVICES, *JOBS):
        raise click.UsageError(f"{arguments[0]} is not launched over hosts: use {', '.join((*SERVICES, *JOBS))}")
    loaded = read(config, overrides)
    deployment, environ = loaded.deployment, dict(os.environ)
    tail = [word for override in overrides for word in ("--set", override)]
    with faults_of(f"{config}: launch"):
        deployment = before_its_fabric(deployment, arguments, environ)
        if emit is not None:
            python = deployment.launch.python or sys.executable
            if arguments[0] == "run" and "--resume" not in arguments:
                # a job that is requeued begins again from its first line
                arguments = (*arguments, "--resume")
            program = _laddertron(python, arguments, os.path.abspath(config), tail)
            for gap in gaps(deployment, arguments) if emit != "slurm" else ():
                show_warning(gap)
            click.echo(emitted(emit, deployment, arguments, program), nl=False)
            return
        site = site_of(deployment, environ, dry_run)
        program = _laddertron(site.python, arguments, os.path.abspath(config), tail)
        alone = starts_its_own(arguments, deployment)
        if dry_run:
            click.echo(printed(deployment, site, program, alone, environ, arguments))
            return
        fleet = Fleet(deployment, environ, site=site)
        argv, extra = program, {}
        if not alone:
            job = compose(deployment, site, hosts_of_all(fleet, arguments), program)
            argv, extra = job.argv, job.env
    click.echo(f"+ {shlex.join(argv)}", err=True)
    sys.stdout.flush()
    os.execvpe(argv[0], argv, child.environment(extra))


def _laddertron(python: str, arguments: Sequence[str], config: str, tail: Sequence[str]) -> tuple[str, ...]:
    return child.laddertron(arguments[0], config, *arguments[1:], *tail, python=python)


def render(command: LaunchCommand, title: str) -> str:
    """A comment for each choice, an `export` for each variable, then the command, one choice per line."""
    shown = [(_words(part.words), part.reason) for part in command.parts]
    width = min(48, max((len(words) for words, _ in shown), default=0))
    lines = [f"# {title}"]
    lines += [f"#   {words:<{width}}  {reason}" for words, reason in shown]
    for name, variable in command.variables.items():
        lines.append(f"export {name}={shlex.quote(variable.value)}  # {variable.reason}")
    lines += [f"# {name} is inherited from this shell" for name in command.inherited]
    lines += [f"# {name} is set by laddertron when it starts this" for name in command.forward]
    lines.append(" \\\n  ".join(shlex.join(part.words) for part in command.parts))
    return "\n".join(lines)


def _words(words: tuple[str, ...]) -> str:
    text = shlex.join(words)
    return text if len(text) <= 48 else text[:47] + "…"
