"""Every error that cloudtrain raises on purpose.

CloudtrainError              one sentence and a hint; `exit_code` is the command line's
├── BadRequest           2   the request cannot be done as written; nothing was changed
│   ├── BadJob               the job file or object; carries all of its problems
│   ├── BadSource            the source cannot be packaged (missing, refused, nested repository)
│   ├── UnknownBackend       no backend or target of that name
│   ├── Unsupported          the run's backend cannot do this
│   ├── UnknownRun           no run of that id or prefix
│   ├── OverBudget           a budget of cloudtrain.toml is spent
│   ├── CapReached           too little is left of limits.max_cost or max_total_runtime for another attempt
│   └── MissingExtra         an optional dependency is not installed
├── StoreError           2   the history cannot be used (newer version, disk full, unreadable); nothing was changed
├── DiskError            2   a folder of this machine cannot be written: full, a quota, permissions
├── BackendError         5   the platform refused, or could not be reached
│   ├── Unreachable          no answer, or one that says try later: what was asked may have been done or not
│   │   └── NoService            nothing listens at the address, or the name has no address
│   ├── LogDenied            the account may not read the log, and nothing else is wrong
│   ├── NotReached           machines or a platform could not be reached; nothing was sent
│   └── NoCapacity           the platform has no such machines free, or a quota is used up; nothing was started
└── RunFailed            *   raised by `Run.result()`; exit_code is the run's own
"""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloudtrain.events import Status


class CloudtrainError(Exception):
    """An expected failure: `str(error)` is one sentence, `hint` says what to do about it.

    Args:
        message: What is wrong.
        hint: What to do; "" for nothing.
    """

    exit_code = 1
    run_id = ""  # of the run that the command had begun

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint and hasattr(self, "add_note"):  # Python 3.11: a traceback of somebody's own script ends with it
            self.add_note(f"hint: {hint}")


class BadRequest(CloudtrainError):
    """The request cannot be carried out as written; nothing was changed."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, where it was written and how to mend it."""

    message: str
    path: str = ""  # dotted, as in the job file: resources.accelerators
    hint: str = ""
    file: str = ""
    line: int | None = None  # 1-based
    candidate_hint: str = field(default="", compare=False)  # instead of hint, where the job has other candidates

    def __str__(self) -> str:
        location = f"{self.file}:{self.line}: " if self.file and self.line else f"{self.file}: " if self.file else ""
        name = f"{self.path}: " if self.path else ""
        return f"{location}{name}{self.message}" + (f" ({self.hint})" if self.hint else "")


class BadJob(BadRequest):
    """The job is wrong; `problems` holds everything that was found, not only the first."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: Sequence[Problem] = tuple(problems)
        head = "the job has a problem" if len(self.problems) == 1 else f"the job has {len(self.problems)} problems"
        super().__init__("\n  ".join([head + ":", *map(str, self.problems)]))


class BadSource(BadRequest):
    """The source directory cannot be packaged."""


class UnknownBackend(BadRequest):
    """No backend or target has that name."""


class Unsupported(BadRequest):
    """The run's backend cannot do this; the hint names what can."""


class UnknownRun(BadRequest):
    """No run, or more than one, has that id or prefix."""


def install_command(requirement: str, prefix: str = sys.prefix) -> str:
    """Return the command that installs a requirement beside cloudtrain: with pip, pipx or uv, as cloudtrain itself was.

    Args:
        requirement: `cloudtrain[EXTRA]`, or another package.
        prefix: The environment of cloudtrain; pipx, uv tool and uv each leave a file of their own there.
    """
    extra = requirement.startswith("cloudtrain[")
    quoted = f"'{requirement}'" if extra else requirement
    installer = _installer(Path(prefix))
    if installer == "pipx":
        return f"pipx {'install --force' if extra else 'inject cloudtrain'} {quoted}"
    if installer == "uv tool":
        return f"uv tool install --force {'' if extra else 'cloudtrain --with '}{quoted}"
    return f"{installer} install {quoted}"


def reinstall_command(prefix: str = sys.prefix) -> str:
    """Return the command that installs cloudtrain once more, by the tool that installed it; `prefix` as in `install_command`."""
    installer = _installer(Path(prefix))
    if installer == "pipx":
        return "pipx reinstall cloudtrain"
    return f"{installer} install {'--force-reinstall' if installer == 'pip' else '--reinstall'} cloudtrain"


def page(name: str) -> str:
    """Return how a message names a page of the documentation, of which an installed cloudtrain has no file."""
    return f'the page "{name}" of cloudtrain\'s documentation'


def upgrade_command(prefix: str = sys.prefix) -> str:
    """Return the command that upgrades cloudtrain, by the tool that installed it; `prefix` as in `install_command`."""
    installer = _installer(Path(prefix))
    return f"{installer} {'install -U' if installer.endswith('pip') else 'upgrade'} cloudtrain"


def _installer(folder: Path) -> str:
    """Return what installed cloudtrain into an environment: pipx, uv tool, uv pip or pip."""
    if (folder / "pipx_metadata.json").is_file():
        return "pipx"
    if (folder / "uv-receipt.toml").is_file():
        return "uv tool"
    config = folder / "pyvenv.cfg"
    by_uv = config.is_file() and re.search(r"^uv = ", config.read_text(errors="replace"), re.MULTILINE)
    return "uv pip" if by_uv else "pip"


class MissingExtra(BadRequest):
    """An optional dependency is not installed; the hint is the command that installs it."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(
            f"{what} needs the extra {extra}, which is not installed", install_command(f"cloudtrain[{extra}]")
        )
        self.extra = extra


class StoreError(CloudtrainError):
    """The history cannot be read or written."""

    exit_code = 2


class DiskError(CloudtrainError):
    """A file cannot be written on this machine; what was written before stays."""

    exit_code = 2

    def __init__(self, path: object, error: OSError) -> None:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = "free some space, or choose a folder on another disk" if full else "check the path and its permissions"
        super().__init__(f"{path} cannot be written: {error.strerror or error}", hint)


class CapReached(BadRequest):
    """What is left of limits.max_cost or max_total_runtime is too little for another attempt."""


class OverBudget(BadRequest):
    """A budget of cloudtrain.toml is spent."""


class BackendError(CloudtrainError):
    """The platform refused the request or could not be reached."""

    exit_code = 5


class Unreachable(BackendError):
    """The platform does not answer, or says that it is overloaded; what was asked of it may have been done or not.

    Raised by `Backend.submit` it leaves the attempt open: nothing is sent again before `Backend.find` has answered.
    """


class NoService(Unreachable):
    """The connection was refused, or the host's name has no address: waiting alone seldom helps."""


class NotReached(BackendError):
    """Too few machines, or no platform, could be reached, and nothing was sent: the attempt can safely be sent elsewhere.

    Args:
        message: What is wrong with which machine or platform.
        hint: What to do.
        waits: Whether a first attempt waits for the machines; False where they refuse connections.
    """

    def __init__(self, message: str, hint: str = "", *, waits: bool = True) -> None:
        super().__init__(message, hint)
        self.waits = waits


@contextmanager
def before_sending() -> Iterator[None]:
    """Raise NotReached where a platform gives no answer to what `Backend.submit` does before it sends a job."""
    try:
        yield
    except Unreachable as error:
        waits = not isinstance(error, NoService)
        raise NotReached(error.message, error.hint, waits=waits) from error


@contextmanager
def first_request() -> Iterator[None]:
    """Raise NotReached where the connection of the request with which `Backend.submit` sends a job is refused."""
    try:
        yield
    except NoService as error:
        raise NotReached(error.message, error.hint, waits=False) from error


class LogDenied(BackendError):
    """The account may not read an attempt's log; its status can be read all the same."""


class NoCapacity(BackendError):
    """The platform has no such machines free, or a quota is used up; nothing was started.

    Raised by `Backend.submit` it is the event `capacity` of `retry.on_events`.
    """


class RunFailed(CloudtrainError):
    """The run ended in another state than SUCCEEDED.

    Attributes:
        run_id: Id of the run.
        status: Its final status, with state, reason and exit code.
        why: The cause and the line that shows it, "" where none is known.
        advice: What to try, "" for nothing.
        message: The run, its state, the reason and the cause in one text; `str(error)` is the same.
        hint: What to try, and the command for the log.
        exit_code: The exit code of `cloudtrain wait` for this run.
    """

    def __init__(self, run_id: str, status: Status, why: str = "", advice: str = "") -> None:
        super().__init__(
            f"{run_id} ended {status.state}" + "".join(f": {text}" for text in (status.reason, why) if text),
            "; ".join(text for text in (advice, f"cloudtrain logs {run_id}") if text),
        )
        self.run_id = run_id
        self.status = status
        self.why = why
        self.advice = advice
        self.exit_code = status.cli_exit_code


def raise_first(answers: Iterable[object]) -> None:
    """Raise the first error among the answers of several machines: refusals before unreachable ones."""
    errors = [answer for answer in answers if isinstance(answer, CloudtrainError)]
    for error in sorted(errors, key=lambda error: isinstance(error, Unreachable)):
        raise error
