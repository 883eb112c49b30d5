"""What a command line says of a job: a job file, a script, a module, a command, a plan, or the job.yaml here."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple

from cloudtrain.backends.api import Plan
from cloudtrain.cli.view import terminal
from cloudtrain.cli.view.options import JobWords
from cloudtrain.errors import BadRequest
from cloudtrain.job.problems import fit_name

JOB_FILES = ("job.yaml", "job.yml")
SCRIPTS = (".py", ".sh")
LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "python", "python3", "bash", "sh")  # on the node, if not here


class JobInput(NamedTuple):
    """A job for `Submitter`, and the `--set` values that override it."""

    job: Mapping[str, Any] | Path
    sets: tuple[str, ...]


def parse_job_words(words: JobWords) -> JobInput | Plan:
    """Return the job or plan that a command line names, with its options applied; blocking.

    Raises BadRequest when it names nothing that can be submitted.
    """
    args = words.args
    name = [] if words.name is None else [f"name={words.name}"]
    settings = [*words.sets, *name, *layout_settings(words.gpus, words.nodes, words.processes)]
    settings += ["ray=true"] if words.ray else []
    settings += [_environment_setting(text) for text in words.env]
    if words.module is not None:
        if words.job is not None:
            raise BadRequest(f"both the module {words.module} and {words.job} are named", "give only one of them")
        here = {"name": fit_name(words.module.rpartition(".")[2]), "source": str(Path.cwd())}
        return JobInput({**here, "entrypoint": f"-m {words.module}", "args": list(args)}, tuple(settings))
    if words.job is None and args and not args[0].startswith("-"):
        job_file = next((name for name in JOB_FILES if Path(name).is_file()), None)
        if job_file is None:
            return JobInput(_command_job(args), tuple(settings))
        if args[0] in LAUNCHERS or which(args[0]):
            terminal.note(f"note: {args[0]} is a program: it runs once per node, and {job_file} is not used")
            return JobInput(_command_job(args), tuple(settings))
    path = _resolve_path(words.job)
    if _is_batch_script(path):
        if path.suffix == ".sh":
            terminal.note(f"note: {path} has #SBATCH lines: it is read as a batch script of Slurm")
        settings.insert(0, f"source={json.dumps(script_job(path)['source'])}")
        if args:
            settings.append("args=" + json.dumps(list(args), ensure_ascii=False))
        return JobInput(path, tuple(settings))
    if path.suffix in SCRIPTS or (path.suffix not in (".yaml", ".yml", ".json") and _has_shebang(path)):
        return JobInput(script_job(path, args), tuple(settings))
    if path.suffix == ".json" and (plan := _load_plan(path)):
        if settings or args:
            raise BadRequest("a plan is submitted unchanged", "make a new plan: cloudtrain plan ... -o plan.json")
        return plan
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise BadRequest(
            f"{path} is not a job file (.yaml), a script (.py, .sh), a batch script (#SBATCH) or a plan (.json)",
            f"make a script of the notebook: jupyter nbconvert --to script {path}"
            if path.suffix == ".ipynb"
            else "a batch script begins with #!, as sbatch wants it; cloudtrain init creates a job file",
        )
    if args:
        settings.append("args=" + json.dumps([*_job_args(path, settings), *args], ensure_ascii=False))
    return JobInput(path, tuple(settings))


def layout_settings(gpus: str | None, nodes: str | None, processes: str | None) -> list[str]:
    """Return --gpus, --nodes and --processes as values of --set; raises BadRequest."""
    given = {
        "resources.accelerators": None if gpus is None else _accelerators(gpus),
        "num_nodes": nodes,
        "processes_per_node": processes,
    }
    return [f"{key}={value}" for key, value in given.items() if value is not None]


def _command_job(args: Sequence[str]) -> dict[str, Any]:
    """Return a job for a command without a job file: it runs in the current folder, once per node."""
    cwd = Path.cwd()
    if cwd in (Path.home(), Path("/")):
        raise BadRequest(
            f"{cwd} would be packaged as the source of this command, which is too much",
            "run the command in the folder that has the job's files",
        )
    program = args[0]
    if which(program) is None and "/" not in program:
        if re.match(r"[A-Za-z_]\w*=", program):
            raise BadRequest(f"{program} is not a program", f"to set an environment variable use --env {program}")
        if " " in program:
            raise BadRequest(f"the program has spaces in its name: {program!r}", "remove the quotes around the command")
        if program.endswith(SCRIPTS) and Path(program).is_file():
            raise BadRequest(
                f"{program} is a script of yours, not a program installed on the node",
                f"write it before --: cloudtrain submit {program}",
            )
    return {"name": fit_name(Path(program).name), "source": str(cwd), "entrypoint": list(args)}


def _accelerators(text: str) -> str:
    """Return the value of --gpus as resources.accelerators has it: 8xA100 and A100x8 are A100:8; raises BadRequest."""
    if match := re.fullmatch(
        r"(?P<n>[1-9]\d*)x(?P<type>[A-Za-z][\w.-]*)|(?P<type2>[A-Za-z][\w.-]*?)x(?P<n2>[1-9]\d*)", text
    ):
        return f"{match['type'] or match['type2']}:{match['n'] or match['n2']}"
    if text == "0":
        return text
    if text.isdigit() and int(text):
        raise BadRequest(f"--gpus {text} does not name a GPU type", f"write, for example, --gpus A100:{text}")
    if not re.fullmatch(r"(?!.*x0+$)[A-Za-z][A-Za-z0-9.-]*(:[1-9]\d{0,3})?", text):
        raise BadRequest(f"--gpus {text} is not a type and count of GPUs", "write --gpus A100:8")
    return text


def _environment_setting(text: str) -> str:
    """Return NAME=VALUE of --env as a setting. NAME alone is taken from here, as a secret where it looks like one."""
    name, equals, value = text.partition("=")
    if not equals:
        if name not in os.environ:
            raise BadRequest(f"--env {name}: this variable is not set in your shell", f"write --env {name}=VALUE")
        if re.search(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL", name, re.IGNORECASE):
            terminal.note(f"note: {name} is sent as a secret (secrets.{name}: env:{name}), not as plain text")
            return f"secrets.{name}=env:{name}"
        value = os.environ[name]
    return f"env.{name}={json.dumps(value)}"


def script_job(path: Path, args: Sequence[str] = ()) -> dict[str, Any]:
    """Return a job for a script without a job file.

    The source is the current folder when it contains the script and belongs to the same git work tree, else the root of
    the script's work tree. Outside git it is the script's own folder. The script runs in its source.
    """
    script = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would leave the tree through a link
    cwd = Path.cwd()
    root = _find_work_tree(script.parent)
    if root is None:  # never package the whole home folder
        source = cwd if cwd in script.parents and cwd not in (Path.home(), Path("/")) else script.parent
    else:
        source = cwd if cwd in script.parents and _find_work_tree(cwd) == root else root
    entrypoint = str(script.relative_to(source))
    if entrypoint.startswith("-"):
        raise BadRequest(f"{entrypoint} begins with a dash", "rename the script")
    return {"name": fit_name(script.stem), "source": str(source), "entrypoint": entrypoint, "args": list(args)}


def _resolve_path(argument: str | None) -> Path:
    if argument is None:
        job_file = next((Path(name) for name in JOB_FILES if Path(name).is_file()), None)
        if job_file is None:
            raise BadRequest(
                "there is no job.yaml in this folder",
                "give a job file or a script, or create a job file with cloudtrain init",
            )
        return job_file
    path = Path(argument)
    try:
        if path.is_dir():
            inner_file = next((path / name for name in JOB_FILES if (path / name).is_file()), None)
            if inner_file is None:
                raise BadRequest(
                    f"the folder {path} has no job.yaml",
                    "give a job file or a script, or create a job file with cloudtrain init",
                )
            return inner_file
        if not path.exists():
            raise BadRequest(
                f"there is no file {path}{_suggestion(path)}",
                "give a job file, a script or a plan; cloudtrain init creates a job file",
            )
        if not path.is_file():
            raise BadRequest(f"{path} is not a file", "give a job file, a script or a plan")
        path.open("rb").close()
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}", "check the path and its permissions") from None
    return path


def _suggestion(path: Path) -> str:
    from difflib import get_close_matches

    try:
        names = [entry.name for entry in path.parent.iterdir()][:5000]
    except OSError:
        return ""
    matches = get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.with_name(matches[0])}?" if matches else ""


def _load_plan(path: Path) -> Plan | None:
    """Return the plan in a JSON file; None when the file is something else, such as a job."""
    try:
        text = path.read_text("utf-8")
        data = json.loads(text)
    except ValueError:
        return None
    return Plan.from_json(text) if isinstance(data, dict) and {"request", "manifest"} & data.keys() else None


def _job_args(path: Path, sets: Sequence[str]) -> list[str]:
    from cloudtrain.job.job import Job

    return list(Job.load(path, sets).args)


def _is_batch_script(path: Path) -> bool:
    if path.suffix in (".py", ".yaml", ".yml", ".json") or not _has_shebang(path):
        return False
    from cloudtrain.job import forms

    return forms.of_text(path.read_text("utf-8", "replace")) is not None


def _has_shebang(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"#!"


def _find_work_tree(folder: Path) -> Path | None:
    """Return the root of the git work tree around a folder; None outside one, and where git does not trust it."""
    return next((above for above in (folder, *folder.parents) if (above / ".git").exists()), None)
