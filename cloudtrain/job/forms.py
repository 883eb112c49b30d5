"""Job files in a platform's own form, such as a batch script: a module of that platform's package reads each.

An installed package adds a form of its own by an entry point of the group `cloudtrain.job_files`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Protocol, cast

from cloudtrain.job.document import Document
from cloudtrain.job.providers import JOB_FILES

GROUP = "cloudtrain.job_files"


class Form(Protocol):
    """What such a module has."""

    def is_job_file(self, text: str) -> bool:
        """Return whether a file that begins with #! is a job in this form."""

    def read(self, text: str, file: str) -> Document:
        """Return its job; what is refused stands in the document's `problems`, with its line."""

    def notes(self, body: str) -> list[str]:
        """Return a sentence for each line of a job's `run` that has no effect."""

    def fit_backend(self, whole: Document, backend: str, site: Sequence[str] = ()) -> None:
        """Change a job of this form, in place, to one of its backend; `site` is `directives` of the target."""


def of_text(text: str) -> Form | None:
    """Return the form of a file's text, None where it is in none."""
    if not text.startswith("#!"):
        return None
    return next((form for form in map(_load, _modules(tuple(sys.path))) if form.is_job_file(text)), None)


def of_compat(compat: object) -> Form | None:
    """Return the form whose jobs have a value of `compat`, None where it is no form's."""
    module = JOB_FILES.get(compat) if isinstance(compat, str) else None
    return _load(module) if module else None


@cache
def _modules(folders: tuple[str, ...]) -> list[str]:
    """Return the module of each form; the metadata of every package in these folders of sys.path is read once in a process."""
    from importlib.metadata import entry_points

    return [*JOB_FILES.values(), *(point.value for point in entry_points(group=GROUP))]


def _load(module: str) -> Form:
    return cast("Form", import_module(module))
