"""cloudtrain exec: run a command in the folder and environment of a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, NoReturn

import click

from cloudtrain.cli.view import options, runs, terminal
from cloudtrain.errors import BackendError, BadRequest

if TYPE_CHECKING:
    from cloudtrain.backends.shell import Shell

SHELL = ("sh", "-c", "if command -v bash >/dev/null; then exec bash; fi; exec sh")


@options.command()
@options.run_named
@options.argument("args", "[-- CMD...]", "The command and its arguments.", nargs=-1, type=click.UNPROCESSED)
@click.option("--node", type=click.IntRange(0), help="The node; default: that of --rank, or 0.")
@click.option(
    "--rank", type=click.IntRange(0), help="The rank, counted over all nodes; default: the first of the node."
)
@options.role_option
@click.option("-i", "--stdin", is_flag=True, help="Pass standard input to the command.")
@click.option(
    "-t", "--terminal", "wants_terminal", is_flag=True, help="Give the command this terminal; refused without -i."
)
def command(
    run_id: str,
    args: tuple[str, ...],
    node: int | None,
    rank: int | None,
    role: str | None,
    stdin: bool,
    wants_terminal: bool,
) -> int:
    """Run a command in the folder and environment of a rank.

    The command runs on the node of the rank, in the container or pod where there is one. The exit code is that of
    CMD. The run must have started, and not ended. The run's own processes continue, also when Ctrl-C ends CMD.
    Without CMD, -it opens a shell. On SageMaker, Vertex AI and Azure ML cloudtrain cannot run CMD: it prints the command or
    address that opens a shell there, and exits with 0. Each use is an event of the run: `cloudtrain show` prints
    who ran which command.

    \b
    cloudtrain exec tiny-lm-261125 -- nvidia-smi
    cloudtrain exec tiny-lm-261125 --rank 3 -it
    """
    from cloudtrain.runs.inside import Inside

    if not args and not wants_terminal:
        raise click.UsageError("a command is missing: cloudtrain exec RUN -- CMD, or -it for a shell")
    if wants_terminal and not (stdin and sys.stdin.isatty()):
        raise BadRequest("-t needs a terminal and -i", "leave -t out in a script")
    argv = args or SHELL
    inside = Inside.of(runs.find(run_id))
    place = inside.node_of(node, rank, role)
    term = os.environ.get("TERM") or "xterm" if wants_terminal else "-"
    where = "-" if rank is None else str(rank)
    program = inside.program("exec", place, where, term, *argv, stdin=stdin, terminal=wants_terminal)
    if not program.argv and program.stream is None:
        if not program.address:
            raise BadRequest(f"{inside.run.run_id}: no shell can be opened", program.note)
        terminal.print_lines(program.address)
        if program.note:
            terminal.note(program.note)
        return 0
    inside.record("exec", command=inside.masked(argv), on=place, **({} if rank is None else {"rank": rank}))
    sys.stdout.flush()
    if program.stream is not None:
        with terminal.raw_mode(wants_terminal):
            return program.stream(0 if stdin else -1, 1, 2, wants_terminal)
    return _run_over_ssh(program, stdin) if program.host else _become(program.argv, stdin)


def _run_over_ssh(program: Shell, stdin: bool) -> int:
    """Run ssh in this terminal to its end, and say when its connection may have been lost."""
    process: subprocess.Popen[bytes] | None = None
    received: list[int] = []

    def forward(number: int, _: object) -> None:
        received.append(number)
        if process is not None and number != signal.SIGINT:  # a terminal sends Ctrl-C to ssh too
            process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, forward)
    try:
        process = subprocess.Popen(program.argv, stdin=None if stdin else subprocess.DEVNULL)
    except OSError as error:
        raise BackendError(f"{program.argv[0]} cannot be started: {error.strerror}") from None
    code = process.wait()
    if received:
        return 128 + received[-1]
    if code < 0:
        return 128 - code
    if why := program.explain(code):
        terminal.note(f"{why}. If it was lost, the command may still run there; it gets no more input")
    return code


def _become(argv: tuple[str, ...], stdin: bool) -> NoReturn:
    """Replace this process: the terminal, its signals and its exit code are the command's."""
    if not stdin:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and a program inherits that
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        raise BackendError(f"{argv[0]} cannot be started: {error.strerror}") from None
