"""The job: what the user wants, whole. Loaded from a file, a dictionary or keyword arguments, and validated at once.

A file is read, `--set` values are laid over it, fields and their combinations are validated, and numbers are kept as written.
Each way raises BadJob with all problems. A Job is frozen: `replace` makes another one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import ConfigDict

from cloudtrain.errors import BadJob, BadRequest, Problem
from cloudtrain.job import roles
from cloudtrain.job.arguments import Number
from cloudtrain.job.document import HALF, MAX_CHARACTERS, Document, read_yaml, scalar
from cloudtrain.job.fields import Spec
from cloudtrain.job.model import NAME, SHARED_TRAINER, JobModel
from cloudtrain.job.problems import dotted, explain, fit_name, located
from cloudtrain.job.rules import find_conflicts
from cloudtrain.job.sections import Checkpoint, Environment, Input, Limits, Parallelism, Resources, Retry

if TYPE_CHECKING:
    from typing import Unpack

    from cloudtrain.job.keys import JobKeys


__all__ = [
    "NAME",
    "SHARED_TRAINER",
    "Checkpoint",
    "Environment",
    "Input",
    "Job",
    "Limits",
    "Parallelism",
    "Resources",
    "Retry",
    "fit_name",
    "schema",
]


class Job(JobModel):
    """One job: the job file's keys as keyword arguments and as attributes.

    Sections are mappings or their own classes: `Job(entrypoint="train.py", resources={"accelerators": "A100:8"})`.
    It does not block. The page "spec" of the documentation lists the keys of the sections.

    Raises:
        BadJob: The job is wrong; `problems` lists everything that was found.

    Args:
    """

    model_config = ConfigDict(defer_build=False)

    def __init__(self, **keys: Unpack[JobKeys]) -> None:
        data = {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in keys.items()}
        fill_job(self, data, None, Path.cwd())

    @classmethod
    def load(cls, source: str | os.PathLike[str], sets: Sequence[str] = ()) -> Self:
        """Return the job of a job file; blocking (reads one file).

        Args:
            source: Path of the file, or the YAML text itself.
            sets: Changes, such as `num_nodes=2`, as in `cloudtrain submit --set`.

        Returns:
            The job.

        Raises:
            BadRequest: The file cannot be read.
            BadJob: The job is wrong; `problems` lists everything that was found.
        """
        document, folder = read(source)
        return cls.from_document(apply_sets(document, sets), folder)

    @classmethod
    def from_document(cls, document: Document, folder: Path) -> Self:
        """Return the job of a parsed file.

        Args:
            document: The parsed file.
            folder: Folder to which relative paths in it belong.

        Returns:
            The job.

        Raises:
            BadJob: The job is wrong; `problems` lists everything that was found.
        """
        job = cls.__new__(cls)
        fill_job(job, values(document), document, folder)
        return job

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the job of a dictionary that `to_dict` returned.

        Args:
            data: The dictionary. One without entrypoint, run, trainer and roles is of version 0.1: it runs the shared trainer.

        Returns:
            The job.

        Raises:
            BadJob: The job is wrong; `problems` lists everything that was found.
        """
        old = data.get("entrypoint") is None and not {"run", "trainer", "roles"} & data.keys()
        keys: dict[str, Any] = {**data, "trainer": True} if old else dict(data)
        return cls(**keys)

    def to_dict(self, *, given: bool = False) -> dict[str, Any]:
        """Return plain data for JSON, from which `from_dict` makes an equal job.

        Args:
            given: Leave out defaults, and values that are computed from other keys.

        Returns:
            A dictionary of the job's keys.
        """
        data = self.model_dump(mode="json", exclude_unset=given)
        if "requirements" in self.environment.model_fields_set and self.environment.requirements is None:
            data.setdefault("environment", {})["requirements"] = "none"
        return self._unfollowed(data) if given else data

    def replace(self, **changes: Unpack[JobKeys]) -> Self:
        """Return a validated copy with some keys changed.

        Values that are computed from other keys (the strategy from the number of processes, the number of attempts from
        use_spot) are computed again.

        Args:
            changes: Keys of the job with their new values.

        Returns:
            A new job; this one does not change.

        Raises:
            BadJob: The changed job is wrong.
        """
        data = self._unfollowed(self.to_dict())
        made = type(self)(**{**data, **{key: _plain(value) for key, value in changes.items()}})
        made._document, made._written_name = self._document, self._written_name
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and self.__dict__ == other.__dict__  # not where it was written

    __hash__ = None  # type: ignore[assignment]


def _shown_default(value: Any) -> Any:
    return {} if isinstance(value, Spec) else value


# What help() and notebooks show: names and plain defaults instead of pydantic's annotations, and the keys' descriptions.
_FIELDS = Job.model_fields
Job.__signature__ = Signature(
    [
        Parameter(name, Parameter.KEYWORD_ONLY, default=_shown_default(field.get_default(call_default_factory=True)))
        for name, field in _FIELDS.items()
    ]
)
Job.__doc__ = f"{Job.__doc__}".rstrip() + "".join(f"\n        {name}: {_FIELDS[name].description}" for name in _FIELDS)


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json", exclude_unset=True) if isinstance(value, Spec) else value


def schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of the job file, with the descriptions that editors show."""
    made = Job.model_json_schema(mode="validation")
    spread = made["properties"]["parallelism"]
    spread["anyOf"] = [{"const": "auto", "type": "string"}, {"$ref": spread.pop("$ref")}]
    made["properties"]["name"] |= {"pattern": f"^{NAME.pattern}$"}
    for entry in made["properties"].values():
        if "$ref" in entry:
            entry.pop("default", None)  # the section's own keys say it
    del made["properties"]["name"]["default"]  # what follows from other values has no default of its own
    spread.pop("default", None)
    del made["$defs"]["Parallelism"]["properties"]["strategy"]["default"]
    del made["$defs"]["Retry"]["properties"]["max_attempts"]["default"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made, "title": "cloudtrain job"}


_TEXTS = {"env", "labels", "args"}  # any scalar there is its written text
_FLAT = {"env", "labels", "secrets", "metrics"}  # behind the first dot all is one key, dots included


def read(source: str | os.PathLike[str]) -> tuple[Document, Path]:
    """Return the document of a file and its folder, or of a text that is no file's name and the current folder.

    A file in a platform's own form, such as a batch script, is read as the job that it makes. Blocking. Raises BadRequest
    when the file cannot be read, BadJob when it is not valid YAML.
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
        from cloudtrain.job import forms

        if form := forms.of_text(text := raw.decode("utf-8", "replace")):
            return form.read(text, str(path)), folder
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
    elif isinstance(value, str) and ("\0" in value or HALF.search(value)):
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
