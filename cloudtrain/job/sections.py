"""The sections of the job file: what its nested keys are and mean."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_serializer, model_validator

from cloudtrain.job.fields import (
    MANY_ENTRIES,
    NO_WAIT,
    READY,
    Accelerators,
    Attempts,
    Checkpoints,
    Cores,
    DiskGb,
    Duration,
    Every,
    Few,
    Flag,
    HourlyUsd,
    Hyperparameters,
    Inside,
    Many,
    Money,
    Name,
    Nodes,
    Passes,
    Place,
    Port,
    PricedAs,
    Processes,
    Ranks,
    Ready,
    Restarts,
    Samples,
    Size,
    Spec,
    Steps,
    Text,
    Wait,
    none_yet,
)
from cloudtrain.job.problems import quote, wrong
from cloudtrain.job.units import duration_s, size_bytes, usd


class Environment(Spec):
    """What is installed once per node, over the image's own packages."""

    requirements: Inside | None = Field(
        default=None,
        description="Requirements file of the source to install. Default: requirements.txt, if any. `none`: install nothing.",
    )

    @model_validator(mode="wrap")
    @classmethod
    def _switched_off(cls, data: Any, handler: Any) -> Any:
        if isinstance(data, dict) and data.get("requirements") == "none":
            made = handler({key: value for key, value in data.items() if key != "requirements"})
            made.__pydantic_fields_set__.add("requirements")  # None that was asked for, so that bind() leaves it
            return made
        return handler(data)


class Resources(Spec):
    """Hardware of each node."""

    accelerators: Accelerators | None = Field(
        default=None,
        description='GPUs of a node: "A100-80GB:8", or "A100" for one. From a list, cloudtrain chooses one. 0 hides all GPUs.',
    )
    use_spot: Flag = Field(
        default=False, description="Use spot (preemptible) capacity; the default of retry.max_attempts is then 3."
    )
    disk_gb: DiskGb | None = Field(default=None, description="Disk size of a node, in GB.")
    cpus: Cores | None = Field(default=None, description="Minimum CPU cores of a node.")
    memory: Size | None = Field(default=None, description="Minimum memory of a node, such as 64GB or 64GiB.")
    instance_type: str | None = Field(
        default=None, description="The platform's machine type, instead of the one that cloudtrain chooses."
    )
    usd_per_hour: HourlyUsd | None = Field(
        default=None, description="Price of a node in USD per hour, instead of the price list's; 0: it is free."
    )
    priced_as: PricedAs | None = Field(
        default=None, description="Entry of a price list to use as the price of a node: aws/us-east-1/g5.12xlarge."
    )

    @property
    def accelerator(self) -> str | None:
        """The accelerator's name, of several the first one's, or None."""
        return self._first.partition(":")[0] if self.gpus else None

    @property
    def gpus(self) -> int:
        """Accelerators of a node, of several the first one's; 0 without."""
        return int(self._first.partition(":")[2] or 1) if self._first not in ("", "0") else 0

    @property
    def _first(self) -> str:
        return self.accelerators[0] if isinstance(self.accelerators, list) else self.accelerators or ""

    @property
    def memory_bytes(self) -> int | None:
        return size_bytes(self.memory) if self.memory else None


class Parallelism(Spec):
    """How the model is spread over the ranks."""

    strategy: Literal["none", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3", "auto"] = Field(
        default="none",
        description="How the model is split over the ranks. Default: ddp, or none with one process; auto: "
        "cloudtrain chooses.",
    )
    tp_size: Ranks = Field(default=1, description="Number of ranks over which each layer is split (tensor parallel).")
    pp_size: Ranks = Field(
        default=1, description="Number of ranks over which the layers are split (pipeline parallel)."
    )
    cp_size: Ranks = Field(
        default=1, description="Number of ranks over which each sequence is split (context parallel)."
    )
    dp_replicate_size: Ranks | None = Field(
        default=None, description="Number of replicas of the sharded model (strategy hsdp)."
    )
    dp_shard_size: Ranks | None = Field(default=None, description="Number of ranks over which parameters are sharded.")
    microbatches: Passes | None = Field(
        default=None, description="Number of microbatches per batch in a pipeline (pp_size above 1)."
    )
    pp_schedule: Literal["1f1b", "gpipe", "interleaved"] | None = Field(
        default=None, description="Pipeline schedule. Default: 1f1b, or interleaved with virtual_stages."
    )
    virtual_stages: Ranks | None = Field(
        default=None, description="How many pipeline stages each rank holds, for the schedule `interleaved`."
    )
    offload: Flag = Field(default=False, description="Keep parameters and optimizer state in CPU memory.")
    accelerate_config: Inside | None = Field(
        default=None, description="An existing Accelerate configuration file in the source."
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, data: Any) -> Any:
        return {"strategy": "auto"} if data == "auto" else data

    @property
    def model_size(self) -> int:
        """Ranks over which one model is split."""
        return self.tp_size * self.pp_size * self.cp_size


class Fit(Spec):
    """What a script trains, for the forecast of its memory and time; nothing runs differently for it."""

    model: Text | None = Field(
        default=None, description="Model: a Hugging Face Hub name, a folder with a config.json, or input:NAME."
    )
    batch: Samples | None = Field(default=None, description="Batch size of one rank in one forward pass, in samples.")
    sequence: Samples | None = Field(default=None, description="Sequence length of a sample, in tokens.")
    precision: Literal["fp32", "bf16", "bf16-pure", "fp16", "fp16-pure"] = Field(
        default="bf16", description="bf16 and fp16 are mixed precision; with -pure weights have 16 bits too."
    )
    checkpointing: Flag = Field(
        default=False, description="Whether gradient checkpointing (recomputing activations) is on."
    )
    accumulation: Passes = Field(
        default=1, description="Gradient accumulation: forward passes of a rank per optimizer step."
    )
    lora: Samples | None = Field(
        default=None, description="Rank of a LoRA adapter. Default: the whole model is trained."
    )
    lora_targets: list[Text] = Field(
        default=[], description="Modules with an adapter: [all-linear], or names. Default: peft's for the model."
    )
    quantized: Literal["4bit", "8bit"] | None = Field(
        default=None, description="How bitsandbytes keeps the frozen layers: 4bit is QLoRA."
    )
    optimizer: Literal["adamw", "adamw-8bit", "adafactor", "muon", "sgd"] = Field(
        default="adamw", description="Optimizer; sgd is without momentum."
    )
    steps: Steps | None = Field(default=None, description="Number of optimizer steps, to predict the time.")


class Limits(Spec):
    """Limits of time and cost."""

    max_runtime: Duration = Field(
        default="24h", description="Maximum time of one attempt, such as 90s, 15m, 24h or 7d."
    )
    grace: Duration = Field(default="30s", description="Time between SIGTERM and SIGKILL, for a last checkpoint.")
    max_wait: Wait | None = Field(
        default=None,
        description="Maximum wait before it runs (machines, free GPUs; 0 on SSH: none) and of nodes for each other: 24h.",
    )
    stall: Duration | None = Field(
        default=None,
        description="End the attempt as hung after this time without output while a rank is idle, such as 30m.",
    )
    idle: Duration | None = Field(
        default=None,
        description="End the attempt as hung after this time with all GPUs used less than 5 %, such as 1h.",
    )
    max_silence: Duration | None = Field(
        default=None,
        description="End the attempt as hung after this time without a line from any rank, busy or not, such as 1h.",
    )
    max_total_runtime: Duration | None = Field(
        default=None,
        description="Maximum total time of all attempts of a run, such as 6h; without it only each attempt is limited.",
    )
    max_cost: Money | None = Field(
        default=None, description="Maximum total cost of all attempts of a run, such as 40 USD. It needs a known price."
    )

    @property
    def capped(self) -> bool:
        """Whether all attempts together have a limit."""
        return self.max_total_runtime is not None or self.max_cost is not None

    @property
    def max_total_runtime_s(self) -> int | None:
        return duration_s(self.max_total_runtime) if self.max_total_runtime else None

    @property
    def max_cost_usd(self) -> float | None:
        return usd(self.max_cost) if self.max_cost else None

    @property
    def max_wait_s(self) -> int | None:
        return None if self.max_wait is None else 0 if self.max_wait == NO_WAIT else duration_s(self.max_wait)

    @property
    def stall_s(self) -> int | None:
        return duration_s(self.stall) if self.stall else None

    @property
    def idle_s(self) -> int | None:
        return duration_s(self.idle) if self.idle else None

    @property
    def silence_s(self) -> int | None:
        return duration_s(self.max_silence) if self.max_silence else None

    @property
    def max_runtime_s(self) -> int:
        return duration_s(self.max_runtime)

    @property
    def grace_s(self) -> int:
        return duration_s(self.grace)


class Checkpoint(Spec):
    """How often a checkpoint is written and how many are kept."""

    every: Every = Field(default="15m", description='A duration (15m) or steps ("500 steps").')
    keep: Checkpoints = Field(
        default=3,
        description="Number of newest checkpoints that the shared trainer keeps; other scripts can read it in "
        "CLOUDTRAIN_CHECKPOINT_KEEP.",
    )
    engine: Literal["script", "cloudtrain"] = Field(
        default="script",
        description="Who saves for transformers' Trainer and TRL: they, or cloudtrain's TrainerCheckpoints without a line "
        "of code.",
    )
    required: bool = Field(
        default=False,
        description="Fail a resumed attempt that finds no checkpoint, instead of starting from the beginning.",
    )
    folder: Literal["checkpoints", "checkpoints/checkpoint_dir"] | None = Field(
        default=None,
        description="Folder of checkpoints in the run's output; set when a run moves to or from SageMaker.",
    )

    @property
    def every_steps(self) -> int | None:
        return int(self.every.split("step")[0]) if "step" in self.every else None

    @property
    def every_s(self) -> int | None:
        return None if "step" in self.every else duration_s(self.every)


class Input(Spec):
    """Data that every node sees in a folder of its own: a place, or what a run has left; a text is short for {uri: text}."""

    uri: Place = Field(default="", description="s3://, gs://, az:// or a path. With run: filled in at submit.")
    mode: Literal["copy", "mount", "stream"] = Field(default="copy", description="How the data reaches the node.")
    run: str | None = Field(default=None, min_length=1, description="Id of a run whose results are the input.")
    what: str | None = Field(
        default=None,
        pattern=r"^(model|outputs|checkpoints)(/[^/]+)*$",
        description="Which results of the run: model (the default), outputs, checkpoints, or a subfolder of these.",
    )
    sha256: str | None = Field(default=None, description="Digest of the run's results, filled in at submit.")

    @model_validator(mode="before")
    @classmethod
    def _short(cls, data: Any) -> Any:
        return {"uri": data} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _place(self) -> Input:
        if not self.uri and not self.run:
            raise wrong("needs uri or run", "write uri: s3://bucket/prefix/, or run: RUN")
        if self.what and not self.run:
            raise wrong("needs run: what selects results of a run", "add run: RUN next to what")
        if ".." in (self.what or "").split("/"):
            raise wrong(f"points outside the run's results: {quote(self.what)}", "write a folder below model")
        return self

    @model_serializer(mode="wrap")
    def _lean(self, handler: Any) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value not in (None, "")}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> Any:
        made = handler.resolve_ref_schema(handler(core))
        return {"anyOf": [{"type": "string", "description": "s3://, gs://, az:// or a path."}, made]}


class Retry(Spec):
    """When a new attempt is started from the newest complete checkpoint.

    `max_attempts` is 1 by default, and 3 with `resources.use_spot`.
    """

    max_attempts: Attempts = Field(default=1, description="Maximum number of attempts. Default: 1, or 3 with use_spot.")
    on_events: Few[list[Literal["preempted", "lost", "capacity"]]] = Field(
        default=["preempted", "lost", "capacity"], description="Which ends of an attempt are retried."
    )
    by: Literal["client", "cluster"] = Field(
        default="client",
        description="cluster: the platform itself starts a lost attempt again, with this machine off too.",
    )
    restarts: Restarts = Field(default=0, description="How often ranks are started again on the same nodes.")
    restart_on: Literal["transient", "any"] = Field(
        default="transient",
        description="transient: after signals and errors of NCCL, gloo, GPUs and connections; any: after every failure.",
    )


class Role(Spec):
    """One program of a job with several, on nodes of its own or on those of another role."""

    main: Flag = Field(
        default=False,
        description="true: the run has ended when this role has ended. Default: true for the role named trainer.",
    )
    entrypoint: str | Many[list[Text]] | None = Field(default=None, description="As the job's.")
    run: str | None = Field(default=None, description="As the job's.")
    args: Many[list[Text]] = Field(default_factory=none_yet, description="As the job's.")
    hyperparameters: Annotated[Hyperparameters, MANY_ENTRIES] = Field(default_factory=dict, description="As the job's.")
    num_nodes: Nodes = Field(default=1, description="Nodes of this role.")
    colocate: str | None = Field(
        default=None, description="Role on whose nodes this one runs too. GPUs: those of its own resources, else none."
    )
    processes_per_node: Processes | None = Field(default=None, description="As the job's; of a service: default 1.")
    env: Many[dict[Name, Text]] = Field(default_factory=dict, description="As the job's.")
    setup: str | None = Field(default=None, description="As the job's.")
    ray: Flag = Field(default=False, description="As the job's.")
    resources: Resources | None = Field(
        default=None, description="Hardware of each node of this role, without GPUs where it names none."
    )
    image: Text | None = Field(default=None, description="Container image of a service. Default: the job's.")
    requirements: Inside | None = Field(
        default=None, description="Requirements file of a service, or none. Default: environment.requirements."
    )
    secrets: Few[list[Name]] = Field(
        default_factory=none_yet, description="Secrets of the job that a service gets; the main role gets all."
    )
    ports: Few[list[Port]] = Field(
        default_factory=none_yet, description="Ports that must be free when the role starts."
    )
    ready: Ready | None = Field(
        default=None,
        description="When a service is ready: tcp://:8000, http://:8000/health or line:TEXT. Default: at its start.",
    )
    ready_timeout: Duration = Field(default="30m", description="A service that is not ready by then ends the run.")
    after: Few[list[Text]] = Field(
        default_factory=none_yet, description="Services that must be ready before it starts."
    )
    restart: int = Field(
        default=3, ge=0, le=1000, description="How often a service that has ended on a node is restarted there."
    )
    grace: Duration | None = Field(
        default=None, description="Time of a service between SIGTERM and SIGKILL. Default, and at most: limits.grace."
    )

    @model_serializer(mode="wrap")
    def _lean(self, handler: Any) -> dict[str, Any]:
        empty: tuple[Any, ...] = (None, [], {})
        return {
            key: value
            for key, value in handler(self).items()
            if (value not in empty or (key == "resources" and value is not None)) and value is not False
        }

    def on_nodes_of(self, other: Role | None) -> Role:
        """Return this role with what follows from the one whose nodes it shares."""
        copy = self.model_copy()
        if other and "num_nodes" not in self.model_fields_set:
            copy.__dict__["num_nodes"] = other.num_nodes
        copy.__dict__["resources"] = self.resources or Resources()
        return copy

    @property
    def all_ports(self) -> list[int]:
        """Its ports, that of `ready` too."""
        match = re.fullmatch(READY, self.ready or "")
        asked = [int(port) for port in match.groupdict().values() if port] if match else []
        return [*self.ports, *(port for port in asked if port not in self.ports)]
