"""The command line `cloudtrain`: a table of its commands, each imported when it is called.

A command's module is named like the command and holds the click command `command`, which returns its exit code.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

import click

# section -> command -> its line in `cloudtrain --help`; a test compares it with the command's own docstring
SECTIONS: dict[str, dict[str, str]] = {
    "Describe a job": {
        "init": "Write a job file for a script, or for the shared trainer.",
        "plan": "Print what would be submitted, and submit nothing.",
        "fit": "Show on which GPUs a training fits, and how to use less memory.",
        "doctor": "Check this machine and a target for problems.",
        "image": "Build and push the image of the shared trainer.",
        "permissions": "Print the least permissions that a target needs.",
        "prices": "List machines with prices, and show or refresh price lists.",
    },
    "Run it": {
        "submit": "Submit a job file, a script or a plan.",
        "resume": "Start a run's next attempt from its newest checkpoint.",
        "rerun": "Start a new run of the same job.",
        "eval": "Evaluate the model of a run, in a job of its own.",
        "sweep": "Run a job many times with different hyperparameters.",
        "cancel": "Cancel runs, and stop all their processes, containers and pods.",
        "rm": "Delete runs here, on hosts and platforms; not files in buckets.",
    },
    "Inspect runs": {
        "ls": "List runs, the newest first.",
        "show": "Show a run: its state, attempts, times and job.",
        "mark": "Set the title, note, tags or star of runs, or archive them.",
        "diff": "Show the differences between two runs or two plans.",
        "logs": "Print the log of all nodes of a run.",
        "metrics": "Print or plot the metrics of runs.",
        "costs": "Print what runs have cost, by target, user, label or month.",
        "report": "Write a report on a run, or a comparison, as one HTML file.",
        "console": "Show runs in the browser, until Ctrl-C.",
        "wait": "Wait until runs have ended.",
        "fetch": "Copy a run's model, outputs and checkpoints into a folder.",
        "audit": "Print who submitted, cancelled or deleted runs, or used exec.",
        "attach": "Add a run that was submitted elsewhere to the history here.",
    },
    "Look inside a run": {
        "exec": "Run a command in the folder and environment of a rank.",
        "stack": "Print the Python stacks of all ranks of a run.",
        "forward": "Forward a port of a node to this computer, as for TensorBoard.",
        "top": "Show processors, memory and GPUs of all nodes of a run.",
    },
}
COMMANDS = {name: line for section in SECTIONS.values() for name, line in section.items()}
# not listed in `cloudtrain --help`, which names them in one line
RARE = ("doctor", "image", "permissions", "prices", "costs", "audit", "attach", "mark")
RENAMED = {  # one release long
    "watch": ("wait", "--foreground"),
    "schema": ("init", "--schema"),
    "package": ("plan", "--files"),
    "prune": ("rm", "--ended"),
}
ELSEWHERE = {  # what other tools call it
    "status": "show", "ps": "ls", "list": "ls", "stop": "cancel", "kill": "cancel", "launch": "submit", "run": "submit",
    "queue": "ls", "describe": "show", "download": "fetch", "start": "submit", "apply": "submit",
    "stacks": "stack", "ssh": "exec", "port-forward": "forward", "stats": "top",
    "train": "submit", "jobs": "ls", "down": "cancel", "terminate": "cancel", "delete": "rm", "remove": "rm", "tail": "logs",
}  # fmt: skip


class LazyGroup(click.Group):
    """A click group that imports a command when it is called. Its help needs only the table."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        from importlib import import_module

        command: click.Command = import_module(f"cloudtrain.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] in RENAMED:
            new = RENAMED[args[0]]
            click.echo(
                f"cloudtrain {args[0]} is now `cloudtrain {' '.join(new)}`; the old name is removed in the next release",
                err=True,
            )
            args = [*new, *args[1:]]
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(f"there is no command {args[0]!r}{_suggestion(args[0])}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(len(name) for name in COMMANDS if name not in RARE)
        for section, commands in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(name.ljust(width), line) for name, line in commands.items() if name not in RARE])
        with formatter.section("More commands (cloudtrain NAME --help)"):
            formatter.write_text(", ".join(RARE))


def _suggestion(typed: str) -> str:
    from difflib import get_close_matches

    if typed in ELSEWHERE:
        return f"; did you mean {ELSEWHERE[typed]}?"
    matches = get_close_matches(typed, COMMANDS, n=1) or (
        [typed] if typed.endswith((".yaml", ".yml", ".py", ".json")) else []
    )
    return f"; did you mean {'submit ' if matches[0] == typed else ''}{matches[0]}?" if matches else ""


@click.command(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=False,
    epilog="Exit codes: 0 done; 2 the command is wrong, or cannot be done; 5 the platform refused it, or did not answer; 130 "
    "Ctrl-C; 1 any other failure. With -f or --wait, submit has the exit code of its run: `cloudtrain wait --help-all`.",
    invoke_without_command=True,
)
@click.option("--version", is_flag=True, help="Print the version.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error (also CLOUDTRAIN_DEBUG=1).")
@click.pass_context
def program(ctx: click.Context, version: bool, debug: bool) -> int:
    """One job file; every place where a model can be trained.

    \b
    cloudtrain submit train.py -f        train a script here and follow it
    cloudtrain init                      write a job file
    cloudtrain submit job.yaml -t NAME   train it at a target
    """
    if version:
        from cloudtrain.__about__ import __version__

        click.echo(f"cloudtrain {__version__}")
    elif ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. An exception that a command raises becomes an exit code.

    Without `argv` it runs the command line of this process, and ends the process.
    """
    if argv is not None:
        return _run(argv)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # cloudtrain.__main__
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _open_streams()
    gc.set_threshold(50_000, 20, 50)  # a command is short: garbage collection took a tenth of the time of `plan`
    code = _run(sys.argv[1:])
    if threading.active_count() == 1:  # else the interpreter waits for the others, and Ctrl-C may end that
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command is done
    gc.freeze()  # the interpreter's last collection would look at every module: a seventh of the time of `plan`
    return code


def _open_streams() -> None:
    """Open closed standard streams (`>&-`) on /dev/null. Else the next file that is opened gets their descriptor."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open until the process ends


def _run(argv: Sequence[str]) -> int:
    arguments = list(argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(
                errors="backslashreplace"
            )  # for a terminal that is not UTF-8, and a path that is not valid text
    try:
        if "_CLOUDTRAIN_COMPLETE" in os.environ:
            program.main(arguments, prog_name="cloudtrain")  # click's shell completion; exits
        code = _invoke(arguments)
        sys.stdout.flush()
        return code
    except BaseException as error:
        from cloudtrain.cli.view import failures

        return failures.report(error, arguments)


def _invoke(arguments: list[str]) -> int:
    try:
        with program.make_context("cloudtrain", [*arguments]) as ctx:
            code: Any = program.invoke(ctx)
    except click.exceptions.Exit as exited:  # --help
        return exited.exit_code
    return code if isinstance(code, int) else 0
