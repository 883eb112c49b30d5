"""Find values of a job that look like credentials: a plan, a request and the history would hold them as plain text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cloudtrain.errors import Problem
from cloudtrain.source import secrets
from cloudtrain.source.ignore import matches

if TYPE_CHECKING:
    from cloudtrain.job.job import Job


def find_keys(job: Job) -> list[Problem]:
    """Return a problem for each such value that `allow_secrets` does not name as env.NAME, args and the like.

    The rules are those for files (cloudtrain/source/secrets.py). A problem holds no value.
    """
    return [
        Problem(f"looks like a credential: {found[0][1]}", path, _hint(path))
        for path, text in _texts(job)
        if (found := secrets.search(text.encode("utf-8", "surrogateescape")))
        and not matches(job.allow_secrets, path.partition("[")[0])
    ]


def _texts(job: Job) -> Iterator[tuple[str, str]]:
    """Yield what goes to the ranks with its path; some credentials are known by the name before them."""
    for section in ("env", "hyperparameters"):
        yield from ((f"{section}.{name}", f"{name}={value}") for name, value in getattr(job, section).items())
    for section in ("entrypoint", "args", "resume_args"):
        option = ""
        for number, word in enumerate(words if isinstance(words := getattr(job, section), list) else ()):
            yield f"{section}[{number}]", f"{option}={word}" if option else word
            option = word if word.startswith("--") and "=" not in word else ""
    yield from (("run", job.run or ""), ("setup", job.setup or ""))


def _hint(path: str) -> str:
    section, _, name = path.partition("[")[0].partition(".")
    secret = (
        f"secrets.{name}: env:{name}" if section == "env" else "secrets: {NAME: env:NAME}, read from the environment"
    )
    return f"write {secret}; allow_secrets: [{path.partition('[')[0]}] where it is meant"
