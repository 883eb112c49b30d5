"""Recognise a sweep, or a file of another tool (SkyPilot, dstack, an operator of Kubernetes), that was given as a job file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from cloudtrain.errors import Problem, page

SWEEP = "sweep"
# keys that a file of another tool has and a job file has not
_OTHERS = {
    "SkyPilot": {"workdir", "file_mounts", "envs", "service", "storage_mounts"},
    "dstack": {"type", "commands", "python", "nodes", "ide", "fleets", "spot_policy", "max_duration"},
}
# these alone, with envs and run, are a task of SkyPilot
_SKYPILOT = {"name", "envs", "secrets", "setup", "run", "num_nodes", "resources"}
_OPERATORS = ("MPIJob", "RayJob", "RayCluster", "PyTorchJob", "TFJob")
_CLEAR = {"file_mounts", "storage_mounts", "workdir", "commands"}  # one of these is enough to know the tool


def recognise(unknown: Collection[Any], given: Mapping[str, Any]) -> str | None:
    """Return the tool whose file this is, by its keys at the top; None for a job file with mistakes.

    Args:
        unknown: The keys at the top that a job file does not have.
        given: The whole file.
    """
    if "$schema" in unknown and (schema := str(given["$schema"])).endswith("Job.schema.json"):
        return schema.rpartition("/")[2]
    if "apiVersion" in unknown and given.get("kind") in _OPERATORS:
        return str(given["kind"])
    if "envs" in unknown and "run" in given and given.keys() <= _SKYPILOT:
        return "SkyPilot"
    if len({"method", "metric", "parameters", "program", "run_cap"} & set(unknown)) > 1:
        return SWEEP
    keys_of = {tool: keys & set(unknown) for tool, keys in _OTHERS.items()}
    return next((tool for tool, found in keys_of.items() if len(found) > 1 or found & _CLEAR), None)


def problem(tool: str) -> Problem:
    """Return what is said of a file of a tool."""
    if tool == SWEEP:
        return Problem("this is a sweep, and not a job file", "", "start it with cloudtrain sweep FILE")
    if tool.endswith(".json"):
        hint = "convert it: cloudtrain init --from FILE -o NEW.yaml"
        return Problem(f"this is a file of {tool}, and not a job file", "$schema", hint)
    if tool in _OPERATORS:
        instead = "ray: true" if tool.startswith("Ray") else "num_nodes, and roles for several programs"
        hint = f"name its image and command in a job with target: a cluster; in place of a {tool}: {instead}"
        return Problem(f"this is a {tool} of Kubernetes, and not a job file", "kind", hint)
    shown = page("From SkyPilot" if tool == "SkyPilot" else "scripts")
    hint = f"copy its setup and commands into a cloudtrain job file with compat: {tool.lower()}; {shown} has an example"
    return Problem(f"this is a {tool} file, and not a job file", "", hint)
