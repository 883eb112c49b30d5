"""What JOB means on the command line: a job file, a script, a plan, a folder with a job.yaml, or the job.yaml here."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cloudtrain.backends.api import Plan
from cloudtrain.errors import BadRequest

JOB_FILES = ("job.yaml", "job.yml")
SCRIPTS = (".py", ".sh")


class Wanted(NamedTuple):
    """A job for `Submitter`, and the settings to lay over it."""

    job: Mapping[str, Any] | Path
    sets: tuple[str, ...]


def wanted(
    text: str | None,
    args: Sequence[str] = (),
    sets: Sequence[str] = (),
    *,
    gpus: str | None = None,
    nodes: str | None = None,
    processes: str | None = None,
) -> Wanted | Plan:
    """Return what a JOB argument names, with everything else that was said on the command line; blocking.

    Raises BadRequest when it names nothing that can be submitted.
    """
    short = (("resources.accelerators", gpus), ("num_nodes", nodes), ("processes_per_node", processes))
    settings = [*sets, *(f"{key}={value}" for key, value in short if value is not None)]
    path = _path(text)
    if path.suffix in SCRIPTS or (path.suffix not in (".yaml", ".yml", ".json") and _has_shebang(path)):
        return Wanted(script_job(path, args), tuple(settings))
    if path.suffix == ".json" and (plan := _plan(path)):
        if settings or args:
            raise BadRequest(
                "a plan is sent as it is, without changes", "cloudtrain plan ... -o plan.json makes another one"
            )
        return plan
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise BadRequest(
            f"{path} is neither a job file (.yaml), a script (.py, .sh) nor a plan (.json)",
            "cloudtrain init writes a job file",
        )
    if args:
        settings.append("args=" + json.dumps([*_args_of(path, settings), *args], ensure_ascii=False))
    return Wanted(path, tuple(settings))


def script_job(path: Path, args: Sequence[str] = ()) -> dict[str, Any]:
    """Return the job of a bare script.

    Its source is the folder one stands in when that holds the script and belongs to the same git work tree, else the
    root of the script's work tree; outside git the script's own folder. The script runs in its source.
    """
    from cloudtrain.job.job import fit_name

    script = Path(os.path.abspath(path))  # noqa: PTH100 - a link stays in the tree that it was named in
    here = Path.cwd()
    root = _work_tree(script.parent)
    if root is None:  # never a whole home, because somebody stood there
        source = here if here in script.parents and here not in (Path.home(), Path("/")) else script.parent
    else:
        source = here if here in script.parents and _work_tree(here) == root else root
    entrypoint = str(script.relative_to(source))
    if entrypoint.startswith("-"):
        raise BadRequest(f"{entrypoint} begins with a dash", "rename the script")
    return {"name": fit_name(script.stem), "source": str(source), "entrypoint": entrypoint, "args": list(args)}


def _path(text: str | None) -> Path:
    if text is None:
        found = next((Path(name) for name in JOB_FILES if Path(name).is_file()), None)
        if found is None:
            raise BadRequest("there is no job.yaml here", "name a job file or a script, or write one: cloudtrain init")
        return found
    path = Path(text)
    try:
        if path.is_dir():
            inside = next((path / name for name in JOB_FILES if (path / name).is_file()), None)
            if inside is None:
                raise BadRequest(
                    f"the folder {path} holds no job.yaml", "name a job file or a script, or write one: cloudtrain init"
                )
            return inside
        if not path.exists():
            raise BadRequest(
                f"there is no file {path}{_near(path)}",
                "name a job file, a script or a plan; cloudtrain init writes a job file",
            )
        if not path.is_file():
            raise BadRequest(f"{path} is no file", "name a job file, a script or a plan")
        path.open("rb").close()
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}", "check the path and its permissions") from None
    return path


def _near(path: Path) -> str:
    from difflib import get_close_matches

    try:
        names = [entry.name for entry in path.parent.iterdir()][:5000]
    except OSError:
        return ""
    near = get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.with_name(near[0])}?" if near else ""


def _plan(path: Path) -> Plan | None:
    """Return the plan in a JSON file, or None when the file is something else: a job, perhaps."""
    try:
        text = path.read_text("utf-8")
        data = json.loads(text)
    except ValueError:
        return None
    return Plan.from_json(text) if isinstance(data, dict) and {"request", "manifest"} & data.keys() else None


def _args_of(path: Path, sets: Sequence[str]) -> list[str]:
    from cloudtrain.job.job import Job

    return list(Job.load(path, sets).args)


def _has_shebang(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"#!"


def _work_tree(folder: Path) -> Path | None:
    """Return the root of the git work tree around a folder; None outside one, and where git does not trust it."""
    return next((above for above in (folder, *folder.parents) if (above / ".git").exists()), None)
