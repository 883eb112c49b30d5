"""The job: what the user wants, whole. Loaded from a file, a dictionary or keyword arguments, and validated at once.

Each way raises BadJob with all problems. A Job is frozen: `replace` makes another one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import ConfigDict

from cloudtrain.job.document import Document
from cloudtrain.job.fields import Spec
from cloudtrain.job.load import fill_job, load_job, make_job
from cloudtrain.job.model import NAME, SHARED_TRAINER, JobModel
from cloudtrain.job.problems import fit_name
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
        return load_job(cls, source, sets)

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
        return make_job(cls, document, folder)

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
