"""The fields of the form New job: step, group and kind of control for every key of the job file.

Help, choices and default of a field come from the job's JSON schema, or from the model of a backend's options. A test
checks that every key of the job has a field.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Any

from cloudtrain.errors import Problem
from cloudtrain.job.problems import dotted


class Step(StrEnum):
    """The steps of the form, in order."""

    GENERAL = "General"
    INFRASTRUCTURE = "Infrastructure"
    SOURCE = "Source"
    REVIEW = "Review"


@dataclass(frozen=True)
class Field:
    """One value of the job file, and how it is edited.

    Kinds: text (the text itself), number and yaml (parsed like `--set`), flag (true, false or not set), choice, several
    (of the choices), words (split like a shell), lines (one text a line), rows (a mapping).
    """

    path: tuple[str, ...]
    step: Step
    group: str
    kind: str
    label: str
    help: str = ""
    default: str = ""
    choices: tuple[str, ...] = ()
    main: bool = True  # always visible; the others are in an expansion

    @property
    def name(self) -> str:
        """The path with dots."""
        return dotted(self.path)


# step -> group -> keys; those after `|` are in an expansion, and so are keys of a section that no group names.
_LAYOUT: dict[Step, dict[str, str]] = {
    Step.GENERAL: {
        "Job": "name | labels",
        "Script": "entrypoint args | trainer run setup arg_style distributed_env sm_env aip_env resume_args keep"
        " keep_limit compat metrics fit.model fit.batch fit.sequence fit.precision fit.checkpointing fit.accumulation fit.steps",
        "Hyperparameters": "hyperparameters",
        "Parallelism": "parallelism.strategy | parallelism.tp_size parallelism.pp_size parallelism.cp_size"
        " parallelism.dp_replicate_size parallelism.dp_shard_size parallelism.microbatches parallelism.pp_schedule"
        " parallelism.virtual_stages parallelism.offload parallelism.accelerate_config",
        "Checkpoints": "checkpoint.every checkpoint.keep | checkpoint.required",
    },
    Step.INFRASTRUCTURE: {
        "Place": "target | prefer image output audit",
        "Nodes": "num_nodes processes_per_node resources.accelerators resources.use_spot | min_nodes health"
        " resources.instance_type resources.cpus resources.memory resources.disk_gb resources.usd_per_hour"
        " resources.priced_as",
        "Limits": "limits.max_runtime limits.max_cost limits.max_total_runtime retry.max_attempts"
        " | limits.grace limits.stall limits.max_silence limits.idle limits.max_wait retry.on_events",
        "Environment": "env secrets",
    },
    Step.SOURCE: {
        "Source": "source | environment.requirements allow_secrets allow_large allow_pointers",
        "Inputs": "inputs",
    },
}
_KINDS = {
    "entrypoint": "text", "target": "text", "run": "yaml", "setup": "yaml", "resume_args": "words", "keep": "lines",
    "args": "words", "labels": "rows", "metrics": "rows", "hyperparameters": "rows", "env": "rows", "secrets": "rows",
    "inputs": "rows", "allow_secrets": "lines", "allow_large": "lines", "allow_pointers": "lines",
    "retry.on_events": "several",
}  # fmt: skip
_LABELS = {
    "name": "Name", "args": "Further arguments", "arg_style": "Argument style", "entrypoint": "Script",
    "run": "Shell text", "keep": "Files to copy back", "keep_limit": "At most of them",
    "setup": "Setup commands", "trainer": "Shared trainer",
    "num_nodes": "Nodes", "min_nodes": "Fewest nodes", "processes_per_node": "Processes per node",
    "resources.use_spot": "Spot capacity", "resources.disk_gb": "Disk (GB)", "resources.cpus": "CPU cores",
    "retry.max_attempts": "Attempts", "retry.on_events": "Retry after", "limits.max_runtime": "Longest run",
    "limits.max_cost": "Maximum cost", "limits.max_total_runtime": "Maximum time of all attempts",
    "resources.usd_per_hour": "Price of a node (USD per hour)", "resources.priced_as": "Machine in a price list",
    "limits.grace": "Grace", "limits.stall": "Maximum time without output and work",
    "limits.max_silence": "Maximum time without output", "limits.idle": "Maximum time without GPU use",
    "checkpoint.every": "Every",
    "prefer": "Try first", "checkpoint.keep": "Kept", "checkpoint.required": "Required by later attempts",
    "limits.max_wait": "Maximum wait for machines", "env": "Environment variables", "source": "Folder or git address",
    "environment.requirements": "Requirements file", "distributed_env": "Variables of a rank (RANK, WORLD_SIZE)",
    "health": "Check of the nodes", "sm_env": "SageMaker's variables", "aip_env": "Vertex AI's variables",
    "allow_secrets": "Files that may contain credentials",
    "allow_large": "Files of any size", "allow_pointers": "Files that may be Git-LFS pointers",
}  # fmt: skip


@cache
def job_fields() -> tuple[Field, ...]:
    """Return the fields of all keys of the job file except `options`, step by step."""
    from cloudtrain.job.job import schema

    schema_parts = dict(_keys(schema()))
    layout = {step: {group: keys.partition("|") for group, keys in groups.items()} for step, groups in _LAYOUT.items()}
    named = {key for groups in layout.values() for main, _, rare in groups.values() for key in (main + rare).split()}
    fields = []
    for step, groups in layout.items():
        for group, (main, _, rare) in groups.items():
            sections = {key.partition(".")[0] for key in (main + rare).split()}
            unnamed = [
                key
                for key in schema_parts
                if key not in named and (key.partition(".")[0] in sections or (group == "Job" and "." not in key))
            ]
            named.update(unnamed)
            for key in (*main.split(), *rare.split(), *unnamed):
                field = _field(tuple(key.split(".")), schema_parts[key], step, group)
                fields.append(replace(field, main=key in main.split()))
    return tuple(fields)


def option_fields(backend: str) -> tuple[Field, ...]:
    """Return the fields of a backend's options; raises UnknownBackend, MissingExtra."""
    from cloudtrain.backends import registry

    schema = registry.backend_class(backend).options().model_json_schema()
    required = schema.get("required", ())
    fields = []
    for key, part in schema.get("properties", {}).items():
        option = _field(("options", backend, key), part, Step.INFRASTRUCTURE, "Options")
        fields.append(replace(option, label=_label(key), help=option.help, main=key in required))
    return tuple(fields)


def backends_by_target(folder: Any) -> dict[str, str]:
    """Return the backend of every possible `target` in a folder; raises BadRequest for an invalid cloudtrain.toml."""
    from cloudtrain.backends import registry
    from cloudtrain.job import targets

    named = {name: target.backend for name, target in sorted(targets.named_targets(folder).items())}
    return {**{name: name for name in registry.names()}, **named}


def locate(path: str) -> tuple[Step, str]:
    """Return the step and the field name for a problem's path; the name is "" where no field has the path."""
    names = [field.name for field in job_fields()]
    nearest = max((name for name in names if _is_below(path, name)), key=len, default="")
    if nearest:
        return next(field.step for field in job_fields() if field.name == nearest), nearest
    if _is_below(path, "options"):
        return Step.INFRASTRUCTURE, ".".join(path.replace("[", ".").split(".")[:3])
    section = path.partition(".")[0]
    first_of_section = next((field for field in job_fields() if field.path[0] == section), None)
    return (first_of_section.step, first_of_section.name) if first_of_section and section else (Step.REVIEW, "")


def by_step(problems: list[Problem]) -> dict[Step, list[Problem]]:
    """Group problems by step."""
    problems_by_step: dict[Step, list[Problem]] = {}
    for problem in problems:
        problems_by_step.setdefault(locate(problem.path)[0], []).append(problem)
    return problems_by_step


def _is_below(path: str, name: str) -> bool:
    return path == name or path.startswith((f"{name}.", f"{name}["))


def _keys(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every key of the schema with its part; keys of sections with dots."""
    for key, part in schema["properties"].items():
        names = [form["$ref"].rpartition("/")[2] for form in _forms(part) if "$ref" in form]
        section = schema["$defs"].get(names[0]) if names else None
        if section:
            yield from ((f"{key}.{name}", inner) for name, inner in section["properties"].items())
        elif key != "options":
            yield key, part


def _field(path: tuple[str, ...], part: Mapping[str, Any], step: Step, group: str) -> Field:
    choices = tuple(str(choice) for form in _forms(part) for choice in form.get("enum", ()))
    schema_default = part.get("default")
    name = dotted(path)
    if _KINDS.get(name) == "several":
        choices = tuple(part["items"]["enum"])
    default = "" if schema_default in (None, "", [], {}) else str(schema_default)
    if isinstance(schema_default, bool):
        default = default.lower()
    kind = _KINDS.get(name) or ("choice" if choices else _kind(part))
    return Field(path, step, group, kind, _LABELS.get(name) or _label(path[-1]), part.get("description", ""),
                 default if kind != "several" else "", choices)  # fmt: skip


def _forms(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [part, *part.get("anyOf", ())]


def _kind(part: Mapping[str, Any]) -> str:
    types = {form.get("type") for form in _forms(part)} - {None, "null"}
    if types == {"string"}:
        return "text"
    if types == {"boolean"}:
        return "flag"
    return "number" if types and types <= {"integer", "number"} else "yaml"


def _label(key: str) -> str:
    return key[:1].upper() + key[1:].replace("_", " ") if not key.endswith("_size") else key
