"""The sections of the job file: what its nested keys are and mean."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_serializer, model_validator

from cloudtrain.job.fields import (
    NO_WAIT,
    Count,
    Duration,
    Flag,
    Inside,
    Money,
    OneOrMore,
    Place,
    Size,
    Spec,
    Text,
    Wait,
)
from cloudtrain.job.problems import quote, wrong
from cloudtrain.job.units import PRICE_LIST, duration_s, size_bytes, usd


class Environment(Spec):
    """What is installed once per node, over the image's own packages."""

    requirements: Inside | None = Field(
        default=None,
        description="A requirements file in the source; left out: requirements.txt if it is there; none: no file.",
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
    """What each node has."""

    accelerators: OneOrMore[Text] | None = Field(
        default=None,
        description='GPUs of a node: "A100-80GB:8", or "A100" for one; of several one is chosen. 0 hides those that are there.',
    )
    use_spot: Flag = Field(
        default=False, description="Use spot (preemptible) capacity; retry.max_attempts is then 3 by default."
    )
    disk_gb: Count | None = Field(default=None, description="Disk of a node, in GB.")
    cpus: Count | None = Field(default=None, description="CPU cores of a node, at least.")
    memory: Size | None = Field(default=None, description="Memory of a node, at least: 64GB, 64GiB.")
    instance_type: str | None = Field(
        default=None, description="The platform's own machine type, instead of the catalogue's choice."
    )
    usd_per_hour: float | None = Field(
        default=None, gt=0, description="Price of a node in USD per hour, instead of the catalogue's."
    )

    priced_as: str | None = Field(
        default=None,
        description="Machine of a price list whose price a node has: aws/us-east-1/g5.12xlarge (see docs/cost.md).",
    )

    @field_validator("priced_as")
    @classmethod
    def _priced_as(cls, value: str | None) -> str | None:
        if value is None or re.fullmatch(rf"{PRICE_LIST}/\S{{1,100}}", value):
            return value
        hint = "write provider/region/machine, as in aws/us-east-1/g5.12xlarge"
        raise wrong(f"names no machine of a price list: {quote(value)}", hint)

    @field_validator("accelerators")
    @classmethod
    def _accelerators(cls, value: str | list[str] | None) -> str | list[str] | None:
        if isinstance(value, list):
            return [str(cls._accelerators(text)) for text in value]
        if value in (None, "0") or re.fullmatch(r"[A-Za-z][A-Za-z0-9.-]*(:[1-9]\d{0,3})?", value):
            return value
        number = re.fullmatch(r"(\d+)\s*[x:* ]\s*([A-Za-z][\w.-]*)|([A-Za-z][\w.-]*)\s*[x* ]\s*(\d+)", value)
        right = f"{number[2] or number[3]}:{number[1] or number[4]}" if number else "A100:8"
        raise wrong(f"must be a name and a count, not {quote(value)}", f"write {right}")

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
        description="How ranks share the work; left out: ddp, none with one process; auto: as is best (docs/auto.md).",
    )
    tp_size: Count = Field(default=1, description="Ranks over which each layer is split (tensor parallel).")
    pp_size: Count = Field(default=1, description="Ranks over which the layers are dealt out (pipeline parallel).")
    cp_size: Count = Field(default=1, description="Ranks over which each sequence is split (context parallel).")
    dp_replicate_size: Count | None = Field(default=None, description="Replicas of the sharded model (hsdp).")
    dp_shard_size: Count | None = Field(default=None, description="Ranks over which parameters are sharded.")
    microbatches: Count | None = Field(default=None, description="Pieces of a batch in a pipeline.")
    pp_schedule: Literal["1f1b", "gpipe", "interleaved"] | None = Field(
        default=None, description="Order of a pipeline's work; left out: 1f1b, or interleaved with virtual_stages."
    )
    virtual_stages: Count | None = Field(default=None, description="Pipeline stages of a rank, for interleaved.")
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

    model: Text | None = Field(default=None, description="A hub name, a folder with a config.json, or input:NAME.")
    batch: Count | None = Field(default=None, description="Samples of a micro-batch on one rank.")
    sequence: Count | None = Field(default=None, description="Tokens of a sample.")
    precision: Literal["fp32", "bf16", "bf16-pure"] = Field(
        default="bf16", description="bf16 is mixed precision; bf16-pure has weights in bfloat16 too."
    )
    checkpointing: Flag = Field(default=False, description="Whether activations are computed again.")
    accumulation: Count = Field(default=1, description="Micro-batches of an optimizer step on one rank.")
    steps: Count | None = Field(default=None, description="Optimizer steps, for the forecast of the time.")


class Limits(Spec):
    """When an attempt is ended."""

    max_runtime: Duration = Field(default="24h", description="Longest time an attempt may run: 90s, 15m, 24h, 7d.")
    grace: Duration = Field(default="30s", description="Time to checkpoint between SIGTERM and SIGKILL.")

    max_wait: Wait | None = Field(
        default=None,
        description="Longest wait for machines where the platform limits it, GPUs over SSH (0: none), nodes for each other: 24h.",
    )
    stall: Duration | None = Field(
        default=None,
        description="Longest time in which nothing is printed while a rank does nothing; then the attempt is lost: 30m.",
    )

    idle: Duration | None = Field(
        default=None,
        description="Longest time in which all GPUs of all nodes are used under 5 %; then the attempt is lost: 1h.",
    )

    max_total_runtime: Duration | None = Field(
        default=None, description="Longest time that all attempts of a run may take together: 6h."
    )
    max_cost: Money | None = Field(
        default=None, description="Most that all attempts of a run may cost together: 40 USD. It needs a known price."
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
    def max_runtime_s(self) -> int:
        return duration_s(self.max_runtime)

    @property
    def grace_s(self) -> int:
        return duration_s(self.grace)


class Checkpoint(Spec):
    """How often a checkpoint is written and how many are kept."""

    every: str = Field(default="15m", description='A duration (15m) or steps ("500 steps").')
    keep: Count = Field(default=3, description="Newest checkpoints that are kept.")
    required: bool = Field(default=False, description="Refuse a later attempt that finds no earlier checkpoint.")
    folder: Literal["checkpoints", "checkpoints/checkpoint_dir"] | None = Field(
        default=None,
        description="Where checkpoints are in the run's output, set when a run moves to or from SageMaker.",
    )

    @field_validator("every", mode="before")
    @classmethod
    def _every(cls, value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            raise wrong(f"has no unit: {value}", f'write "{value} steps", {value}s or {value}m')
        if isinstance(value, str) and not re.fullmatch(r"\s*0*[1-9]\d{0,11}\s*steps?\s*", value):
            try:
                duration_s(value)
            except ValueError:
                raise wrong(
                    f"is neither a duration nor a number of steps: {quote(value)}", 'write 15m or "500 steps"'
                ) from None
        return value

    @property
    def every_steps(self) -> int | None:
        return int(self.every.split("step")[0]) if "step" in self.every else None

    @property
    def every_s(self) -> int | None:
        return None if "step" in self.every else duration_s(self.every)


class Input(Spec):
    """Data that every node sees in a folder of its own: a place, or what a run has left; a text is short for {uri: text}."""

    uri: Place = Field(default="", description="s3://, gs:// or a path; of a run it is found at submit.")
    mode: Literal["copy", "mount", "stream"] = Field(default="copy", description="How it reaches the node.")
    run: str | None = Field(default=None, min_length=1, description="A run whose results are the input, by its id.")
    what: str | None = Field(
        default=None,
        pattern=r"^(model|outputs|checkpoints)(/[^/]+)*$",
        description="Which results of the run: model (the default), outputs, checkpoints, or a folder below.",
    )
    sha256: str | None = Field(default=None, description="Digest of the run's results, found at submit.")

    @model_validator(mode="before")
    @classmethod
    def _short(cls, data: Any) -> Any:
        return {"uri": data} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _place(self) -> Input:
        if not self.uri and not self.run:
            raise wrong("has neither uri nor run", "write uri: s3://bucket/prefix/, or run: RUN")
        if self.what and not self.run:
            raise wrong("names no run whose results these are", "write run: RUN beside what")
        if ".." in (self.what or "").split("/"):
            raise wrong(f"leads out of the run's results: {quote(self.what)}", "write a folder below model")
        return self

    @model_serializer(mode="wrap")
    def _lean(self, handler: Any) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value not in (None, "")}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> Any:
        made = handler.resolve_ref_schema(handler(core))
        return {"anyOf": [{"type": "string", "description": "s3://, gs:// or a path."}, made]}


class Retry(Spec):
    """When a new attempt is started from the newest complete checkpoint.

    `max_attempts` is 1 by default, and 3 with `resources.use_spot`.
    """

    max_attempts: Count = Field(default=1, description="Attempts in all; left out: 1, or 3 with use_spot.")
    on_events: list[Literal["preempted", "lost", "capacity"]] = Field(
        default=["preempted", "lost", "capacity"], description="What a new attempt follows."
    )
