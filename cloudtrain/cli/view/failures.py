"""Turn exceptions into error messages and exit codes, for all commands.

0    done; for submit --wait, submit --follow, wait: the run SUCCEEDED
1    unexpected (the traceback is kept in a file), or a run that failed without a code of its own
2    the request cannot be done: usage, job, source, target, run id, a file or history that cannot be used, a full disk
5    the platform refused, or could not be reached
130  interrupted by Ctrl-C; a run that was being followed keeps running
141  the reader of the output closed the pipe (SIGPIPE)

With `--json` the same goes to standard output as {"error", "hint", "phase", "exit_code"}: phase is "client" when the
command itself could not be done, and "run" when a run ended in another state than SUCCEEDED. "run_id" is the run that the
command began.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from cloudtrain.cli.view.terminal import note, print_json
from cloudtrain.clock import SYSTEM
from cloudtrain.errors import BadJob, CloudtrainError, RunFailed

KEPT = 50  # tracebacks below the home
INTERRUPTED = 130
BROKEN_PIPE = 141  # 128 + SIGPIPE, as the shell reports a program in C
SYSTEM_HINTS = {
    errno.ENOSPC: "free some disk space, or set CLOUDTRAIN_HOME to another disk",
    errno.EDQUOT: "free some of your quota, or set CLOUDTRAIN_HOME to another disk",
    errno.ENOTDIR: "a part of that path is a file, not a folder; set CLOUDTRAIN_HOME to another folder",
    errno.EROFS: "set CLOUDTRAIN_HOME to a writable folder",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


def report(error: BaseException, arguments: Sequence[str]) -> int:
    """Print an error with its hint, and return the exit code."""
    own_arguments = list(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    as_json = "--json" in own_arguments
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, BrokenPipeError):
        return _discard_output()
    if isinstance(error, KeyboardInterrupt | click.Abort):
        _print("interrupted", "", as_json, INTERRUPTED)
        return INTERRUPTED
    if "--debug" in own_arguments or os.environ.get("CLOUDTRAIN_DEBUG", "") not in ("", "0"):
        import traceback

        traceback.print_exception(error)
    message, hint, code, extra = _describe(error)
    try:
        _print(message, hint, as_json, code, extra)
        sys.stdout.flush()
    except BrokenPipeError:
        return _discard_output()
    except OSError:  # standard output itself cannot be written
        _discard_output()
    return code


def _describe(error: BaseException) -> tuple[str, str, int, dict[str, Any]]:
    """Return message, hint, exit code and further keys for JSON."""
    if isinstance(error, BadJob):
        problems = [{**vars(problem)} for problem in error.problems]
        return error.message, error.hint, error.exit_code, {"problems": problems}
    if isinstance(error, RunFailed):
        return error.message, error.hint, error.exit_code, {"phase": "run", "run_id": error.run_id}
    if isinstance(error, CloudtrainError):
        return error.message, error.hint, error.exit_code, {"run_id": error.run_id} if error.run_id else {}
    if isinstance(error, click.ClickException):
        context = error.ctx if isinstance(error, click.UsageError) else None
        command = context.command_path if context else "cloudtrain"
        hint = f"{command} --help"
        if isinstance(error, click.NoSuchOption) and command.endswith((" submit", " plan")):
            hint += f"; options of the script belong after --: {command} train.py -- {error.option_name}"
        return _as_clause(error.format_message()), hint, error.exit_code, {}
    if isinstance(error, OSError) and error.errno is not None:
        prefix = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        return f"{prefix}{_as_clause(error.strerror or str(error))}", SYSTEM_HINTS.get(error.errno, ""), 2, {}
    if isinstance(error, MemoryError):
        return "there is not enough memory", "", 1, {}
    if isinstance(error, Exception) and (warnings := _repair_history(error)):
        return "; ".join(warnings), "run the command again", 2, {}
    return f"internal error: {type(error).__name__}: {_first_line(error)}", _save_traceback(error), 1, {}


def _print(message: str, hint: str, as_json: bool, code: int, extra: dict[str, Any] | None = None) -> None:
    first, *others = message.splitlines() or ["failed"]
    note(first, prefix="error: ", style="bold red")
    for line in [*others, *([f"  hint: {hint}"] if hint else [])]:
        note(line)
    if as_json:
        print_json({"error": message, "hint": hint, "phase": "client", "exit_code": code, **(extra or {})})


def _discard_output() -> int:
    """Send standard output to /dev/null: else the interpreter reports the closed pipe at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE


def _repair_history(error: Exception) -> list[str]:
    """Repair the history if an error came of its damage; returns what was done, [] where it is sound. Blocking."""
    from cloudtrain.history.database import Database
    from cloudtrain.job import targets

    database = Database(targets.home())
    with suppress(Exception):  # the first error is the one to be shown
        database.repair(error)
    return database.warnings


def _save_traceback(error: BaseException) -> str:
    """Write the traceback into a file below the home. Return the hint that names the file; blocking."""
    import traceback

    text = "".join(traceback.format_exception(error))
    try:
        from cloudtrain.job import targets

        folder = targets.home() / "errors"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = folder / f"{SYSTEM.utc():%y%m%d-%H%M%S}-{os.getpid()}.txt"
        file.write_text(f"python {sys.version}\n{text}", "utf-8", "backslashreplace")
        _prune(folder)
    except (OSError, CloudtrainError):
        return "run again with --debug to see the traceback"
    return f"please report it with the traceback in {file}"


def _prune(folder: Path) -> None:
    for old in sorted(folder.glob("*.txt"))[:-KEPT]:
        old.unlink(missing_ok=True)


def _as_clause(text: str) -> str:
    text = text.strip().rstrip(".")
    return text[:1].lower() + text[1:]


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0][:200] if lines else "no message"
