"""The keys of the job file: their types, defaults and descriptions, and what follows from them.

A job is frozen and refuses unknown keys. Numbers among hyperparameters, arguments and environment values are kept as the
text that was written.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from cloudtrain.errors import Problem
from cloudtrain.job.arguments import argv
from cloudtrain.job.document import Document
from cloudtrain.job.fields import (
    FEW_ENTRIES,
    MANY_ENTRIES,
    Few,
    Files,
    Flag,
    Hyperparameters,
    Kept,
    Many,
    Metrics,
    Name,
    Nodes,
    OneOrMore,
    Place,
    Processes,
    Size,
    Sources,
    Spec,
    Text,
    main_role,
    none_yet,
    place,
    program,
)
from cloudtrain.job.problems import fit_name, located, quote, wrong
from cloudtrain.job.providers import DEFAULT_TARGET
from cloudtrain.job.sections import (
    Checkpoint,
    Environment,
    Fit,
    Input,
    Limits,
    Parallelism,
    Resources,
    Retry,
    Role,
)
from cloudtrain.job.units import size_bytes
from cloudtrain.source.node_code import CALL

SHARED_TRAINER = ".cloudtrain/train.py"
IN_ORDER = "${args}"  # among `args`: the place of the hyperparameters, as a W&B sweep's command orders them
RAY = ".cloudtrain/launcher/ray_cluster.py"
NAME = re.compile(r"[a-z]([a-z0-9-]{0,28}[a-z0-9])?")


class JobModel(Spec):
    """The keys of a job as attributes; `Job` loads and validates it."""

    model_config = ConfigDict(defer_build=True)  # Job's validator is the one that is used

    name: str = Field(
        default="", description="Name of the job; runs are called <name>-<time>-<random>. Default: the folder's name."
    )
    source: str = Field(
        default=".", validate_default=True, description="Folder to package, or git+https://host/repo@rev, git+ssh://..."
    )
    allow_secrets: Many[Files] = Field(
        default_factory=none_yet,
        description="Patterns (as in .gitignore) of files that are allowed to contain credentials, and keys of "
        "the job: env.NAME, args.",
    )
    allow_large: Many[Files] = Field(
        default_factory=none_yet,
        description="Patterns (as in .gitignore) of files that may be of any size; otherwise 500 MB each and 2 GB in total.",
    )
    allow_pointers: Many[Files] = Field(
        default_factory=none_yet,
        description="Patterns (as in .gitignore) of files that may be Git-LFS pointers; other pointers are refused.",
    )
    entrypoint: str | Many[list[Text]] | None = Field(
        default=None,
        description="A script in the source, -m package.module, or a command as a list, which runs once per node.",
    )
    run: str | None = Field(default=None, description="Shell script that runs once per node, instead of an entrypoint.")
    trainer: bool = Field(
        default=False,
        description="true: run the shared trainer (cloudtrain's own training program) instead of an entrypoint.",
    )
    ray: Flag = Field(
        default=False,
        description="true: start a Ray cluster on the nodes; the entrypoint runs on the first one, with RAY_ADDRESS.",
    )
    setup: str | None = Field(
        default=None, description="Shell script that runs once per node before the training; if it fails, the job ends."
    )
    resume_args: Many[list[Text]] = Field(
        default_factory=none_yet,
        description="Arguments added when an attempt resumes from a checkpoint; {checkpoint} is its path.",
    )
    keep: Kept = Field(
        default="auto",
        description='Files that the script writes in its folder and to copy back: [out, "runs/*/best.pt"]; auto: all; none.',
    )
    keep_limit: Size | None = Field(
        default=None, description="How much keep: auto copies back of each node, the newest files; default: 20GB."
    )
    compat: Literal["skypilot", "dstack", "sbatch"] | None = Field(
        default=None,
        description="Run the text as this tool does: skypilot and dstack set their node variables, sbatch runs it on the "
        "first node.",
    )
    arg_style: Literal["argparse", "hf", "hydra"] = Field(
        default="argparse", description="How hyperparameters become arguments."
    )
    hyperparameters: Annotated[Hyperparameters, MANY_ENTRIES] = Field(
        default_factory=dict, description="Arguments of the script, in order, as written: lr: 3.0e-4 is --lr 3.0e-4."
    )
    args: Many[list[Text]] = Field(default_factory=none_yet, description="More arguments, appended unchanged.")
    roles: Few[dict[str, Role]] = Field(
        default_factory=dict,
        description="Several programs by name, each on its nodes; the run ends with the main one, `trainer`.",
    )
    environment: Environment = Field(default=Environment(), description="What to install on each node.")
    num_nodes: Nodes = Field(default=1, description="Nodes.")
    min_nodes: Nodes | None = Field(
        default=None,
        description="If not all num_nodes nodes are available, start with at least this many. Others do not join later.",
    )
    processes_per_node: Processes | None = Field(
        default=None, description="Processes (ranks) on each node; default: one per accelerator, or 1."
    )
    distributed_env: Literal["auto", "always", "tensorflow", "jax", "keras"] = Field(
        default="auto",
        description="always: RANK and MASTER_ADDR for one process too; a framework: its variables too; "
        "auto: by what the code imports.",
    )
    sm_env: Flag | None = Field(
        default=None,
        description="true: set SageMaker's SM_ variables on every backend. Default: if the source reads them.",
    )
    aip_env: Flag | None = Field(
        default=None,
        description="true: set Vertex AI's AIP_ variables on every backend. Default: if the source reads them.",
    )
    resources: Resources = Field(default=Resources(), description="Hardware of each node.")
    parallelism: Parallelism = Field(
        default=Parallelism(), description="How the model is split over the ranks; auto: cloudtrain chooses."
    )
    fit: Fit = Field(
        default=Fit(),
        description="Model and batch of a script, to predict memory and time; not needed with trainer: true.",
    )
    health: Literal["auto", "off", "strict"] = Field(
        default="auto",
        description="Check of the nodes' hardware before the ranks start; strict: always, and a slow node is refused too.",
    )
    limits: Limits = Field(default=Limits(), description="Limits of time and cost.")
    checkpoint: Checkpoint = Field(default=Checkpoint(), description="How often checkpoints are written.")
    inputs: Few[dict[str, Input]] = Field(
        default_factory=dict, description="Data by name; the script finds it in $CLOUDTRAIN_INPUT_<NAME>."
    )
    after: Few[list[Text]] = Field(
        default_factory=none_yet, description="Ids of runs; the job starts only after all of these runs have SUCCEEDED."
    )
    output: Place | None = Field(
        default=None, description="Folder or bucket for results. Default: chosen by the target."
    )
    audit: Flag = Field(
        default=False,
        description="true: also write who submitted, entered, cancelled and deleted the run into its output.",
    )
    env: Many[dict[Name, Text]] = Field(default_factory=dict, description="Environment variables of the ranks.")
    secrets: Few[dict[Name, Sources]] = Field(
        default_factory=dict,
        description="Secret environment variables, from env:, file:, aws-secretsmanager:, "
        "gcp-secretmanager:, azure-keyvault: or k8s:.",
    )
    labels: Few[dict[str, Text]] = Field(default_factory=dict, description="Labels of the run.")
    metrics: Annotated[Metrics, FEW_ENTRIES] = Field(
        default_factory=dict,
        description="Regular expressions that find a metric's value in the log; off: do not search the log for metrics.",
    )
    retry: Retry = Field(default=Retry(), description="When a failed attempt is retried.")
    image: str | None = Field(default=None, description="Container image. Default: the backend's.")
    target: Annotated[OneOrMore[Annotated[str, Field(min_length=1)]], FEW_ENTRIES] = Field(
        default=DEFAULT_TARGET,
        description="A backend or a target of cloudtrain.toml. From a list, `prefer` chooses one.",
    )
    prefer: Literal["cost", "time", "order"] = Field(
        default="cost",
        description="Which of several targets and accelerators to try first: cheapest, fastest, or first (as written).",
    )
    options: dict[str, dict[str, Any]] = Field(default_factory=dict, description="Options of each backend.")

    _document: Document | None = PrivateAttr(None)
    _written_name: str | None = PrivateAttr(None)  # with _ or capitals, which not every platform takes

    def bind(self, files: Collection[str]) -> Self:
        """Return the job for a source of these files (paths below it): the default requirements.txt is decided."""
        if "requirements" in self.environment.model_fields_set:
            return self
        environment = Environment(requirements="requirements.txt" if "requirements.txt" in files else "none")
        return self.model_copy(update={"environment": environment})

    def argv(self) -> list[str]:
        """Return what `form` says: a script or -m module with its arguments, a command with them, or a shell text."""
        if self.run is not None:
            return [self.run]
        head = self.entrypoint or SHARED_TRAINER
        if isinstance(head, str):
            head = ["-m", head[3:]] if head.startswith("-m ") else [head]
        style = "hf" if self.trainer else self.arg_style  # some of its flags are on where they are not given
        given = argv(self.hyperparameters, style)
        at = self.args.index(IN_ORDER) if IN_ORDER in self.args else 0
        return [*head, *self.args[:at], *given, *(word for word in self.args[at:] if word != IN_ORDER)]

    @property
    def form(self) -> Literal["script", "command", "shell"]:
        """What `argv` is: a script, which every rank runs, or a command or a shell text, which runs once per node."""
        if self.run is not None:
            return "shell"
        return "command" if isinstance(self.entrypoint, list) else "script"

    def node_program(self) -> tuple[str, list[str]]:
        """Return `form` and `argv` of what the launcher runs: with `ray`, what starts Ray around them."""
        if not self.ray:
            return self.form, self.argv()
        return "script", [RAY, *(["--"] if self.form == "command" else []), *self.argv()]

    def located(self, problems: Sequence[Problem]) -> list[Problem]:
        """Return problems that others found with the job, with the file and line of their paths."""
        return [located(problem, self._document) for problem in problems]

    @property
    def renamed(self) -> str | None:
        """The name as it was written, where another one stands for it; else None."""
        return self._written_name if self._written_name not in (None, self.name) else None

    @property
    def runs_trainer(self) -> bool:
        """Whether it runs files of the shared trainer: they lie beside the launcher in its bundle."""
        return any(".cloudtrain/" in word and word != CALL for word in (self.setup or "", *self.argv()))

    @property
    def exceptions(self) -> dict[str, list[str]]:
        """What its source may hold although packaging refuses it, by the name of the argument of Bundle.make."""
        return {
            "allow_secrets": self.allow_secrets,
            "allow_large": self.allow_large,
            "allow_pointers": self.allow_pointers,
        }

    @property
    def kept(self) -> tuple[str, ...] | None:
        """The patterns of `keep`; None for auto."""
        return None if self.keep == "auto" else () if self.keep == "none" else tuple(self.keep)

    @property
    def keep_limit_bytes(self) -> int | None:
        return size_bytes(self.keep_limit) if self.keep_limit else None

    @property
    def processes(self) -> int:
        """Ranks of a node; 1 for a command or a shell text, which may start ranks of its own, and with Ray."""
        if self.form != "script" or self.ray:
            return self.processes_per_node or 1
        return self.processes_per_node or self.resources.gpus or 1

    @property
    def main_nodes(self) -> int:
        """Nodes of the main role: of a job without roles, all."""
        return self.roles[self.main_role].num_nodes if self.main_role else self.num_nodes

    @property
    def main_role(self) -> str:
        """The role with which the run ends; "" without roles."""
        return main_role(self.roles)

    @property
    def world_size(self) -> int:
        return self.main_nodes * self.processes

    @property
    def has_rank_env(self) -> bool:
        """Whether its ranks get RANK, WORLD_SIZE and MASTER_ADDR: all but one process that runs as under plain python."""
        sharded = self.parallelism.strategy not in ("none", "ddp") or self.parallelism.accelerate_config is not None
        alone = self.form == "script" and self.world_size == 1 and not sharded and not self.trainer
        return self.distributed_env != "auto" or not alone

    def _unfollowed(self, data: dict[str, Any]) -> dict[str, Any]:
        """Take what follows from other fields out of this job's data."""
        if self.parallelism.strategy == _strategy(self.world_size):
            data.get("parallelism", {}).pop("strategy", None)
        if self.roles:
            data.pop("num_nodes", None)
        if self.retry.max_attempts == _max_attempts(self.resources):
            data.get("retry", {}).pop("max_attempts", None)
        return data

    @model_validator(mode="after")
    def _follow(self) -> Self:
        """Set what follows from other fields, unless it was given."""
        for name, role in self.roles.items():
            if role.colocate:
                self.roles[name] = role.on_nodes_of(self.roles.get(role.colocate))
        if self.roles and "num_nodes" not in self.model_fields_set:
            self.__dict__["num_nodes"] = sum(role.num_nodes for role in self.roles.values())
        if "strategy" not in self.parallelism.model_fields_set:
            self.__dict__["parallelism"] = _with(self.parallelism, "strategy", _strategy(self.world_size))
        if "max_attempts" not in self.retry.model_fields_set:
            self.__dict__["retry"] = _with(self.retry, "max_attempts", _max_attempts(self.resources))
        return self

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not NAME.fullmatch(value):
            raise wrong(
                f"is not a valid job name: {quote(value)}",
                f"use small letters, digits and -, starting with a letter, at most 30: {fit_name(value)}",
            )
        return value

    @field_validator("source")
    @classmethod
    def _source(cls, value: str, info: ValidationInfo) -> str:
        if re.match(r"git\+(https|ssh|file)://[^/]*/.", value):
            return value
        if "://" in value or re.match(r"[\w.-]+@[\w.-]+:", value) or value.startswith("git+"):
            raise wrong(
                f"is not a folder or a git address: {quote(value)}",
                "write git+https://host/repo@rev or git+ssh://...",
            )
        return place(value, info).rstrip("/") or "/"

    @field_validator("entrypoint")
    @classmethod
    def _entrypoint(cls, value: str | list[str] | None) -> str | list[str] | None:
        return None if value is None else program(value)

    @field_validator("keep", mode="before")
    @classmethod
    def _keep(cls, value: Any) -> Any:
        if isinstance(value, bool | str) and value not in ("auto", "none"):
            text = str(value).lower()
            right = "none" if text in ("no", "off", "false") else "auto" if text in ("all", "true") else f"[{value}]"
            raise wrong(f"must be auto, none or a list, not {quote(value)}", f"write keep: {right}")
        return value

    @field_validator("health", mode="before")
    @classmethod
    def _health(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML's off

    @field_validator("inputs")
    @classmethod
    def _inputs(cls, value: dict[str, Input]) -> dict[str, Input]:
        seen: dict[str, str] = {}
        for name in value:
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,62}", name):
                raise wrong(
                    f"has an invalid name: {quote(name)}", "use letters, digits, _ and -, starting with a letter"
                )
            variable = name.upper().replace("-", "_")
            if variable in seen:
                raise wrong(
                    f"has two names that become the same variable: {seen[variable]} and {name} are "
                    f"both CLOUDTRAIN_INPUT_{variable}"
                )
            seen[variable] = name
        return value


def _strategy(world_size: int) -> str:
    return "ddp" if world_size > 1 else "none"


def _max_attempts(resources: Resources) -> int:
    return 3 if resources.use_spot else 1


def _with(part: Any, key: str, value: Any) -> Any:
    copy = part.model_copy()
    copy.__dict__[key] = value  # not by `update`, which would count it as given
    return copy
