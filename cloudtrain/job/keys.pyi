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
    """Number of newest checkpoints that the shared trainer keeps; other scripts can read it in CLOUDTRAIN_CHECKPOINT_KEEP."""
    engine: Literal["script", "cloudtrain"]
    """Who saves for transformers' Trainer and TRL: they, or cloudtrain's TrainerCheckpoints without a line of code."""
    required: bool
    """Fail a resumed attempt that finds no checkpoint, instead of starting from the beginning."""
    folder: Literal["checkpoints", "checkpoints/checkpoint_dir"] | None
    """Folder of checkpoints in the run's output; set when a run moves to or from SageMaker."""

class EnvironmentKeys(TypedDict, total=False):
    requirements: str | None
    """Requirements file of the source to install. Default: requirements.txt, if any. `none`: install nothing."""

class FitKeys(TypedDict, total=False):
    model: str | int | float | bool | None
    """Model: a Hugging Face Hub name, a folder with a config.json, or input:NAME."""
    batch: int | None
    """Batch size of one rank in one forward pass, in samples."""
    sequence: int | None
    """Sequence length of a sample, in tokens."""
    precision: Literal["fp32", "bf16", "bf16-pure", "fp16", "fp16-pure"]
    """bf16 and fp16 are mixed precision; with -pure weights have 16 bits too."""
    checkpointing: bool
    """Whether gradient checkpointing (recomputing activations) is on."""
    accumulation: int
    """Gradient accumulation: forward passes of a rank per optimizer step."""
    lora: int | None
    """Rank of a LoRA adapter. Default: the whole model is trained."""
    lora_targets: Sequence[str | int | float | bool]
    """Modules with an adapter: [all-linear], or names. Default: peft's for the model."""
    quantized: Literal["4bit", "8bit"] | None
    """How bitsandbytes keeps the frozen layers: 4bit is QLoRA."""
    optimizer: Literal["adamw", "adamw-8bit", "adafactor", "muon", "sgd"]
    """Optimizer; sgd is without momentum."""
    steps: int | None
    """Number of optimizer steps, to predict the time."""

class InputKeys(TypedDict, total=False):
    uri: str
    """s3://, gs://, az:// or a path. With run: filled in at submit."""
    mode: Literal["copy", "mount", "stream"]
    """How the data reaches the node."""
    run: str | None
    """Id of a run whose results are the input."""
    what: str | None
    """Which results of the run: model (the default), outputs, checkpoints, or a subfolder of these."""
    sha256: str | None
    """Digest of the run's results, filled in at submit."""

class LimitsKeys(TypedDict, total=False):
    max_runtime: str
    """Maximum time of one attempt, such as 90s, 15m, 24h or 7d."""
    grace: str
    """Time between SIGTERM and SIGKILL, for a last checkpoint."""
    max_wait: str | None
    """Maximum wait before it runs (machines, free GPUs; 0 on SSH: none) and of nodes for each other: 24h."""
    stall: str | None
    """End the attempt as hung after this time without output while a rank is idle, such as 30m."""
    idle: str | None
    """End the attempt as hung after this time with all GPUs used less than 5 %, such as 1h."""
    max_silence: str | None
    """End the attempt as hung after this time without a line from any rank, busy or not, such as 1h."""
    max_total_runtime: str | None
    """Maximum total time of all attempts of a run, such as 6h; without it only each attempt is limited."""
    max_cost: str | None
    """Maximum total cost of all attempts of a run, such as 40 USD. It needs a known price."""

class ParallelismKeys(TypedDict, total=False):
    strategy: Literal["none", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3", "auto"]
    """How the model is split over the ranks. Default: ddp, or none with one process; auto: cloudtrain chooses."""
    tp_size: int
    """Number of ranks over which each layer is split (tensor parallel)."""
    pp_size: int
    """Number of ranks over which the layers are split (pipeline parallel)."""
    cp_size: int
    """Number of ranks over which each sequence is split (context parallel)."""
    dp_replicate_size: int | None
    """Number of replicas of the sharded model (strategy hsdp)."""
    dp_shard_size: int | None
    """Number of ranks over which parameters are sharded."""
    microbatches: int | None
    """Number of microbatches per batch in a pipeline (pp_size above 1)."""
    pp_schedule: Literal["1f1b", "gpipe", "interleaved"] | None
    """Pipeline schedule. Default: 1f1b, or interleaved with virtual_stages."""
    virtual_stages: int | None
    """How many pipeline stages each rank holds, for the schedule `interleaved`."""
    offload: bool
    """Keep parameters and optimizer state in CPU memory."""
    accelerate_config: str | None
    """An existing Accelerate configuration file in the source."""

class ResourcesKeys(TypedDict, total=False):
    accelerators: str | int | float | bool | Sequence[str | int | float | bool] | None
    """GPUs of a node: "A100-80GB:8", or "A100" for one. From a list, cloudtrain chooses one. 0 hides all GPUs."""
    use_spot: bool
    """Use spot (preemptible) capacity; the default of retry.max_attempts is then 3."""
    disk_gb: int | None
    """Disk size of a node, in GB."""
    cpus: int | None
    """Minimum CPU cores of a node."""
    memory: str | None
    """Minimum memory of a node, such as 64GB or 64GiB."""
    instance_type: str | None
    """The platform's machine type, instead of the one that cloudtrain chooses."""
    usd_per_hour: float | None
    """Price of a node in USD per hour, instead of the price list's; 0: it is free."""
    priced_as: str | None
    """Entry of a price list to use as the price of a node: aws/us-east-1/g5.12xlarge."""

class RetryKeys(TypedDict, total=False):
    max_attempts: int
    """Maximum number of attempts. Default: 1, or 3 with use_spot."""
    on_events: Sequence[Literal["preempted", "lost", "capacity"]]
    """Which ends of an attempt are retried."""
    by: Literal["client", "cluster"]
    """cluster: the platform itself starts a lost attempt again, with this machine off too."""
    restarts: int
    """How often ranks are started again on the same nodes."""
    restart_on: Literal["transient", "any"]
    """transient: after signals and errors of NCCL, gloo, GPUs and connections; any: after every failure."""

class RoleKeys(TypedDict, total=False):
    main: bool
    """true: the run has ended when this role has ended. Default: true for the role named trainer."""
    entrypoint: str | Sequence[str | int | float | bool] | None
    """As the job's."""
    run: str | None
    """As the job's."""
    args: Sequence[str | int | float | bool]
    """As the job's."""
    hyperparameters: Mapping[str, Any]
    """As the job's."""
    num_nodes: int
    """Nodes of this role."""
    colocate: str | None
    """Role on whose nodes this one runs too. GPUs: those of its own resources, else none."""
    processes_per_node: int | None
    """As the job's; of a service: default 1."""
    env: Mapping[str, str | int | float | bool]
    """As the job's."""
    setup: str | None
    """As the job's."""
    ray: bool
    """As the job's."""
    resources: ResourcesKeys | sections.Resources | None
    """Hardware of each node of this role, without GPUs where it names none."""
    image: str | int | float | bool | None
    """Container image of a service. Default: the job's."""
    requirements: str | None
    """Requirements file of a service, or none. Default: environment.requirements."""
    secrets: Sequence[str]
    """Secrets of the job that a service gets; the main role gets all."""
    ports: Sequence[int]
    """Ports that must be free when the role starts."""
    ready: str | None
    """When a service is ready: tcp://:8000, http://:8000/health or line:TEXT. Default: at its start."""
    ready_timeout: str
    """A service that is not ready by then ends the run."""
    after: Sequence[str | int | float | bool]
    """Services that must be ready before it starts."""
    restart: int
    """How often a service that has ended on a node is restarted there."""
    grace: str | None
    """Time of a service between SIGTERM and SIGKILL. Default, and at most: limits.grace."""

class JobKeys(TypedDict, total=False):
    name: str
    """Name of the job; runs are called <name>-<time>-<random>. Default: the folder's name."""
    source: str | os.PathLike[str]
    """Folder to package, or git+https://host/repo@rev, git+ssh://..."""
    allow_secrets: Sequence[str]
    """Patterns (as in .gitignore) of files that are allowed to contain credentials, and keys of the job: env.NAME, args."""
    allow_large: Sequence[str]
    """Patterns (as in .gitignore) of files that may be of any size; otherwise 500 MB each and 2 GB in total."""
    allow_pointers: Sequence[str]
    """Patterns (as in .gitignore) of files that may be Git-LFS pointers; other pointers are refused."""
    entrypoint: str | Sequence[str | int | float | bool] | None
    """A script in the source, -m package.module, or a command as a list, which runs once per node."""
    run: str | None
    """Shell script that runs once per node, instead of an entrypoint."""
    trainer: bool
    """true: run the shared trainer (cloudtrain's own training program) instead of an entrypoint."""
    ray: bool
    """true: start a Ray cluster on the nodes; the entrypoint runs on the first one, with RAY_ADDRESS."""
    setup: str | None
    """Shell script that runs once per node before the training; if it fails, the job ends."""
    resume_args: Sequence[str | int | float | bool]
    """Arguments added when an attempt resumes from a checkpoint; {checkpoint} is its path."""
    keep: Literal["auto", "none"] | Sequence[str]
    """Files that the script writes in its folder and to copy back: [out, "runs/*/best.pt"]; auto: all; none."""
    keep_limit: str | None
    """How much keep: auto copies back of each node, the newest files; default: 20GB."""
    compat: Literal["skypilot", "dstack", "sbatch"] | None
    """Run the text as this tool does: skypilot and dstack set their node variables, sbatch runs it on the first node."""
    arg_style: Literal["argparse", "hf", "hydra"]
    """How hyperparameters become arguments."""
    hyperparameters: Mapping[str, Any]
    """Arguments of the script, in order, as written: lr: 3.0e-4 is --lr 3.0e-4."""
    args: Sequence[str | int | float | bool]
    """More arguments, appended unchanged."""
    roles: Mapping[str, RoleKeys | sections.Role]
    """Several programs by name, each on its nodes; the run ends with the main one, `trainer`."""
    environment: EnvironmentKeys | sections.Environment
    """What to install on each node."""
    num_nodes: int
    """Nodes."""
    min_nodes: int | None
    """If not all num_nodes nodes are available, start with at least this many. Others do not join later."""
    processes_per_node: int | None
    """Processes (ranks) on each node; default: one per accelerator, or 1."""
    distributed_env: Literal["auto", "always", "tensorflow", "jax", "keras"]
    """always: RANK and MASTER_ADDR for one process too; a framework: its variables too; auto: by what the code imports."""
    sm_env: bool | None
    """true: set SageMaker's SM_ variables on every backend. Default: if the source reads them."""
    aip_env: bool | None
    """true: set Vertex AI's AIP_ variables on every backend. Default: if the source reads them."""
    resources: ResourcesKeys | sections.Resources
    parallelism: Literal["auto"] | ParallelismKeys | sections.Parallelism
    """How the model is split over the ranks; auto: cloudtrain chooses."""
    fit: FitKeys | sections.Fit
    """Model and batch of a script, to predict memory and time; not needed with trainer: true."""
    health: Literal["auto", "off", "strict"]
    """Check of the nodes' hardware before the ranks start; strict: always, and a slow node is refused too."""
    limits: LimitsKeys | sections.Limits
    checkpoint: CheckpointKeys | sections.Checkpoint
    """How often checkpoints are written."""
    inputs: Mapping[str, InputKeys | sections.Input | str]
    """Data by name; the script finds it in $CLOUDTRAIN_INPUT_<NAME>."""
    after: Sequence[str | int | float | bool]
    """Ids of runs; the job starts only after all of these runs have SUCCEEDED."""
    output: str | os.PathLike[str] | None
    """Folder or bucket for results. Default: chosen by the target."""
    audit: bool
    """true: also write who submitted, entered, cancelled and deleted the run into its output."""
    env: Mapping[str, str | int | float | bool]
    """Environment variables of the ranks."""
    secrets: Mapping[str, str | Sequence[str]]
    """Secret environment variables, from env:, file:, aws-secretsmanager:, gcp-secretmanager:, azure-keyvault: or k8s:."""
    labels: Mapping[str, str | int | float | bool]
    """Labels of the run."""
    metrics: Mapping[str, str] | Literal["off", False]
    """Regular expressions that find a metric's value in the log; off: do not search the log for metrics."""
    retry: RetryKeys | sections.Retry
    """When a failed attempt is retried."""
    image: str | None
    """Container image. Default: the backend's."""
    target: str | Sequence[str]
    """A backend or a target of cloudtrain.toml. From a list, `prefer` chooses one."""
    prefer: Literal["cost", "time", "order"]
    """Which of several targets and accelerators to try first: cheapest, fastest, or first (as written)."""
    options: Mapping[str, Mapping[str, Any]]
    """Options of each backend."""
