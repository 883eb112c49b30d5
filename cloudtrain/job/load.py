"""Load a job: read the file, apply `--set` values, validate fields and their combinations, keep numbers as written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cloudtrain.errors import BadJob, BadRequest, Problem
from cloudtrain.job import roles
from cloudtrain.job.arguments import Number
from cloudtrain.job.document import MAX_CHARACTERS, Document, read_yaml, scalar
from cloudtrain.job.problems import dotted, explain, fit_name, located
from cloudtrain.job.rules import find_conflicts

if TYPE_CHECKING:
    from cloudtrain.job.model import JobModel

J = TypeVar("J", bound="JobModel")
_TEXTS = {"env", "labels", "args"}  # any scalar there is its written text
_FLAT = {"env", "labels", "secrets", "metrics"}  # behind the first dot all is one key, dots included


def load_job(kind: type[J], source: str | os.PathLike[str], sets: Sequence[str] = ()) -> J:
    """Return the job of a file, or of a text that is no file's name, with `key=value` settings laid over it.

    Blocking. Raises BadRequest, BadJob.
    """
    document, folder = read(source)
    return make_job(kind, apply_sets(document, sets), folder)


def make_job(kind: type[J], document: Document, folder: Path) -> J:
    """Return the job of a parsed file; raises BadJob."""
    job = kind.__new__(kind)
    fill_job(job, values(document), document, folder)
    return job


def read(source: str | os.PathLike[str]) -> tuple[Document, Path]:
    """Return the document of a file and its folder, or of a text that is no file's name and the current folder.

    A batch script of Slurm is read as the job that it makes. Blocking. Raises BadRequest when the file cannot be read,
    BadJob when it is not valid YAML.
    """
    if isinstance(source, str) and not _is_name(source):
        return _mapping(read_yaml(source, "<text>"), "<text>"), Path.cwd()
    path = Path(source)
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_CHARACTERS * 4 + 1)
    except FileNotFoundError:
        raise BadRequest(f"there is no job file {path}", "create one with cloudtrain init") from None
    except IsADirectoryError:
        inside = path / "job.yaml"
        raise BadRequest(
            f"{path} is a folder", f"give the file: {inside}" if inside.exists() else "give the job file instead"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadRequest(f"{path} cannot be read: {reason}", "check the path and its permissions") from None
    folder = Path(os.path.abspath(path)).parent  # noqa: PTH100
    if raw.startswith(b"#!"):
        from cloudtrain.job import sbatch

        if sbatch.is_batch_script(text := raw.decode("utf-8", "replace")):
            return sbatch.read(text, str(path)), folder
    return _mapping(read_yaml(raw, str(path)), str(path)), folder


def apply_sets(document: Document, sets: Sequence[str]) -> Document:
    """Apply `--set key=value` settings to the document, in place, and return it.

    Invalid settings are added to `document.problems`.
    """
    main = ""
    if sets and isinstance(document.value, dict) and "roles" in document.value:
        document.value = dict(roles.lift_main(document.value, document))
        main = roles.main_of(document.value)
    for setting in sets:
        key, equals, text = setting.partition("=")
        key = key.strip()
        own = key.removeprefix(f"roles.{main}.")
        if main and own.partition(".")[0] in roles.PROGRAM:
            key = own
        if not equals or not key:
            document.problems.append(
                Problem(
                    f"{setting[:60]!r} is not a setting of the form KEY=VALUE", "", "write --set key=value", "--set"
                )
            )
            continue
        try:
            document.put(_path(key, document), scalar(text, "--set"))
        except BadJob as error:
            hint = "put text that begins with [, { or a quote in quotes" if text[:1] in tuple("[{'\"") else ""
            document.problems += [Problem(p.message, key, hint or p.hint, "--set") for p in error.problems]
    return document


def values(document: Document) -> dict[str, Any]:
    """Return the values for a Job: numbers as written where text is wanted."""
    if not isinstance(document.value, dict):
        return {}
    return {key: _written(value, document, (key,)) for key, value in document.value.items()}


def fill_job(job: JobModel, data: Mapping[str, Any], document: Document | None, folder: Path) -> None:
    """Validate values into an empty job; relative paths among them are relative to the folder.

    Raises BadJob with every problem: of single fields, and of fields that are right by themselves and wrong together.
    """
    from pydantic import ValidationError

    if "roles" in data:
        data = roles.lift_main(data, document)
    name = data.get("name")
    if name is None:
        data = {**data, "name": fit_name(_first_name(data, document, folder))}
    elif isinstance(name, str) and re.fullmatch(r"(?=.*[A-Z_])[A-Za-z][A-Za-z0-9_-]{0,29}", name):
        data = {**data, "name": fit_name(name)}
    validator = type(job).__pydantic_validator__
    context = {"folder": folder}
    problems = [*(document.problems if document else ()), *_unsendable(data, document)]
    bad = {problem.path.partition(".")[0].partition("[")[0] for problem in problems}
    good = {key: value for key, value in data.items() if key not in bad}
    checked: JobModel | None = job
    try:
        validator.validate_python(good, self_instance=job, context=context)
    except ValidationError as error:
        problems += explain(error, type(job), document)
        bad |= {str(item["loc"][0]) for item in error.errors() if item["loc"]}
        checked = type(job).__new__(type(job))
        good = {key: value for key, value in good.items() if key not in bad}
        try:
            validator.validate_python(good, self_instance=checked, context=context)
        except ValidationError:
            checked = None
    if checked is not None:
        conflicts = (conflict for conflict in find_conflicts(checked) if not bad & set(conflict.fields))
        problems += [located(conflict.problem, document) for conflict in conflicts]
    if problems:
        raise BadJob(sorted(problems, key=lambda problem: problem.line or 0))
    job._document, job._written_name = document, name


def _unsendable(value: Any, document: Document | None, path: tuple[Any, ...] = ()) -> Iterator[Problem]:
    """Yield the texts that no process can receive as an argument or a variable."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _unsendable(key, document, (*path, key))
            yield from _unsendable(item, document, (*path, key))
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            yield from _unsendable(item, document, (*path, at))
    elif isinstance(value, str) and ("\0" in value or any("\ud800" <= c <= "\udfff" for c in value)):
        content = "a NUL character, which no process can receive" if "\0" in value else "half of a surrogate pair"
        shown = dotted(path).encode("ascii", "backslashreplace").decode().replace("\0", "\\0")
        yield located(Problem(f"holds {content}", shown), document, path)


def _first_name(data: Mapping[str, Any], document: Document | None, folder: Path) -> str:
    entrypoint, source = data.get("entrypoint"), data.get("source")
    if document is None and isinstance(entrypoint, str) and entrypoint:
        return entrypoint.split(".")[-1] if entrypoint.startswith("-m") else Path(entrypoint).stem
    if document is None and isinstance(source, str) and "://" not in source and "\0" not in source:
        return Path(os.path.abspath(source)).name  # noqa: PTH100
    return folder.name


def _written(value: Any, document: Document, path: tuple[str | int, ...]) -> Any:
    if isinstance(value, dict):
        return {key: _written(item, document, (*path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_written(item, document, (*path, at)) for at, item in enumerate(value)]
    text = document.mark(path).text
    if value is None or isinstance(value, str) or text is None:
        return value
    path = path[2:] if path[0] == "roles" and path[2:] else path
    if path[0] in _TEXTS:
        return text
    if isinstance(value, bool):
        return value
    if path[0] == "hyperparameters":
        return Number(text)
    # An account number of a backend's options keeps its zeros; a model that wants a number takes the text as well.
    return (
        text
        if path[0] == "options" and isinstance(value, int) and text.lstrip("+-").startswith("0") and text != "0"
        else value
    )


def _path(key: str, document: Document) -> tuple[str, ...]:
    section, dot, rest = key.partition(".")
    if not dot:
        return (section,)
    if section in _FLAT:
        return (section, rest)
    if section != "hyperparameters":
        return tuple(key.split("."))
    at, path = (document.value or {}).get(section), [section]
    while True:  # into a mapping that is there, else one key with its dots
        head, dot, tail = rest.partition(".")
        if not (dot and isinstance(at, dict) and isinstance(at.get(head), dict)):
            return (*path, rest)
        at, rest = at[head], tail
        path.append(head)


def _is_name(source: str) -> bool:
    try:
        if Path(source).exists():
            return True
    except (OSError, ValueError):
        return False
    return not ("\n" in source or ": " in source or source.lstrip().startswith("{"))


def _mapping(document: Document, file: str) -> Document:
    if document.value is None:
        document.value = {}
    if not isinstance(document.value, dict):
        raise BadJob([Problem("a job is a mapping (key: value)", file=file, line=document.mark(()).line,
                              hint="create one with cloudtrain init")])  # fmt: skip
    return document
