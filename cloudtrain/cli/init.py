"""cloudtrain init: a first job file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from cloudtrain.cli import options, terminal
from cloudtrain.cli.schema import schema_text
from cloudtrain.errors import BadRequest

SCHEMA = "job.schema.json"
USUAL = ("train.py", "main.py", "run.py")


@options.command()
@click.argument("script", required=False, type=click.Path())
@click.option(
    "-o", "--output", metavar="FILE", default="job.yaml", show_default=True, type=click.Path(), help="The job file."
)
@options.target_option
@click.option("--trainer", is_flag=True, help="Use the shared trainer even where there is a script.")
@click.option("--force", is_flag=True, help="Write over a job file that is there.")
def command(script: str | None, output: str, target: str | None, trainer: bool, force: bool) -> int:
    """Write a job file for a script, or for the shared trainer.

    SCRIPT is left out when the folder of the job file holds a train.py, or one script only. Without any script the job
    is the shared trainer's. Beside it stands job.schema.json, which editors take from the job file's first line.

    \b
    cloudtrain init
    cloudtrain init src/train.py -t prod
    """
    if script and trainer:
        raise click.UsageError("SCRIPT and --trainer exclude each other")
    path = Path(output)
    folder = path.parent
    if not folder.is_dir():
        raise BadRequest(f"there is no folder {folder}", "make it first")
    if path.is_dir():
        raise BadRequest(f"{path} is a folder", f"name the file: -o {path / 'job.yaml'}")
    if os.path.lexists(path) and not force:
        raise BadRequest(f"{path} is there already", "choose another name with -o, or write over it with --force")
    entrypoint = _entrypoint(script, folder, trainer)
    text = _text(folder.resolve(), entrypoint, target)
    _write(folder / SCHEMA, schema_text())
    _write(path, text)
    terminal.say(f"{path}  " + (f"runs {entrypoint}" if entrypoint else "uses the shared trainer"))
    terminal.pairs([("next", f"cloudtrain plan {path}"), ("", f"cloudtrain submit {path} --follow")])
    return 0


def _entrypoint(script: str | None, folder: Path, trainer: bool) -> str | None:
    """Return the script's path below the job file's folder, or None for the shared trainer."""
    if trainer:
        return None
    if script:
        if not Path(script).is_file():
            raise BadRequest(f"there is no script {script}", "name a script, or leave it out")
        inside = os.path.relpath(os.path.abspath(script), os.path.abspath(folder))  # noqa: PTH100
        if inside.startswith(".."):
            raise BadRequest(f"{script} lies outside {folder.resolve()}", "write the job file beside it, with -o")
        return inside
    found = [name for name in USUAL if (folder / name).is_file()]
    scripts = sorted(
        path.name for path in folder.glob("*.py") if not path.name.startswith(("_", "test_", "conftest", "setup"))
    )
    if found or len(scripts) == 1:
        return (found or scripts)[0]
    if scripts:
        raise BadRequest(
            f"there are several scripts: {', '.join(scripts[:8])}", f"name one: cloudtrain init {scripts[0]}"
        )
    return None


def _text(folder: Path, entrypoint: str | None, target: str | None) -> str:
    from cloudtrain import config, registry
    from cloudtrain.job import fit_name

    lines = [f"# yaml-language-server: $schema={SCHEMA}", f"name: {fit_name(folder.name)}", "source: ."]
    if entrypoint:
        lines += [
            f"entrypoint: {_quoted(entrypoint)}",
            "hyperparameters: {}            # learning_rate: 3.0e-4 becomes --learning_rate 3.0e-4",
        ]
    else:
        lines += [
            "# No entrypoint: the shared trainer, which these values train in a minute; the names are transformers' own.",
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
    known = config.targets()
    if target:
        backend = known[target].backend if target in known else target
        discovered = registry.backend_class(backend).discover() if target not in known else {}
        lines.append(f"target: {_quoted(target)}")
        if discovered:
            lines += ["options:", f"  {backend}: {json.dumps(discovered, ensure_ascii=False)}"]
    else:
        choices = sorted({*registry.names(), *known})
        lines.append(f"target: local                  # one of {', '.join(choices)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    plain = text.replace("/", "").replace("_", "").replace("-", "").replace(".", "")
    return text if plain.isascii() and plain.isalnum() and text[0].isalpha() else json.dumps(text)


def _write(path: Path, text: str) -> None:
    half = path.with_name(f".{path.name}.{os.getpid()}")
    half.write_text(text, "utf-8")
    half.replace(path)
