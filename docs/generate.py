"""Write the generated pages of docs/ and cloudtrain/job/keys.pyi, from the code; `--check` only says whether they are current.

python docs/generate.py
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import job_keys
import limits
import tables
import trainer
import troubleshooting

from cloudtrain.cli.view.options import Argument

DOCS = Path(__file__).parent
WRITTEN = "<!-- Written by docs/generate.py; a test checks that it is current. -->"

CLI_HEAD = """\
# The command line

Every command takes `-h`. RUN is a run's id or any unique prefix of one; where it stands in brackets it may be left out,
and the newest run is meant. Every command that reads takes `--json`, whose shapes are stable.

| exit code | meaning |
| --- | --- |
| 0 | done; of `submit --wait`, `submit --follow` and `wait`: the run SUCCEEDED |
| the script's own | the run FAILED with that code (1 when it is not known) |
| 1 | unexpected: the traceback is kept in a file below the home, and its name is said |
| 2 | the request cannot be done as it is: usage, job, source, target, run id, history, a full disk |
| 5 | the platform refused, or could not be reached |
| 69, 75, 124 | the run was LOST, PREEMPTED, TIMED_OUT |
| 78 | the run was refused on its node before a script began: wrong world, missing input, bad secret, requirements; or the shared trainer was replaced by a later start of its run |
| 130 | the run was CANCELLED; or Ctrl-C: a run that was being followed continues |
| 141 | whoever read the output has left |

An error is one sentence and a hint on standard error; a traceback is shown with `--debug` (or `CLOUDTRAIN_DEBUG=1`) only.
With `--json` standard output holds `{"error", "hint", "phase", "exit_code"}` as well. `phase` tells a script that exits
with 2 from a mistyped option: it is `client` when the command could not be done, and `run` when a run did not succeed.

Ctrl-C while following or waiting detaches: the run continues, and the command exits with 130 so that a chain of commands
stops. `--on-interrupt cancel` cancels the run instead, on SIGTERM too, which is what a CI system wants.

`CLOUDTRAIN_HOME` moves the history and the runs' folders. `NO_COLOR` switches colours off; a pipe never sees any.
Completion for bash: `eval "$(_CLOUDTRAIN_COMPLETE=bash_source cloudtrain)"` (`zsh_source`, `fish_source` for others).
"""

SPEC_HEAD = """\
# The job file

YAML 1.2 or JSON. Unknown keys are errors, and all problems of the file are reported at once, each with its line. Any value can be set on the command line: `--set resources.use_spot=true`.
`cloudtrain init` writes a job file whose first line points an editor at the schema (`cloudtrain init --schema` prints it). A *value* in the tables is text, a number, true or false, and arrives as it was written.

## entrypoint

```yaml title="job.yaml"
source: .                      # the folder that is packaged
entrypoint: train.py           # or -m package.train, or ["bash", "run.sh"]
hyperparameters: {lr: 3.0e-4}  # arrive as --lr 3.0e-4, as written
```

A shell text is `run:` instead ([Bring your script](scripts.md)).
"""

SPEC_RESOURCES = """\
```yaml title="gpus.yaml"
entrypoint: train.py
num_nodes: 2
resources: {accelerators: "A100:8", use_spot: true}    # one rank for each GPU
target: prod
```
"""

SPEC_TARGET = """\
## target

A backend (`local`, `ssh`, `slurm`, `kubernetes`, `sagemaker`, `vertex`), or a target that [cloudtrain.toml](reference/config.md) names:

```toml title="cloudtrain.toml"
[targets.prod]
backend = "sagemaker"
role = "arn:aws:iam::123456789012:role/training"
bucket = "my-bucket"
region = "us-east-1"
```

```bash
cloudtrain plan job.yaml -t local
cloudtrain plan gpus.yaml
```

From a list, `target: [prod, lab]`, the run takes the first that [has free machines](capacity.md).
"""

# The keys of most jobs, in the order of the page. The others come last.
COMMON = (
    *("name", "source", "entrypoint", "run", "hyperparameters", "args", "num_nodes", "processes_per_node", "resources"),
    *("target", "limits", "inputs", "output", "env", "secrets", "environment", "setup", "image", "checkpoint", "retry"),
    "labels",
)


OPTIONS_HEAD = """\
# Options of the backends

Options stand in a target of [cloudtrain.toml](config.md), which all its jobs get. `options` of a job file, and `--set`, win over them:

```toml title="cloudtrain.toml"
[targets.cluster]
backend = "kubernetes"
namespace = "ml"
image = "registry.example/team/train:1"
```

```bash
cloudtrain plan train.py -t cluster --set options.kubernetes.namespace=research
```

A target also takes `usd_per_hour` and `priced_as` ([costs](../cost.md)). An option that is not in its table is refused.
"""


KEYS_HEAD = """\
# Keys by backend

Every backend takes the keys that are not in this table. It refuses a job with a key that it lacks before anything is sent,
and names the key; the plan says which keys have no effect. [The job file](../spec.md) explains them.
A field such as `InstanceType` is what the key becomes in the platform's request; *yes* means that cloudtrain's own code on the
machines carries it out, and *cloudtrain* that the client or the launcher does. `vertex-local` builds the same request as `vertex`
and reserves nothing of this machine.
`limits.max_wait` counts on a backend that does not end a wait itself where a job has several targets or GPU types.
"""


def main() -> int:
    """Write what is not current, or with --check return 1 when one is not current."""
    pages = {
        "cli.md": cli_page(),
        "spec.md": spec_page(),
        "reference/options.md": options_page(),
        "reference/keys.md": keys_page(),
        "reference/trainer.md": trainer.page(WRITTEN),
        "tables-evidence.md": tables.page(WRITTEN),
        "cost.md": limits.page(),
        "../cloudtrain/job/keys.pyi": job_keys.stub(),
        "troubleshooting.md": troubleshooting.page(WRITTEN),
    }
    stale = [
        name for name, text in pages.items() if not (DOCS / name).exists() or (DOCS / name).read_text("utf-8") != text
    ]
    if "--check" in sys.argv:
        for name in stale:
            sys.stdout.write(f"{_shown(name)} is not current: run python docs/generate.py\n")
        return bool(stale)
    for name in stale:
        (DOCS / name).write_text(pages[name], "utf-8")
        sys.stdout.write(f"{_shown(name)} written\n")
    return 0


def _shown(name: str) -> str:
    return name.removeprefix("../") if name.startswith("../") else f"docs/{name}"


# -- the command line -------------------------------------------------------------------------------------------------


def cli_page() -> str:
    """Return the reference of all commands."""
    from cloudtrain.cli import SECTIONS, program

    parts = [CLI_HEAD.rstrip(), "", WRITTEN]
    parent = click.Context(program, info_name="cloudtrain")
    for section, names in SECTIONS.items():
        parts += ["", f"## {section}"]
        for name in names:
            command = program.get_command(parent, name)
            assert command is not None
            ctx = click.Context(command, info_name=name, parent=parent)
            parts += ["", f"### {name}", "", *_command(command, ctx)]
            for inner, each in getattr(command, "commands", {}).items():
                parts += [
                    "",
                    f"### {name} {inner}",
                    "",
                    *_command(each, click.Context(each, info_name=inner, parent=ctx)),
                ]
    return "\n".join(parts) + "\n"


def _command(command: click.Command, ctx: click.Context) -> Iterator[str]:
    usage = " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])
    yield from ("```", usage, "```", "")
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        lines = paragraph.splitlines()
        if lines and lines[0].strip() == "\b":
            yield from ("```bash", *lines[1:], "```", "")
        else:
            yield from (*lines, "")
    if arguments := [param for param in command.params if isinstance(param, Argument)]:
        yield from ("| argument | |", "| --- | --- |")
        yield from (f"| `{_cell(str(param.metavar))}` | {_cell(param.description)} |" for param in arguments)
        yield ""
    rows = [
        row for param in command.params if not isinstance(param, click.Argument) and (row := param.get_help_record(ctx))
    ]
    if not rows:
        return
    yield "| option | |"
    yield "| --- | --- |"
    for option, text in rows:
        yield f"| `{option}` | {_cell(text)} |"


# -- the job file -----------------------------------------------------------------------------------------------------


def spec_page() -> str:
    """Return the reference of all keys of the job file."""
    from cloudtrain.job.job import schema

    whole = schema()
    keys = whole["properties"]
    common, rare = ({key: keys[key] for key in (*COMMON, *keys) if (key in COMMON) is used} for used in (True, False))
    names = sorted(_order(whole), key=lambda name: [*common, *rare].index(_key_of(whole, name).partition(".")[0]))
    names.remove("Resources")
    parts = [SPEC_HEAD.rstrip(), "", WRITTEN, *_part("Resources", whole, SPEC_RESOURCES), "", SPEC_TARGET.rstrip()]
    for title, own in (("Keys of a job", common), ("Rare keys", rare)):
        parts += ["", f"## {title}", "", *_table({**whole, "properties": own}, whole)]
    for name in names:
        parts += _part(name, whole)
    return "\n".join(parts) + "\n"


def _part(name: str, whole: dict[str, Any], example: str = "") -> Iterator[str]:
    part = _object(whole["$defs"][name])
    yield from ("", f"## {_key_of(whole, name)}", "")
    if said := part.get("description"):
        yield from (said, "")
    if example:
        yield from (example.rstrip(), "")
    yield from _table(part, whole)


def options_page() -> str:
    """Return the reference of all options of all backends, each option of a mapping in a row of its own."""
    from cloudtrain.backends import registry

    parts = [OPTIONS_HEAD.rstrip(), "", WRITTEN]
    for name in sorted(registry.names()):
        whole = registry.backend_class(name).options().model_json_schema()
        rows: dict[str, Any] = {}
        for key, value in whole["properties"].items():
            inner = [whole["$defs"][used] for used in _names(value) if "properties" in whole["$defs"][used]]
            mapping = {"type": value.get("type", "object"), "items": {"type": "object"}}
            rows[key] = {**value, **mapping, "anyOf": None} if inner else value
            rows |= {f"{key}.{each}": of for part in inner for each, of in part["properties"].items()}
            required = [f"{key}.{each}" for part in inner for each in part.get("required", ())]
            whole["required"] = [*whole.get("required", ()), *required]
        parts += ["", f"## {name}", "", *_table({**whole, "properties": rows}, whole)]
    return "\n".join(parts) + "\n"


def keys_page() -> str:
    """Return the table of the keys that not every backend has, from the backends' traits."""
    from cloudtrain.backends import registry
    from cloudtrain.backends.traits import HONOURED, NO_EFFECT, Paths
    from cloudtrain.job import rules

    kinds = [registry.backend_class(name).traits for name in registry.BUILT_IN]
    paths = {Paths.NONE: "refused", Paths.OUTPUT_HERE: "output alone"}
    rows = {"inputs and output, a path": [paths.get(traits.paths, "yes") for traits in kinds]}
    lacking = dict.fromkeys(rules.platform_keys(), "refused") | dict.fromkeys(rules.SHARED_KEYS, "cloudtrain")
    for key, without in {**lacking, "limits.max_wait": "several targets"}.items():
        said = {None: without, HONOURED: "yes", NO_EFFECT: NO_EFFECT}
        fields = [traits.keys.get(key) for traits in kinds]
        rows[f"`{key}`"] = [said.get(field, f"`{field}`") for field in fields]
    lines = [f"| key | {' | '.join(registry.BUILT_IN)} |", f"| --- |{' --- |' * len(kinds)}"]
    lines += [f"| {key} | {' | '.join(cells)} |" for key, cells in rows.items()]
    return "\n".join([KEYS_HEAD.rstrip(), "", WRITTEN, "", *lines]) + "\n"


def _object(part: dict[str, Any]) -> dict[str, Any]:
    """Return the mapping among the forms of a part that may be written shortly as well."""
    return next((choice for choice in part.get("anyOf", ()) if "properties" in choice), part)


def _order(whole: dict[str, Any]) -> list[str]:
    """Return the names of the parts in the order in which the job's keys use them."""
    text = [name for value in whole["properties"].values() for name in _names(value)]
    return list(dict.fromkeys([*text, *whole["$defs"]]))


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner.rpartition("/")[2]
            else:
                yield from _names(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _names(inner)


def _key_of(whole: dict[str, Any], name: str) -> str:
    key = next((key for key, value in whole["properties"].items() if name in _names(value)), name.lower())
    each = "additionalProperties" in whole["properties"].get(key, {})
    return f"{key}.NAME" if each else key


def _table(part: dict[str, Any], whole: dict[str, Any]) -> Iterator[str]:
    yield "| key | type | default | meaning |"
    yield "| --- | --- | --- | --- |"
    required = part.get("required", ())
    for key, value in part["properties"].items():
        default = "required" if key in required else _default(value.get("default"))
        yield f"| `{key}` | {_type(value, whole)} | {default} | {_cell(_said(value, whole))} |"


def _said(value: dict[str, Any], whole: dict[str, Any]) -> str:
    """Return the description of a key, or of the part that it refers to."""
    name = next(iter(_names(value)), "")
    text: str = value.get("description") or _object(whole["$defs"].get(name, {})).get("description", "")
    return text.split("\n\n")[0]


def _default(value: Any) -> str:
    import json

    if value in (None, "", {}, []):
        return ""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _type(value: dict[str, Any], whole: dict[str, Any]) -> str:
    if "$ref" in value:
        key = _key_of(whole, value["$ref"].rpartition("/")[2])
        return f"[{key}](#{key.lower().replace('.', '')})"
    if "enum" in value:
        return " ".join(f"`{choice}`" for choice in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if choices := value.get("anyOf") or value.get("allOf") or value.get("oneOf"):
        if {choice.get("type") for choice in choices} == {"string", "integer", "number", "boolean"}:
            return "value"
        kinds = dict.fromkeys(_type(choice, whole) for choice in choices if choice.get("type") != "null")
        return " or ".join(kinds)
    kind = value.get("type", "any")
    most = value.get("maximum", value.get("maxItems", value.get("maxProperties")))
    bound = "" if most is None else f" (≤ {most:,})"
    if kind == "array":
        inner = _type(value.get("items", {}), whole)
        return f"list of {'values' if inner == 'value' else inner}{bound}"
    if kind == "object":
        inner = value.get("additionalProperties")
        return (f"name: {_type(inner, whole)}" if isinstance(inner, dict) else "mapping") + bound
    return {"string": "text", "integer": "whole number", "boolean": "true or false"}.get(kind, str(kind)) + bound


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main())
