# Written by docs/generate.py; a test checks that it is current.
"""The keys of a job and of its sections, as `Job(...)` takes them; for editors and type checkers only."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from cloudtrain.job import sections

class CheckpointKeys(TypedDict, total=False):
    every: str
    """A duration (15m) or steps ("500 steps")."""
    keep: int
    """Newest checkpoints that are kept."""
    required: bool
    """Refuse a later attempt that finds no earlier checkpoint."""
    folder: Literal["checkpoints", "checkpoints/checkpoint_dir"] | None
    """Where checkpoints are in the run's output, set when a run moves to or from SageMaker."""

class EnvironmentKeys(TypedDict, total=False):
    requirements: str | None
    """A requirements file in the source; left out: requirements.txt if it is there; none: no file."""

class FitKeys(TypedDict, total=False):
    model: str | int | float | bool | None
    """A hub name, a folder with a config.json, or input:NAME."""
    batch: int | None
    """Samples of a micro-batch on one rank."""
    sequence: int | None
    """Tokens of a sample."""
    precision: Literal["fp32", "bf16", "bf16-pure"]
    """bf16 is mixed precision; bf16-pure has weights in bfloat16 too."""
    checkpointing: bool
    """Whether activations are computed again."""
    accumulation: int
    """Micro-batches of an optimizer step on one rank."""
    steps: int | None
    """Optimizer steps, for the forecast of the time."""

class InputKeys(TypedDict, total=False):
    uri: str
    """s3://, gs:// or a path; of a run it is found at submit."""
    mode: Literal["copy", "mount", "stream"]
    """How it reaches the node."""
    run: str | None
    """A run whose results are the input, by its id."""
    what: str | None
    """Which results of the run: model (the default), outputs, checkpoints, or a folder below."""
    sha256: str | None
    """Digest of the run's results, found at submit."""

class LimitsKeys(TypedDict, total=False):
    max_runtime: str
    """Longest time an attempt may run: 90s, 15m, 24h, 7d."""
    grace: str
    """Time to checkpoint between SIGTERM and SIGKILL."""
    max_wait: str | None
    """Longest wait for machines where the platform limits it, GPUs over SSH (0: none), nodes for each other: 24h."""
    stall: str | None
    """Longest time in which nothing is printed while a rank does nothing; then the attempt is lost: 30m."""
    idle: str | None
    """Longest time in which all GPUs of all nodes are used under 5 %; then the attempt is lost: 1h."""
    max_total_runtime: str | None
    """Longest time that all attempts of a run may take together: 6h."""
    max_cost: str | None
    """Most that all attempts of a run may cost together: 40 USD. It needs a known price."""

class ParallelismKeys(TypedDict, total=False):
    strategy: Literal["none", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3", "auto"]
    """How ranks share the work; left out: ddp, none with one process; auto: as is best (docs/auto.md)."""
    tp_size: int
    """Ranks over which each layer is split (tensor parallel)."""
    pp_size: int
    """Ranks over which the layers are dealt out (pipeline parallel)."""
    cp_size: int
    """Ranks over which each sequence is split (context parallel)."""
    dp_replicate_size: int | None
    """Replicas of the sharded model (hsdp)."""
    dp_shard_size: int | None
    """Ranks over which parameters are sharded."""
    microbatches: int | None
    """Pieces of a batch in a pipeline."""
    pp_schedule: Literal["1f1b", "gpipe", "interleaved"] | None
    """Order of a pipeline's work; left out: 1f1b, or interleaved with virtual_stages."""
    virtual_stages: int | None
    """Pipeline stages of a rank, for interleaved."""
    offload: bool
    """Keep parameters and optimizer state in CPU memory."""
    accelerate_config: str | None
    """An existing Accelerate configuration file in the source."""

class ResourcesKeys(TypedDict, total=False):
    accelerators: str | int | float | bool | Sequence[str | int | float | bool] | None
    """GPUs of a node: "A100-80GB:8", or "A100" for one; of several one is chosen. 0 hides those that are there."""
    use_spot: bool
    """Use spot (preemptible) capacity; retry.max_attempts is then 3 by default."""
    disk_gb: int | None
    """Disk of a node, in GB."""
    cpus: int | None
    """CPU cores of a node, at least."""
    memory: str | None
    """Memory of a node, at least: 64GB, 64GiB."""
    instance_type: str | None
    """The platform's own machine type, instead of the catalogue's choice."""
    usd_per_hour: float | None
    """Price of a node in USD per hour, instead of the catalogue's."""
    priced_as: str | None
    """Machine of a price list whose price a node has: aws/us-east-1/g5.12xlarge (see docs/cost.md)."""

class RetryKeys(TypedDict, total=False):
    max_attempts: int
    """Attempts in all; left out: 1, or 3 with use_spot."""
    on_events: Sequence[Literal["preempted", "lost", "capacity"]]
    """What a new attempt follows."""

class JobKeys(TypedDict, total=False):
    name: str
    """Name of the job; runs are called <name>-<time>-<random>. Left out: the folder's name."""
    source: str | os.PathLike[str]
    """Folder to package, or git+https://host/repo@rev, git+ssh://..."""
    allow_secrets: Sequence[str]
    """Files that may hold credentials, as in .gitignore, and keys of the job: env.NAME, args."""
    allow_large: Sequence[str]
    """Files of any size, as in .gitignore; else 500 MB each and 2 GB in all."""
    allow_pointers: Sequence[str]
    """Files that may be Git-LFS pointers, as in .gitignore; others are refused."""
    entrypoint: str | Sequence[str | int | float | bool] | None
    """A script in the source, -m package.module, or a command as a list, which runs once per node."""
    run: str | None
    """Shell text that runs once per node, in place of an entrypoint."""
    trainer: bool
    """true: the shared trainer runs, in place of an entrypoint."""
    setup: str | None
    """Shell text that runs once per node before the ranks; a failure ends the job."""
    resume_args: Sequence[str | int | float | bool]
    """Arguments of later attempts, where a checkpoint is complete; {checkpoint} is its path."""
    keep: Sequence[str]
    """Files that the script writes in its folder and that are copied back: [out, "runs/*/best.pt"]."""
    compat: Literal["skypilot", "dstack"] | None
    """Whose node variables a command or run gets too."""
    arg_style: Literal["argparse", "hf", "hydra"]
    """How hyperparameters become arguments."""
    hyperparameters: Mapping[str, Any]
    """Arguments of the script, in order, as written: lr: 3.0e-4 is --lr 3.0e-4."""
    args: Sequence[str | int | float | bool]
    """Further arguments, appended verbatim."""
    environment: EnvironmentKeys | sections.Environment
    """What is installed on each node."""
    num_nodes: int
    """Nodes."""
    min_nodes: int | None
    """Fewer nodes than num_nodes are accepted down to this number."""
    processes_per_node: int | None
    """Processes (ranks) on each node; default: one per accelerator, or 1."""
    distributed_env: Literal["auto", "always"]
    """always: one process gets RANK, WORLD_SIZE and MASTER_ADDR too; auto: where its script needs them."""
    sm_env: bool | None
    """true: SageMaker's SM_ variables on every backend; left out: where the source reads them."""
    aip_env: bool | None
    """true: Vertex AI's AIP_ variables on every backend; left out: where the source reads them."""
    resources: ResourcesKeys | sections.Resources
    parallelism: Literal["auto"] | ParallelismKeys | sections.Parallelism
    """How the ranks share the model; auto: as is best."""
    fit: FitKeys | sections.Fit
    """What a script trains, for the forecast of memory and time; the trainer says it itself."""
    limits: LimitsKeys | sections.Limits
    checkpoint: CheckpointKeys | sections.Checkpoint
    """How often checkpoints are written."""
    inputs: Mapping[str, InputKeys | sections.Input | str]
    """Data by name; the script finds it in $CLOUDTRAIN_INPUT_<NAME>."""
    after: Sequence[str | int | float | bool]
    """Runs by their ids: the job is held until all of them have SUCCEEDED."""
    output: str | os.PathLike[str] | None
    """Where results go; left out: the target's place."""
    env: Mapping[str, str | int | float | bool]
    """Environment variables of the ranks."""
    secrets: Mapping[str, str | Sequence[str]]
    """Environment variables from env:, file:, aws-secretsmanager:, gcp-secretmanager:, k8s:, in order."""
    labels: Mapping[str, str | int | float | bool]
    """Tags of the run."""
    metrics: Mapping[str, str] | Literal["off", False]
    """Regular expressions that find a metric's value in the log; off: metrics are not looked for."""
    retry: RetryKeys | sections.Retry
    """When a new attempt is started."""
    image: str | None
    """Container image; left out: the backend's default."""
    target: str | Sequence[str]
    """A backend, or a target of cloudtrain.toml; of a list, `prefer` decides which."""
    prefer: Literal["cost", "time", "order"]
    """Which of several targets and accelerators is tried first: cheapest, fastest, or first as written."""
    options: Mapping[str, Mapping[str, Any]]
    """Options by backend."""
