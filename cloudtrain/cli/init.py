"""cloudtrain init: write a first job file."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from cloudtrain.cli.view import options, terminal
from cloudtrain.errors import BadRequest, page
from cloudtrain.job import providers
from cloudtrain.job.problems import fit_name

SCHEMA = "job.schema.json"
USUAL_SCRIPTS = ("train.py", "main.py", "run.py")


@options.command()
@options.argument(
    "script",
    "[SCRIPT]",
    "The script that the job runs. Default: train.py, main.py or run.py, or the only script in the folder.",
    type=click.Path(),
)
@click.option("-o", "--output", metavar="FILE", type=click.Path(), help="The job file. Default: job.yaml.")
@options.target_option_with(
    f"Target of the job file: {providers.WHERE}. "
    f"The default is {providers.DEFAULT_TARGET}; with --ci, the target in the job file."
)
@click.option(
    "--from",
    "call",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="Convert a batch script of sbatch, the SageMaker estimator, ModelTrainer or Azure ML command call in a script or "
    "notebook, or the YAML of a command job.",
)
@click.option("--trainer", is_flag=True, help="Use the shared trainer even when there is a script.")
@click.option(
    "--ci",
    type=click.Choice(("github", "gitlab")),
    help="Write a CI file for the job file that is there, and nothing else.",
)
@click.option(
    "--wheel", metavar="ADDRESS", help="With --ci, what CI installs as cloudtrain: a wheel's address, or name==version."
)
@click.option(
    "--schema",
    is_flag=True,
    help="Print the JSON schema of the job file, or write it to the file of -o, and nothing else.",
)
@click.option(
    "--force", is_flag=True, help="Replace an existing job file, which becomes job.yaml.old, or the CI file with --ci."
)
def command(
    script: str | None,
    output: str,
    target: str | None,
    call: str | None,
    trainer: bool,
    ci: str | None,
    wheel: str | None,
    schema: bool,
    force: bool,
) -> int:
    """Write a job file for a script, or for the shared trainer.

    Where no SCRIPT is named, it takes train.py, else main.py, else run.py, else the only script of the folder. Of
    several scripts with other names you must name one. Without any script the job file is for the shared trainer,
    cloudtrain's own training program. It also writes job.schema.json; the job file's first line points editors to
    it. An existing job file is refused (exit code 2), except with --force, which keeps it as job.yaml.old. With -t it
    is left as it is, and only the target is added.

    With `-t BACKEND` it also reads your account's settings and adds a target of the same name to the
    cloudtrain.toml in this folder. There [targets.sagemaker] gets the region, account, profile, bucket and role that
    it finds. It creates nothing in the account. A target that cloudtrain.toml has already is
    used as it is.

    With `--ci` it writes a CI file, and no job file. CI then plans each change and prints its cost, and submits a
    run for each commit on main. The file holds no cloud credentials.

    \b
    cloudtrain init
    cloudtrain init src/train.py -t prod
    cloudtrain init --from notebook.ipynb -t sagemaker
    cloudtrain init --ci github --wheel https://wheels.acme.example/cloudtrain-0.1.0-py3-none-any.whl
    """
    if bool(script) + trainer + bool(call) > 1:
        raise click.UsageError("SCRIPT, --from and --trainer cannot be combined")
    if schema:
        return _print_schema(output)
    path = Path(output or "job.yaml")
    folder = path.parent
    if ci:
        return _write_ci(ci, path, target, wheel, force)
    if wheel:
        raise click.UsageError("--wheel belongs to --ci")
    if not folder.is_dir():
        raise BadRequest(f"there is no folder {folder}", "create it first")
    if path.is_dir():
        raise BadRequest(f"{path} is a folder", f"give a file name: -o {path / 'job.yaml'}")
    if path.suffix not in (".yaml", ".yml"):
        raise BadRequest(f"a job file ends with .yaml, unlike {path}", f"write -o {path.with_suffix('.yaml')}")
    exists = os.path.lexists(path)
    if exists and not force and (call or script or trainer or not target):
        raise BadRequest(f"{path} already exists", "choose another name with -o, or replace it with --force")
    discovered = _discover_target(target, folder)
    if exists and not force:
        terminal.print_lines(f"{path}  is left as it is")
        return _print_next(path, folder, target, discovered, f" -t {target}")
    entrypoint = None if call else _find_entrypoint(script, folder, trainer)
    text = _converted(Path(call), target, folder) if call else _job_file_text(folder.resolve(), entrypoint, target)
    _write(folder / SCHEMA, schema_text())
    if exists:
        kept = next(name for number in itertools.count() if not os.path.lexists(name := f"{path}.old{number or ''}"))
        path.replace(kept)
    _write(path, text)
    runs = f"the job of {call}; read its comments" if call else f"runs {entrypoint}"
    terminal.print_lines(f"{path}  " + (runs if call or entrypoint else "uses the shared trainer"))
    if exists:
        terminal.print_pairs([("before", kept)])
    return _print_next(path, folder, target, discovered)


def _print_next(path: Path, folder: Path, target: str | None, discovered: Mapping[str, Any], options: str = "") -> int:
    """Write what was discovered of a target, and print it with the commands that follow; returns the exit code."""
    if target and discovered:
        config_file = _add_target(folder, target, discovered)
        terminal.print_pairs([("target", f"[targets.{target}] in {config_file}: {', '.join(discovered)}")])
        terminal.print_pairs([("next", f"cloudtrain doctor {target}")])
    terminal.print_pairs(
        [("next", f"cloudtrain plan {path}{options}"), ("", f"cloudtrain submit {path}{options} --follow")]
    )
    return 0


def schema_text() -> str:
    """Return the job file's schema as indented JSON."""
    from cloudtrain.job.job import schema

    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def _print_schema(output: str | None) -> int:
    if output and output != "-":
        Path(output).write_text(schema_text(), "utf-8")
        terminal.print_lines(f"written to {output}")
    else:
        sys.stdout.write(schema_text())
    return 0


def _write_ci(system: str, job: Path, target: str | None, wheel: str | None, force: bool) -> int:
    from cloudtrain.cli.view import ci
    from cloudtrain.job import targets
    from cloudtrain.policy import apply

    if not job.is_file():
        raise BadRequest(f"there is no job file {job}", "cloudtrain init writes one; -o names another")
    resolved = targets.resolve(job, target=target)
    pinned = bool(apply.configured(job.absolute().parent))
    place = ci.Place(resolved.backend, resolved.options, wheel or _installed_from(), pinned)
    root = next((up for up in (Path.cwd(), *Path.cwd().parents) if (up / ".git").exists()), Path.cwd())
    path = root / ci.PATHS[system]
    if os.path.lexists(path) and not force:
        raise BadRequest(f"{path} already exists", "overwrite it with --force")
    name = os.path.relpath(job.absolute(), root)
    if not re.fullmatch(r"[\w./-]+", name) or name.startswith(("..", "-")):
        raise BadRequest(
            f"a CI file cannot name {name}", "rename it: letters, digits, . _ - and /, below the repository"
        )
    text = place.build(system, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, text)
    terminal.print_lines(f"{os.path.relpath(path)}  plans each change, and trains each commit on main")
    todo = place.todo and f"{place.todo}, see {page('how/ci')}"
    missing = (
        ""
        if place.wheel
        else "set CLOUDTRAIN in that file to the address of cloudtrain's wheel, or repeat with --wheel ADDRESS"
    )
    terminal.print_pairs([("next", text) for text in (missing, todo) if text])
    return 0


def _installed_from() -> str:
    """Return the address that this installation came from, as pip noted it; "" for a folder of this machine, or an index.

    An index is left out: a bare name there may be somebody else's package.
    """
    from importlib import metadata

    try:
        noted = json.loads(metadata.distribution("cloudtrain").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return ""
    address, version = str(noted.get("url") or ""), noted.get("vcs_info") or {}
    if version.get("vcs") and version.get("commit_id"):
        return f"{version['vcs']}+{address}@{version['commit_id']}"
    return address if address.startswith("https://") else ""


# A script that uses this argument. A bare `trainer.train()` ignores it.
RESUMES = re.compile(r"args\.resume_from_checkpoint|--resume_from_checkpoint")
# Scripts that save and resume by their library: docs/how/trainer-spot.md has their job file.
LIBRARIES = re.compile(
    r"(?m)^[ \t]*(?:from[ \t]+transformers[ \t]+import\b[^#]{0,2000}?\b\w*Trainer\b|from[ \t]+trl[ \t]+import\b"
    r"|(?:import|from)[ \t]+(?:accelerate|lightning|pytorch_lightning)\b)"
)
RESUME_LINE = 'resume_args: ["--resume_from_checkpoint", "{checkpoint}"]   # added to later attempts'
TRAINING_ARGUMENTS = re.compile(r"HfArgumentParser\([^()]{0,200}TrainingArguments")


def _find_entrypoint(script: str | None, folder: Path, trainer: bool) -> str | None:
    """Return the script's path below the job file's folder, or None for the shared trainer."""
    if trainer:
        return None
    if script:
        if not Path(script).is_file():
            raise BadRequest(f"there is no script {script}", "give the path of a script, or omit it")
        relative = os.path.relpath(os.path.abspath(script), os.path.abspath(folder))  # noqa: PTH100
        if relative.startswith(".."):
            raise BadRequest(
                f"{script} is outside {folder.resolve()}", "write the job file next to the script, with -o"
            )
        return relative
    usual = [name for name in USUAL_SCRIPTS if (folder / name).is_file()]
    scripts = sorted(
        path.name for path in folder.glob("*.py") if not path.name.startswith(("_", "test_", "conftest", "setup"))
    )
    if usual or len(scripts) == 1:
        return (usual or scripts)[0]
    if scripts:
        raise BadRequest(
            f"there are several scripts: {', '.join(scripts[:8])}", f"choose one: cloudtrain init {scripts[0]}"
        )
    return None


def _job_file_text(folder: Path, entrypoint: str | None, target: str | None) -> str:
    from cloudtrain.source.options import declared as options_of
    from cloudtrain.source.texts import Texts

    lines = [f"# yaml-language-server: $schema={SCHEMA}", f"name: {fit_name(folder.name)}"]
    script = _text_of(folder / entrypoint) if entrypoint else ""
    options = options_of(Texts(folder, [entrypoint] if entrypoint else [], entrypoint or ""))
    style = ["arg_style: hydra               # overrides: lr=3.0e-4, not --lr 3.0e-4"] if options.hydra else []
    if entrypoint and LIBRARIES.search(script):
        return "\n".join([*lines, *_spot_lines(entrypoint, script, target, style)]) + "\n"
    lines.append("source: .")
    if entrypoint:
        example = (
            "optim.lr: 3.0e-4 becomes optim.lr=3.0e-4"
            if style
            else "learning_rate: 3.0e-4 becomes --learning_rate 3.0e-4"
        )
        lines += [f"entrypoint: {_quote_yaml(entrypoint)}", f"hyperparameters: {{}}            # {example}", *style]
        if options.wants_boolean_values and not style:
            lines.append("arg_style: hf                  # true and false are given as values: --fp16 true")
        if RESUMES.search(script):
            lines.append(RESUME_LINE)
    else:
        lines += [
            "trainer: true                  # the shared trainer; these values take a minute, the names are transformers' own",
            "hyperparameters:",
            "  dataset: python-stdlib       # or files (texts/*.txt, x.jsonl, x.csv, x.parquet), or a name of the hub",
            "  max_train_bytes: 400000      # leave this line out for all of it",
            "  model_type: llama            # from scratch; `model: NAME` continues a pretrained one of the hub",
            "  hidden_size: 128",
            "  block_size: 128",
            "  learning_rate: 3.0e-3",
            "  max_steps: 100               # or num_train_epochs",
        ]
    lines += [
        "num_nodes: 1",
        "processes_per_node: 1",
        '# resources: {accelerators: "A100:8"}   # of each node',
        "limits: {max_runtime: 24h}",
    ]
    return "\n".join([*lines, _target_line(target)]) + "\n"


def _spot_lines(entrypoint: str, script: str, target: str | None, style: list[str]) -> list[str]:
    """Return the lines of a script that writes into `out` and resumes from there, on a spot machine where there are any."""
    from cloudtrain.backends import registry

    args = (
        '[--output_dir, out, --save_steps, "500", --save_total_limit, "2"]'
        if TRAINING_ARGUMENTS.search(script)
        else "[]"
    )
    spot = '{accelerators: "A10G:1", use_spot: true}'
    return [
        f"entrypoint: {_quote_yaml(entrypoint)}",
        f"args: {args}",
        *style,
        *([RESUME_LINE] if RESUMES.search(script) else []),
        f"resources: {spot}"
        if target not in (None, registry.DEFAULT)
        else f"resources: {{}}                  # on a cloud: {spot}",
        _target_line(target),
    ]


def _target_line(target: str | None) -> str:
    from cloudtrain.backends import registry
    from cloudtrain.job import targets

    if target:
        return f"target: {_quote_yaml(target)}"
    choices = sorted({*registry.names(), *targets.named_targets()})
    return f"target: {registry.DEFAULT:<23}# one of {', '.join(choices)}"


def _converted(path: Path, target: str | None, folder: Path) -> str:
    """Return the job file of a file that was written for a platform's own tools; what it does not say is a comment.

    Without `target` it is the configured one of that platform: that of [defaults], else the first.
    """
    import yaml

    from cloudtrain.backends import registry
    from cloudtrain.job import targets

    class Dumper(yaml.SafeDumper):
        pass

    def put_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, put_text)
    configured = targets.named_targets(folder)
    named = configured.get(target or "")
    for kind in registry.loaded():
        if found := kind.convert(path, named.backend if named else target or ""):
            break
    else:
        if path.suffix in (".yaml", ".yml"):
            from cloudtrain.job.job import Job

            Job.load(path)  # names another tool's file
            raise BadRequest(f"{path} is a job file already", f"cloudtrain plan {path}")
        hint = "give a batch script of sbatch, a command job's YAML, or a script or notebook with an estimator's call"
        raise BadRequest(f"{path} cannot be converted into a job file", hint)
    job, notes = found
    mine = [name for name, each in configured.items() if each.backend == kind.name]
    usual = targets.default_target(folder)
    if not target and mine:
        target = usual if usual in mine else mine[0]
        notes = [*notes, *([f"target: {', '.join(mine)} are configured for {kind.name}"] if len(mine) > 1 else [])]
    job = {"name": fit_name(str(job.pop("name", path.stem))), "source": ".", **job, "target": target or kind.name}
    lines = [f"# yaml-language-server: $schema={SCHEMA}", *(f"# {note}" for note in notes)]
    return "\n".join(lines) + "\n" + yaml.dump(job, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)


def _text_of(script: Path) -> str:
    try:
        return script.read_text("utf-8", "replace")
    except OSError:
        return ""


def _discover_target(target: str | None, folder: Path) -> dict[str, Any]:
    """Return the options that a backend can discover about the account; empty where the target already exists."""
    from cloudtrain.backends import registry
    from cloudtrain.job import targets

    if target is None or target in targets.named_targets(folder):
        return {}
    discovered = registry.backend_class(target).discover()
    if not discovered and target != registry.DEFAULT:
        terminal.note(
            f"cloudtrain found no credentials for the account of {target}: no target is written to cloudtrain.toml"
        )
    return discovered


def _add_target(folder: Path, name: str, settings: Mapping[str, Any]) -> Path:
    """Append a target to the folder's cloudtrain.toml and return its path."""
    from cloudtrain.job.targets import CONFIG_FILE

    path = folder / CONFIG_FILE
    existing = path.read_text("utf-8").rstrip("\n") + "\n\n" if path.exists() else ""
    lines = [f"[targets.{name}]", f'backend = "{name}"']
    lines += [f"{key} = {_to_toml(value)}" for key, value in settings.items()]
    _write(path, existing + "\n".join(lines) + "\n")
    return path


def _to_toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_to_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_to_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _quote_yaml(text: str) -> str:
    plain = text.replace("/", "").replace("_", "").replace("-", "").replace(".", "")
    return text if plain.isascii() and plain.isalnum() and text[0].isalpha() else json.dumps(text)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)
