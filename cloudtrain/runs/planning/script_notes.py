"""What the text of a script says about a plan: what the script expects, and what a person should know before a submit."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import registry
from cloudtrain.backends.api import Paths
from cloudtrain.backends.notes import Fact, without
from cloudtrain.job import launchers, placeholders
from cloudtrain.runs.planning import resume_check, strategy_check
from cloudtrain.source import options, world
from cloudtrain.source.node_code import IN_MEMORY
from cloudtrain.source.texts import mentions

if TYPE_CHECKING:
    from cloudtrain.backends.api import Plan
    from cloudtrain.job.job import Job
    from cloudtrain.source.texts import Texts

# In quotes, or as a shell's variable; not the SM_80 of a compiler's option.
_SM = re.compile(r"""["'${]SM_(?:[A-Z]\w*|(?=["']))""")
_AIP = re.compile(r"""["'${]AIP_(?:[A-Z]\w*|(?=["']))""")
# Libraries and programs that use a GPU.
_GPU = re.compile(
    r"\b(torch(run)?|accelerate|transformers|tensorflow|keras|jax|flax|lightning|deepspeed|cupy|vllm|numba|xgboost|lightgbm"
    r"|cuda|nvidia|gpus?)\b",
    re.IGNORECASE,
)
# What reads checkpoint.keep: the variable, or the context of cloudtrain_runtime.
_KEEP = re.compile(r"\b(CLOUDTRAIN_CHECKPOINT_KEEP|checkpoint_keep)\b")
# What joins processes, or tells them apart: a script with none of it runs alike in each of them.
_JOINS = re.compile(
    r"\b(distributed|init_process_group|accelerate|Accelerator|\w*Trainer|deepspeed|lightning|fabric|horovod|mpi4py|ray|jax"
    r"|flax|tensorflow|transformers|trl|composer|colossalai|megatron|\w*RANK|\w*WORLD_SIZE|MASTER_ADDR|cloudtrain_runtime"
    r"|SLURM_\w+)\b"
)
# Options and variables that name a folder for results; a path of a model or of data may be absolute.
_RESULTS = (
    r"(?:output|out|save|results?|logging)[_-]?(?:dir|path|folder)|(?:checkpoint|ckpt)s?[_-]?(?:dir|folder)|output"
)
_RESULTS_NAME = re.compile(_RESULTS)
_ELSEWHERE = re.compile(r"/opt/ml/|/dev/null")  # what needs no note
_RESULTS_DEFAULT = re.compile(
    rf"""\b(?:{_RESULTS})["']?(?:,[^()\n]{{0,200}}default)?\s{{0,4}}=\s{{0,4}}["'](?:/|~)[^"'\n]{{0,200}}["']"""
)
_OPT_ML = re.compile(r"(?m)^(?![^\n]*SM_[A-Z])(?![^\S\n]*#)[^\n]*/opt/ml/\w")


def fit(job: Job, texts: Texts, backend: str) -> tuple[Job, list[str]]:
    """Return the job with what its script needs though nothing in the job says so, and notes on that."""
    changes: dict[str, Any] = {}
    notes: list[str] = []
    if job.trainer:
        return job, notes
    if not job.has_rank_env and texts.find(world.HINT):
        if why := world.why_needed(texts, job.env.get("PYTHONPATH", "").split(":")):
            changes["distributed_env"] = "always"
            notes.append(
                f"one process: RANK, WORLD_SIZE and MASTER_ADDR are set anyway, because {why} (distributed_env)"
            )
        elif other := world.first_need(texts):
            notes.append(f"{other}, but {texts.entry} does not load that file")
    own = registry.traits(backend).script_variables  # the platform sets them anyway
    if job.sm_env is None and own != "sm_env" and (found := texts.find(_SM)):
        changes["sm_env"] = True
        notes.append(
            f"{found.place} reads {found.text[1:]}: the SM_ variables are set, with the run's folders (sm_env)"
        )
    if job.aip_env is None and own != "aip_env" and (found := texts.find(_AIP)):
        changes["aip_env"] = True
        notes.append(
            f"{found.place} reads {found.text[1:]}: the AIP_ variables are set, with the run's folders (aip_env)"
        )
    if own != "sm_env" and (found := texts.find(_OPT_ML)):
        hint = "read SM_MODEL_DIR and similar variables, or pass {model_dir}"
        notes.append(f"{found.place} names a path below /opt/ml, which only SageMaker has: {hint}")
    return job.model_copy(update=changes), notes


def of_backend(job: Job, plan: Plan, texts: Texts) -> list[str]:
    """Return the notes of a backend's plan; the one on a job without GPUs only where its script could use a GPU."""
    gpus_meant = (
        job.trainer or _GPU.search(job.run or " ".join(job.argv())) or texts.find(_GPU, (".py", ".sh", ".yaml"))
    )
    return list(plan.notes) if gpus_meant else without(plan.notes, Fact.NO_GPUS)


def notes(job: Job, plan: Plan, texts: Texts) -> list[str]:
    """Return what a person should know of a planned job."""
    found = []
    if job.compat == "skypilot":
        found.append("compat: skypilot: run and setup continue after a command that fails, as in SkyPilot")
    elif job.compat == "dstack":
        found.append("compat: dstack: a pipeline in run or setup fails only where its last command does, as in dstack")
    if plan.manifest.get("rank_env") is False:
        found.append(
            "one process: RANK, WORLD_SIZE and MASTER_ADDR are not set, as with plain python (distributed_env: always sets them)"
        )
    if job.form != "script":
        found.append("it runs once per node and may start its own processes, so only the number of nodes is checked")
        if mismatch := launchers.nodes_note(job.run or " ".join(job.argv()), job.num_nodes, is_text=bool(job.run)):
            found.append(mismatch)
        gpus = int(plan.manifest.get("gpus_per_node") or 0)
        if idle := launchers.gpus_note(job.run or " ".join(job.argv()), gpus, job.num_nodes):
            found.append(idle)
        if not gpus and "ACCELERATE_USE_CPU" not in job.env:
            separate = launchers.cpu_note(job.run or " ".join(job.argv()), lambda name: _accelerate_file(texts, name))
            found += [separate] if separate else []
    elif idle := _idle_note(job, plan):
        found.append(idle)
    if job.form == "script" and not job.trainer:
        found += _copies_notes(job, plan, texts)
        found += _style_notes(job, options.declared(texts)) if job.hyperparameters or job.args else []
    found += _keep_notes(job, texts)
    found += _outside_notes(job, texts, plan.backend)
    if job.keep_limit and job.keep != "auto":
        found.append("keep_limit has no effect: it limits keep: auto only")
    for key, text in (("run", job.run), ("setup", job.setup)):
        if text and (name := next(placeholders.names(text), "")):
            found.append(f"{key} is never changed: {{{name}}} arrives as it is; write {placeholders.variable(name)}")
    if not job.source.startswith("git+"):
        words = [*job.argv()[1:], *job.env.values()] if job.form != "shell" else []
        found += mentions(texts, words)
    if job.retry.max_attempts > 1 and not job.trainer and not job.resume_args:  # the shared trainer resumes
        found += [warning] if (warning := resume_check.note(job, texts)) else []
    return found


def _accelerate_file(texts: Texts, name: str) -> dict[str, Any]:
    """Return what an Accelerate file of the source holds; empty where it cannot be read."""
    try:
        return strategy_check.read_config((texts.root / name).read_text("utf-8"))
    except (OSError, ValueError):
        return {}


def _idle_note(job: Job, plan: Plan) -> str:
    """Return a note where a node has more GPUs than ranks; "" where it does not."""
    ranks, gpus = int(plan.manifest["processes_per_node"]), int(plan.manifest.get("gpus_per_node") or 0)
    if ranks >= gpus:
        return ""
    condition = "" if job.trainer else ", unless a process itself uses several"
    return (
        f"{ranks} process{'es' * (ranks != 1)} on the {gpus} GPUs of a node: {gpus - ranks} of them"
        f" {'is' if gpus - ranks == 1 else 'are'} idle{condition}; remove processes_per_node to start one for each GPU"
    )


def _keep_notes(job: Job, texts: Texts) -> list[str]:
    """Return the note on a number of checkpoints to keep that nothing in the source reads."""
    keep, usual = job.checkpoint.keep, type(job.checkpoint).model_fields["keep"].default
    if keep == usual or job.trainer or job.entrypoint == IN_MEMORY or not texts.complete:
        return []
    if texts.find(_KEEP) or _KEEP.search(job.run or " ".join(job.argv())):
        return []
    return [
        f"checkpoint.keep is {keep}, but nothing in the source reads it: only the shared trainer deletes its older"
        " checkpoints; a script reads CLOUDTRAIN_CHECKPOINT_KEEP and deletes its own"
    ]


def _outside_notes(job: Job, texts: Texts, backend: str) -> list[str]:
    """Return the notes on results that cannot come home: folders outside of the script's own, but on this machine."""
    if job.trainer or job.form == "shell" or (traits := registry.traits(backend)).in_place:
        return []
    given = [(f"--{name}", str(value)) for name, value in job.hyperparameters.items()]
    for word, following in pairwise([*job.argv()[1:], ""]):
        name, equals, value = word.partition("=")
        given.append((name, value if equals else following))
    found = {
        f"{name} {value}": f"{name} out"
        for name, value in given
        if value.startswith(("/", "~")) and _RESULTS_NAME.fullmatch(name.lstrip("-").rpartition(".")[2])
    }
    named = {name.lstrip("-").replace("-", "_") for name, _ in given}
    match = texts.find(_RESULTS_DEFAULT, (".py",))
    if match and (option := _RESULTS_NAME.match(match.text)) and option[0] not in named:
        folder = re.split(r"[\"']", match.text)[-2]
        found[f"{match.place}: {option[0]} {folder}"] = "a relative path, such as out"
    own_disks = traits.own_machines and traits.paths is Paths.NODES
    again = "finds them only on a disk that all nodes share" if own_disks else "does not find them"
    lost = f"is outside of the script's folder: its files are not copied back, and the next attempt {again}"
    return [f"{what} {lost}; write {instead}" for what, instead in found.items() if not _ELSEWHERE.search(what)]


def _copies_notes(job: Job, plan: Plan, texts: Texts) -> list[str]:
    """Return the note on ranks that nothing in the source joins; a package that the script imports may still do so."""
    count = int(plan.manifest["nodes"]) * int(plan.manifest["processes_per_node"])
    if count == 1 or not texts.entry.endswith(".py") or job.parallelism.strategy not in ("none", "ddp"):
        return []
    if texts.find(_JOINS, (".py",)) or not texts.complete:
        return []
    return [
        f"{count} copies of {texts.entry} run independently: no file of the source forms a process group, as"
        " torch.distributed and accelerate do"
    ]


def _style_notes(job: Job, declared: options.Options) -> list[str]:
    """Return what the script would misread of the booleans that a job gives; nothing is changed by itself."""
    hf = job.arg_style == "hf"
    given = {name: value for name, value in job.hyperparameters.items() if isinstance(value, bool)}
    words = [*job.args, "--"]
    pairs = pairwise(words)
    bare = [word[2:] for word, following in pairs if word.startswith("--") and following.startswith("--")]
    found = []
    if job.arg_style != "hydra":
        bare += [name for name, value in given.items() if value and not hf]
        for name in bare:
            if (option := declared.by_name.get(name)) and option.takes_value:
                found.append(
                    f"--{name} has no value, but {option.place} needs one: set arg_style: hf to pass --{name} true"
                )
    for name, value in given.items():
        option = declared.by_name.get(name)
        if hf and option and not option.takes_value:
            text = str(value).lower()
            found.append(
                f"--{name} {text} is given, and {option.place} takes no value: set arg_style: argparse to pass --{name} alone"
            )
        elif job.arg_style == "argparse" and not value and declared.hf_parser:
            found.append(
                f"--{name} false is left out, and {declared.hf_parser} may have another default: set arg_style: hf to pass false"
            )
    return found
