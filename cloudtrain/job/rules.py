"""What is wrong with a job's fields together, which values look like credentials, and which keys its platform must carry out.

The launcher carries out all other keys. Each backend names in `Traits.keys` those that it takes: a job that uses another
one is refused before anything is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from cloudtrain.errors import Problem
from cloudtrain.job import placeholders
from cloudtrain.job.roles import find_role_problems, program, services
from cloudtrain.job.units import MOST_RANKS, RANKS_WHY

if TYPE_CHECKING:
    from cloudtrain.job.model import JobModel


MOST_CANDIDATES = 100


class Conflict(NamedTuple):
    """A problem between fields of a job; it says nothing when one of them is wrong by itself."""

    fields: tuple[str, ...]
    problem: Problem


def find_conflicts(job: JobModel) -> Iterator[Conflict]:
    """Yield what is wrong with fields together."""
    if job.roles:
        yield from (Conflict(("roles", "num_nodes"), problem) for problem in find_role_problems(job))
        if not job.main_role:
            return
    p = job.parallelism
    yield from _counts(job)
    yield from _entry(job)
    yield from _placeholders(job)
    if 0 < job.resources.gpus < job.processes:
        yield Conflict(
            ("processes_per_node", "resources"),
            Problem(
                f"is {job.processes}, but a node has {job.resources.gpus} accelerators",
                "processes_per_node",
                "remove it to start one process for each accelerator",
            ),
        )
    yield from _model_sizes(job)
    if p.strategy == "auto":
        yield from _auto(job)
    elif not job.trainer:
        yield from _own_script(job)
    if p.accelerate_config and p.strategy not in ("none", "ddp"):
        yield Conflict(
            ("parallelism",),
            Problem(
                "cannot be combined with parallelism.accelerate_config, whose file sets the strategy too",
                "parallelism.strategy",
                "remove one of the two",
            ),
        )
    said = [name for name in ("model", "batch", "sequence") if getattr(job.fit, name) is not None]
    if said and job.trainer:
        message = "cannot be combined with trainer: true, whose arguments already describe the model"
        yield Conflict(("fit", "trainer"), Problem(message, f"fit.{said[0]}", "remove it"))
    elif said and len(said) < 3:
        missing = next(name for name in ("model", "batch", "sequence") if name not in said)
        hint = "write fit: {model: ..., batch: ..., sequence: ...}"
        yield Conflict(("fit",), Problem("is missing", f"fit.{missing}", hint))
    if job.fit.quantized and not job.fit.lora:
        message = "weights that are quantized cannot be trained: only a LoRA adapter can"
        yield Conflict(("fit",), Problem(message, "fit.quantized", "add the adapter's rank: fit.lora: 16"))
    if job.audit and not job.output:
        yield Conflict(("audit", "output"), Problem("needs a folder or bucket to write to", "audit", "set output"))
    for name in sorted(job.secrets.keys() & job.env.keys()):
        yield Conflict(
            ("secrets", "env"), Problem("is given in env and in secrets", f"secrets.{name}", "keep one of them")
        )


def _counts(job: JobModel) -> Iterator[Conflict]:
    """Yield what is wrong with the numbers of nodes, processes and candidates."""
    world = job.world_size
    if world > MOST_RANKS:
        product = f"{job.num_nodes:,} nodes x {job.processes:,} processes make {world:,} processes"
        words = f"{product}; at most {MOST_RANKS:,} are allowed"
        yield Conflict(("num_nodes", "processes_per_node", "resources"), Problem(words, "num_nodes", RANKS_WHY))
    targets, kinds = (len(n) if isinstance(n, list) else 1 for n in (job.target, job.resources.accelerators))
    if targets * kinds > MOST_CANDIDATES:
        words = f"{targets} targets x {kinds} accelerators are more than {MOST_CANDIDATES} candidates"
        yield Conflict(("target", "resources"), Problem(words, "target", "each candidate is planned: shorten a list"))
    if job.min_nodes is not None and job.min_nodes > job.num_nodes:
        yield Conflict(
            ("min_nodes", "num_nodes"),
            Problem(f"is {job.min_nodes}, more than num_nodes, {job.num_nodes}", "min_nodes"),
        )


def _model_sizes(job: JobModel) -> Iterator[Conflict]:
    """Yield what is wrong with the sizes of the model's parts and of its replicas."""
    p, world = job.parallelism, job.world_size
    size = ("num_nodes", "processes_per_node", "resources", "parallelism")
    model = p.model_size
    split = {key: getattr(p, key) for key in ("tp_size", "pp_size", "cp_size") if getattr(p, key) > 1}
    if world % model:
        words = " x ".join(f"{key} {value}" for key, value in split.items())
        yield Conflict(
            size,
            Problem(
                f"{words} does not divide the {world} processes of the job",
                "parallelism." + next(iter(split)),
                "num_nodes x processes_per_node is the number of processes",
            ),
        )
    else:
        replicas = (p.dp_replicate_size or 1) * (p.dp_shard_size or 1)
        both = p.dp_replicate_size is not None and p.dp_shard_size is not None
        if (both and replicas != world // model) or (world // model) % replicas:
            key = "dp_replicate_size" if p.dp_replicate_size is not None else "dp_shard_size"
            yield Conflict(
                size,
                Problem(
                    f"makes {replicas} data-parallel ranks, but the job has {world // model} for them",
                    f"parallelism.{key}",
                    "remove one of the two",
                ),
            )


def _auto(job: JobModel) -> Iterator[Conflict]:
    """Yield what does not go with `parallelism: auto`."""
    others = sorted(job.parallelism.model_fields_set - {"strategy"})
    for wrong, message, hint in (
        (
            not job.trainer,
            "is auto, which needs the shared trainer (trainer: true)",
            "write the strategy that the script uses",
        ),
        (bool(others), f"is auto, which also chooses {', '.join(others)}", "remove one of the two"),
        (job.min_nodes is not None, "is auto, which needs a fixed number of nodes", "remove min_nodes"),
    ):
        if wrong:
            yield Conflict(("parallelism", "trainer", "min_nodes"), Problem(message, "parallelism.strategy", hint))


def _own_script(job: JobModel) -> Iterator[Conflict]:
    """Yield what is wrong with the strategy of a script that is the user's own."""
    p, fields = job.parallelism, ("num_nodes", "processes_per_node", "resources", "parallelism", "entrypoint", "run")
    sharded = p.strategy not in ("none", "ddp")
    if sharded and job.form != "script":
        message = f"is {p.strategy}, but a command (entrypoint as a list) starts its own processes"
        hint = "write entrypoint: train.py, or remove parallelism.strategy: the command starts the processes itself"
        yield Conflict(fields, Problem(message, "parallelism.strategy", hint))
    elif sharded:
        data = job.world_size // p.model_size or 1
        replicas = p.dp_replicate_size or (data // p.dp_shard_size if p.dp_shard_size else 0)
        if p.strategy != "hsdp" and replicas > 1:
            key = "dp_replicate_size" if p.dp_replicate_size else "dp_shard_size"
            message = f"makes {replicas} replicas, but strategy {p.strategy} has no replicas"
            yield Conflict(
                fields, Problem(message, f"parallelism.{key}", "set parallelism.strategy: hsdp, or remove this key")
            )
        replicas = replicas or job.num_nodes
        if p.strategy == "hsdp" and (replicas < 2 or data // replicas < 2 or data % replicas):
            message = f"is hsdp, which needs two replicas of two shards at least: the job has {data} processes, "
            hint = "set parallelism.dp_replicate_size, or parallelism.strategy: fsdp"
            message += f"and {replicas} replicas"
            yield Conflict(fields, Problem(message, "parallelism.strategy", hint))
    if p.accelerate_config or ("strategy" in p.model_fields_set and p.strategy != "none"):
        said = "accelerate_config" if p.accelerate_config else "strategy"
        for path, option in _own_strategies(job):
            message = f"{option} conflicts with parallelism.{said}, which sets the same value"
            yield Conflict(("parallelism", path), Problem(message, path, "remove one of the two"))


def _own_strategies(job: JobModel) -> Iterator[tuple[str, str]]:
    """Yield the arguments by which the Trainer and DeepSpeed take a strategy: field, option."""
    names = ("fsdp", "fsdp_config", "deepspeed", "deepspeed_config")
    for name, value in job.hyperparameters.items():
        if name.replace("-", "_") in names and value not in (None, False, "", [], {}):
            yield "hyperparameters", name
    for number, word in enumerate(job.args, 1):
        option, equals, value = word.partition("=")
        empty = not value if equals else job.args[number : number + 1] == [""]
        if option.startswith("--") and option[2:].replace("-", "_") in names and not empty:
            yield "args", option


def _entry(job: JobModel) -> Iterator[Conflict]:
    """Yield what is wrong with what is to run: nothing, several things, or keys that it cannot take."""
    entries = [name for name in ("entrypoint", "run", "trainer") if getattr(job, name) not in (None, False)]
    if not entries:
        hint = "entrypoint: train.py, run: for shell text, or trainer: true for the shared trainer"
        yield Conflict(
            ("entrypoint", "run", "trainer"),
            Problem("is missing: the job does not say what to run", "entrypoint", hint),
        )
    for name in entries[1:]:
        yield Conflict(tuple(entries), Problem(f"cannot be combined with {entries[0]}", name, "keep one of them"))
    if job.run is not None:
        if not job.run.strip():
            yield Conflict(("run",), Problem("is empty", "run", "write shell text"))
        for name in ("hyperparameters", "args", "resume_args"):
            if getattr(job, name):
                hint = 'write them into the text, or entrypoint: ["bash", "run.sh"]'
                yield Conflict(("run", name), Problem("is not passed to a script: run is shell text", name, hint))
    if job.ray:
        yield from _ray(job)
    elif job.form != "script" and (job.processes_per_node or 1) > 1:
        message = f"is {job.processes_per_node}, but a command runs once per node and starts its own processes"
        yield Conflict(("entrypoint", "run", "processes_per_node"), Problem(message, "processes_per_node", "remove it"))
    if job.distributed_env != "auto" and job.form != "script":
        message = "works for scripts only: a command or run sets the variables of its own processes"
        yield Conflict(("distributed_env", "entrypoint", "run"), Problem(message, "distributed_env", "remove it"))
    if job.compat and job.form == "script" and entries:
        hint = "write run:, or entrypoint as a list"
        yield Conflict(
            ("compat", "entrypoint", "run"),
            Problem("works only for a command or run, which run once per node", "compat", hint),
        )
    if job.compat == "sbatch" and job.run is None:
        yield Conflict(
            ("compat", "entrypoint", "run"), Problem("is sbatch, which runs a run text", "compat", "write run:")
        )
    if job.resume_args and job.trainer:
        yield Conflict(("resume_args", "trainer"), Problem("is not needed: the shared trainer resumes", "resume_args"))


def _placeholders(job: JobModel) -> Iterator[Conflict]:
    """Yield placeholders of inputs that the job does not have."""
    texts = {f"env.{name}": [value] for name, value in job.env.items()}
    if job.run is None:
        texts |= {"args": job.args, "resume_args": job.resume_args, "hyperparameters": job.argv()[1:]}
    asked: set[str] = set()
    for path, values in texts.items():
        for name in {name for value in values for name in placeholders.inputs(value)} - job.inputs.keys() - asked:
            asked.add(name)
            field = path.partition(".")[0]
            hint = f"{{{{input:{name}}}}} is the literal text"
            message = f"uses {{input:{name}}}, but the job has no such input"
            yield Conflict((field, "inputs"), Problem(message, path, hint))


def _ray(job: JobModel) -> Iterator[Conflict]:
    """Yield what cannot be combined with Ray, which starts the processes."""
    for key, given in (
        ("run", job.run is not None), ("trainer", job.trainer), ("processes_per_node", (job.processes_per_node or 1) > 1)
    ):  # fmt: skip
        if given:
            hint = "write entrypoint: [bash, script.sh]" if key == "run" else "remove it"
            yield Conflict(("ray", key), Problem("cannot be combined with ray: true", key, hint))


def find_keys(job: JobModel) -> list[Problem]:
    """Return a problem, without the value, for each value of a job that looks like a credential.

    A plan, a request and the history would hold it as plain text. `allow_secrets` allows env.NAME, args and the like.
    """
    from cloudtrain.source.ignore import matches

    own = services(job) if job.roles else ()
    programs = [("", job), *((f"roles.{name}.", program(job, name)) for name in own)]
    return [
        Problem(f"looks like a credential: {kind}", before + path, _hint(path))
        for before, one in programs
        for path, text in _texts(one)
        if (kind := _credential_kind(path, text)) and not matches(job.allow_secrets, path.partition("[")[0])
    ]


def _credential_kind(path: str, text: str) -> str:
    from cloudtrain.source.secrets import named_value, search, url_password

    if kinds := search(text.encode("utf-8", "surrogateescape")):
        return kinds[0][1]
    name, _, value = text.partition("=")
    return url_password(text) or (named_value(name, value) if path.startswith("env.") else "")


def _texts(job: JobModel) -> Iterator[tuple[str, str]]:
    """Yield what goes to the ranks with its path; some credentials are known by the name before them."""
    for section in ("env", "hyperparameters"):
        yield from ((f"{section}.{name}", f"{name}={value}") for name, value in getattr(job, section).items())
    for section in ("entrypoint", "args", "resume_args"):
        option = ""
        for number, word in enumerate(words if isinstance(words := getattr(job, section), list) else ()):
            yield f"{section}[{number}]", f"{option}={word}" if option else word
            option = word if word.startswith("--") and "=" not in word else ""
    yield from (("run", job.run or ""), ("setup", job.setup or ""))


def _hint(path: str) -> str:
    section, _, name = path.partition("[")[0].partition(".")
    secret = (
        f"secrets.{name}: env:{name}" if section == "env" else "secrets: {NAME: env:NAME}, read from the environment"
    )
    return f"write {secret}; allow_secrets: [{path.partition('[')[0]}] to allow it"


_PRICES = {"usd_per_hour", "priced_as"}  # keys of `resources` that no platform reads
# Keys that cloudtrain itself carries out where a platform does not.
SHARED_KEYS = ("limits.max_runtime", "limits.max_wait", "retry.max_attempts")
# What messages call a key; others are called as a job file writes them.
_WORDS = {
    "num_nodes": "more than one node",
    "min_nodes": "fewer nodes than asked for (min_nodes)",
    "image": "container images (image)",
    "resources.use_spot": "spot capacity (resources.use_spot)",
    "resources.instance_type": "instance types (resources.instance_type)",
    "retry.by": "restarts by the platform (retry.by: cluster)",
    "roles.resources": "other machines for each role (roles.NAME.resources)",
    "roles.image": "another image for a role (roles.NAME.image)",
    "roles.colocate": "several roles on one node (roles.NAME.colocate)",
    "secrets.env": "secrets from the client's environment (env:NAME)",
    "secrets.file": "secrets from a file on the node (file:PATH)",
    "secrets.k8s": "secrets of a Kubernetes cluster (k8s:SECRET/KEY)",
}


def describe_key(key: str) -> str:
    """Return what a message calls a key."""
    return _WORDS.get(key, key)


def platform_keys() -> list[str]:
    """Return all platform keys, in the order of the job file."""
    from cloudtrain.job.sections import Resources

    resources = [f"resources.{name}" for name in Resources.model_fields if name not in _PRICES]
    return [
        "num_nodes",
        "min_nodes",
        "image",
        *resources,
        "roles.resources",
        "roles.image",
        "roles.colocate",
        "retry.by",
        "secrets.env",
        "secrets.file",
        "secrets.k8s",
    ]


def keys_in_use(job: JobModel) -> list[str]:
    """Return the platform keys that a job uses."""
    sources = {source.partition(":")[0] for secret in job.secrets.values() for source in secret}
    only_k8s = any(all(source.startswith("k8s:") for source in secret) for secret in job.secrets.values())
    used = {
        "num_nodes": job.num_nodes > 1,
        "min_nodes": job.min_nodes is not None,
        "image": job.image is not None,
        "resources.accelerators": job.resources.gpus > 0,  # "0" hides those that are there
        "retry.by": job.retry.by != "client",
        "roles.resources": any(r.resources not in (None, job.resources) for r in job.roles.values()),
        "roles.image": any(r.image not in (None, job.image) for r in job.roles.values()),
        "roles.colocate": any(r.colocate for r in job.roles.values()),
        "secrets.env": "env" in sources,
        "secrets.file": "file" in sources,
        "secrets.k8s": only_k8s,
    }
    for name, field in type(job.resources).model_fields.items():
        if name not in _PRICES:
            used.setdefault(f"resources.{name}", getattr(job.resources, name) != field.default)
    return [key for key, uses in used.items() if uses]
