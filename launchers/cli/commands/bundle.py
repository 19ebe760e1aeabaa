"""`laddertron bundle`: the diagnostics of a daemon in one archive, whether it runs or not."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import click

from ....engine.config.load import Deployment, load
from ....engine.daemon.store.disk import holder_pid
from ...compose.mpi import WORKER
from ...job.bundle import log_tails, newest, parts_of, write_bundle
from ..fabric_source import set_option

ANSWER_S = 20.0


def ask_daemon(pid: int, folder: Path, timeout_s: float = ANSWER_S) -> Path | None:
    """SIGUSR1 makes the daemon write a bundle; its path, or None if it does not come."""
    before = set(newest(folder))
    os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if new := [path for path in newest(folder) if path not in before]:
            return new[0]
        time.sleep(0.1)  # there is no event for a new file
    return None


def started_with(config: Path, process: Path) -> bool:
    """Whether a process (a folder of /proc) or an ancestor is a laddertron of this deployment file. Raises OSError."""
    while process.name not in ("0", "1"):
        words = [os.fsdecode(word) for word in (process / "cmdline").read_bytes().split(b"\0") if word]
        if any("laddertron" in word for word in words[:4]):
            cwd = os.readlink(process / "cwd")
            for word in words:
                with contextlib.suppress(OSError):
                    if os.path.samefile(os.path.join(cwd, word), config):
                        return True
        process = process.with_name((process / "stat").read_text().rpartition(")")[2].split()[1])
    return False


def local_ranks(config: Path) -> dict[str, bytes]:
    """This user's rank processes of the deployment on this host, with py-spy's stacks where it is installed."""
    out = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            if WORKER.encode() not in (folder / "cmdline").read_bytes() or folder.stat().st_uid != os.getuid():
                continue
            if not started_with(config, folder):
                continue
            text = (folder / "status").read_text() + "\nwchan: " + (folder / "wchan").read_text() + "\n"
        except OSError:
            continue
        if shutil.which("py-spy"):
            spied = subprocess.run(
                ["py-spy", "dump", "--pid", folder.name], capture_output=True, text=True, timeout=20, check=False
            )
            text += f"\n{spied.stdout}{spied.stderr}"
        out[f"processes/{folder.name}.txt"] = text.encode()
    return out


def collect(deployment: Deployment, config: Path, output: Path) -> tuple[Path, str]:
    """The archive, and where its insides came from."""
    data_dir = Path(deployment.daemon.data_dir)
    folder = data_dir / "bundles"
    pid = holder_pid(data_dir)
    if pid is not None and (made := ask_daemon(pid, folder)) is not None:
        shutil.copyfile(made, output)
        output.chmod(0o600)
        return output, f"from the daemon (pid {pid})"
    why = "no daemon runs here" if pid is None else f"the daemon (pid {pid}) did not answer within {ANSWER_S:g} s"
    bundles = newest(folder) if folder.is_dir() else []
    last = {"last-failure.tar.gz": bundles[0].read_bytes()} if bundles else {}
    source = f"{why}; {f'the last failure is {bundles[0].name}' if bundles else 'no failure was recorded'}"
    parts = parts_of(deployment, {}, first_line=source) | log_tails(data_dir) | local_ranks(config) | last
    return write_bundle(output, parts), why


@click.command()
@click.argument("config", type=click.Path())
@click.option("-o", "--output", type=click.Path(path_type=Path), help="[default: laddertron-bundle-TIME.tar.gz]")
@set_option
def command(config: str, output: Path | None, overrides: tuple[str, ...]) -> None:
    """Write one archive of diagnostics: last collectives, stacks, counters and logs of CONFIG's ranks, daemon and host.

    If a daemon runs on this host, it queries its ranks. If none runs, or it hangs, the archive has the logs, the newest
    automatic bundle, and what the kernel reports about the rank processes. It contains no secrets of the configuration.
    """
    deployment = load(config, overrides)
    path = output or Path(time.strftime("laddertron-bundle-%Y%m%dT%H%M%S.tar.gz"))
    if not path.name.endswith(".tar.gz"):
        raise click.UsageError(f"--output {path}: the name must end in .tar.gz")
    try:
        written, source = collect(deployment, Path(config), path)
    except OSError as error:
        raise click.ClickException(f"the bundle cannot be written: {error}") from error
    click.echo(f"{written}: {source}")
