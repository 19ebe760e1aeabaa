"""`laddertron`: the command line's front door. Knows the commands' names and one-line helps; loads a command's module,
launchers/cli/commands/<name>.py, or that of a folder of tools/, with its `command`, only when it is called.
"""

from __future__ import annotations

import importlib
import os
import pwd
import sys
from collections.abc import Mapping, MutableMapping

import click

from ... import __version__
from ...topology.hardware.cpu_tier import LOOKS, LOOKS_VARIABLE, limit_libraries
from .errors import drop_unwritten, open_streams, report, show_any_text

TOOLS: Mapping[str, tuple[str, ...]] = {
    "plan": ("plan",),
    "bench": ("acceptance", "bench"),
    "train": ("train", "scan", "adapt", "evaluate"),
}
"""Commands of tools/, by folder: none of the four layers imports them."""

ROLES: Mapping[str, Mapping[str, str]] = {
    "Answer a file of prompts": {
        "run": "Answer a JSONL file of requests without a daemon.",
        "batch": "Submit, watch, fetch and delete batches on a running daemon.",
        "files": "List and delete files on a running daemon.",
        "bench": "Measure latency, throughput and overlap.",
    },
    "Run the service": {
        "serve": "Run the daemon: HTTP API, store and supervised ranks.",
        "reload": "Apply a changed deployment file to a running daemon.",
        "check-store": "Compare everything stored with its checksums.",
        "keys": "Add, rotate, revoke and list API keys.",
        "monitoring": "Export alert rules and dashboards, or list the metrics.",
        "bundle": "Collect diagnostics into one archive.",
    },
    "Plan and deploy": {
        "config": "Print a deployment file to start from.",
        "check": "Validate a deployment file without running anything.",
        "plan": "Predict memory and speed of a model, and the best layout.",
        "launch": "Print, emit or run the launcher's command line.",
        "topo": "Show nodes, devices, links and the placement of ranks.",
        "verify": "Test that answers do not depend on the rest of the batch.",
        "acceptance": "Measure new machines and compare them with predictions.",
        "preflight": "Measure the fabric; fail if a link is broken or slow.",
    },
    "Weights": {
        "train": "Train a small model with any wiring.",
        "scan": "Measure loss and speed-up of ladder wiring, layer by layer.",
        "adapt": "Retrain a checkpoint for another wiring.",
        "evaluate": "Compare the held-out loss of model folders.",
        "convert": "Write a model folder in another checkpoint format.",
        "manifest": "Write or verify checksums of a model folder.",
        "shard": "Write per-rank files for the fastest restart.",
    },
}

REMOVED: Mapping[str, str] = {
    "simulate": "`plan --all` shows each wiring's step, L and c, and `--nodes` names any machines",
    "metrics": "`monitoring metrics` prints the catalogue, `monitoring export` writes the dashboards",
    "trial": "guidellm compares servers: send each the same load",
    "profile": "`bench latency --trace FILE` records the steps",
    "timeline": "open the file of `bench latency --trace FILE` at https://ui.perfetto.dev",
}
"""Former commands, and what serves in their place."""

EPILOG = """\b
Examples:
  laddertron config > deploy.yaml
  laddertron check deploy.yaml
  laddertron run deploy.yaml -i prompts.jsonl -o answers.jsonl
  laddertron run deploy.yaml -i prompts.jsonl -o answers.jsonl \\
    --set engine.max_num_seqs=8
  laddertron launch deploy.yaml serve --dry-run
  laddertron serve models/Llama-3.1-8B-Instruct

CONFIG is a YAML file that describes a deployment, or a model's folder, for which every key has its default.
`laddertron config` explains each key, and `--set section.key=value` overrides one. `laddertron COMMAND --help` shows
all options."""


class LazyGroup(click.Group):
    """Commands by name; grouped by role in the help; a misspelt one answered with its neighbour."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for commands in ROLES.values() for name in commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        tool = next((tool for tool, names in TOOLS.items() if cmd_name in names), None)
        folder = f"{__package__}.commands" if tool is None else f"laddertron.tools.{tool}.commands"
        command: click.Command = importlib.import_module(f"{folder}.{cmd_name.replace('-', '_')}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        import difflib

        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if advice := REMOVED.get(args[0]):
                raise click.UsageError(f"{args[0]}: this command was removed: {advice}", ctx) from error
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            if not near:
                raise
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean {near[0]!r}?", ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for role, commands in ROLES.items():
            with formatter.section(role):
                formatter.write_dl(list(commands.items()))


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="laddertron")
def group() -> None:
    """Serve one model across several nodes, and overlap its all-reduces with computation.

    A deployment file describes the model and the ranks over which it is split, by tensor and pipeline parallelism.
    laddertron measures the overlapped share of communication, and its batches survive process and node failures."""


def give_home(environ: MutableMapping[str, str]) -> None:
    """Sets HOME where it is missing (systemd units, containers): Open MPI's mpirun needs it."""
    if not environ.get("HOME"):
        try:
            environ["HOME"] = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            import tempfile  # not for every --help

            environ["HOME"] = tempfile.gettempdir()


def main(argv: list[str] | None = None) -> int:
    """Runs the command; its exit code (launchers/cli/errors.py has them all)."""
    give_home(os.environ)
    open_streams()
    show_any_text()
    try:
        limit_libraries(os.environ)
        os.environ.setdefault(LOOKS_VARIABLE, LOOKS)  # `run` within a job may be a rank
        result = group.main(args=argv, prog_name="laddertron", standalone_mode=False)
    except (Exception, click.Abort) as error:
        if (code := report(error)) is None:
            raise
        return code
    finally:
        drop_unwritten()
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    from . import main as script

    sys.exit(script())
