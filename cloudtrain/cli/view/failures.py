"""Exceptions into exit codes: the one place where the command line ends when something is wrong.

0    done; for submit --wait, submit --follow, wait: the run SUCCEEDED
1    unexpected (the traceback is kept in a file), or a run that failed without a code of its own
2    the request cannot be done: usage, job, source, target, run id, a file or history that cannot be used, a full disk
5    the platform refused, or could not be reached
130  interrupted by Ctrl-C; a run that was being followed goes on
141  whoever read the output has left

With `--json` the same goes to standard output as {"error", "hint", "phase", "exit_code"}: phase is "client" when the
command itself could not be done, and "run" when a run ended in another state than SUCCEEDED.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from cloudtrain.cli.view.terminal import note, print_json
from cloudtrain.errors import BadJob, CloudtrainError, RunFailed

INTERRUPTED = 130
PIPE = 141  # 128 + SIGPIPE, as a program in C would end
SYSTEM_HINTS = {
    errno.ENOSPC: "free some disk space, or set CLOUDTRAIN_HOME to another disk",
    errno.EDQUOT: "free some of the quota, or set CLOUDTRAIN_HOME to another disk",
    errno.ENOTDIR: "a part of that path is a file; set CLOUDTRAIN_HOME where it is meant",
    errno.EROFS: "set CLOUDTRAIN_HOME to a folder that can be written",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


def report(error: BaseException, words: Sequence[str]) -> int:
    """Say what went wrong, in one sentence and a hint, and return the exit code."""
    mine = list(words[: words.index("--")] if "--" in words else words)
    as_json = "--json" in mine
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, BrokenPipeError):
        return _quiet()
    if isinstance(error, KeyboardInterrupt | click.Abort):
        _print("interrupted", "", as_json, INTERRUPTED)
        return INTERRUPTED
    if "--debug" in mine or os.environ.get("CLOUDTRAIN_DEBUG", "") not in ("", "0"):
        import traceback

        traceback.print_exception(error)
    message, hint, code, more = _said(error, mine)
    try:
        _print(message, hint, as_json, code, more)
        sys.stdout.flush()
    except BrokenPipeError:
        return _quiet()
    except OSError:  # it was the output itself that could not be written
        _quiet()
    return code


def _said(error: BaseException, words: Sequence[str]) -> tuple[str, str, int, dict[str, Any]]:
    """Return message, hint, exit code and what JSON adds."""
    if isinstance(error, BadJob):
        problems = [{**vars(problem)} for problem in error.problems]
        return error.message, error.hint, error.exit_code, {"problems": problems}
    if isinstance(error, RunFailed):
        return error.message, error.hint, error.exit_code, {"phase": "run", "run_id": error.run_id}
    if isinstance(error, CloudtrainError):
        return error.message, error.hint, error.exit_code, {}
    if isinstance(error, click.ClickException):
        from cloudtrain.cli import COMMANDS

        command = next((word for word in words if word in COMMANDS), "")
        return _sentence(error.format_message()), " ".join(f"cloudtrain {command} --help".split()), error.exit_code, {}
    if isinstance(error, OSError) and error.errno is not None:
        place = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        return f"{place}{_sentence(error.strerror or str(error))}", SYSTEM_HINTS.get(error.errno, ""), 2, {}
    if isinstance(error, MemoryError):
        return "there is not enough memory", "", 1, {}
    return f"this should not have happened: {type(error).__name__}: {_first_line(error)}", _keep(error), 1, {}


def _print(message: str, hint: str, as_json: bool, code: int, more: dict[str, Any] | None = None) -> None:
    first, *others = message.splitlines() or ["failed"]
    note(first, head="error: ", style="bold red")
    for line in [*others, *([f"  hint: {hint}"] if hint else [])]:
        note(line)
    if as_json:
        print_json({"error": message, "hint": hint, "phase": "client", "exit_code": code, **(more or {})})


def _quiet() -> int:
    """Keep the interpreter from complaining at its end about an output that nobody reads."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return PIPE


def _keep(error: BaseException) -> str:
    """Write the traceback into a file below the home and return where; blocking."""
    import traceback
    from datetime import UTC, datetime

    text = "".join(traceback.format_exception(error))
    try:
        from cloudtrain.job import targets

        folder = targets.home() / "errors"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = folder / f"{datetime.now(UTC):%y%m%d-%H%M%S}-{os.getpid()}.txt"
        file.write_text(f"python {sys.version}\n{text}", "utf-8", "backslashreplace")
        _prune(folder)
    except (OSError, CloudtrainError):
        return "the traceback is shown with --debug"
    return f"please report it with the traceback in {file}"


def _prune(folder: Path, keep: int = 50) -> None:
    for old in sorted(folder.glob("*.txt"))[:-keep]:
        old.unlink(missing_ok=True)


def _sentence(text: str) -> str:
    text = text.strip().rstrip(".")
    return text[:1].lower() + text[1:]


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0][:200] if lines else "no message"
