"""Checks that read the text of the source's files, and what a script needs though nothing in its job says so.

Accelerate does not report a strategy that it cannot carry out: without GPUs, or in a script that does not use it, ranks
train plain data parallel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import registry
from cloudtrain.backends.api import Paths
from cloudtrain.backends.plan import Fact, without
from cloudtrain.errors import Problem
from cloudtrain.job import launchers
from cloudtrain.job.units import format_size, size_bytes
from cloudtrain.source import options, world
from cloudtrain.source.node_code import CALL, IN_MEMORY, module
from cloudtrain.source.texts import mentions

if TYPE_CHECKING:
    from cloudtrain.job.job import Job
    from cloudtrain.runs.planning.checks.job import Case
    from cloudtrain.source.texts import Texts

# Options and variables that name a folder for results; a path of a model or of data may be absolute.
_RESULTS = (
    r"(?:output|out|save|results?|logging)[_-]?(?:dir|path|folder)|(?:checkpoint|ckpt)s?[_-]?(?:dir|folder)|output"
)
_RESULTS_NAME = re.compile(_RESULTS)
_ELSEWHERE = re.compile(r"/opt/ml/|/dev/null")  # what needs no note
_RESULTS_DEFAULT = re.compile(
    rf"""\b(?:{_RESULTS})["']?(?:,[^()\n]{{0,200}}default)?\s{{0,4}}=\s{{0,4}}["'](?:/|~)[^"'\n]{{0,200}}["']"""
)
_MODEL = re.compile(r"(?:pretrained_)?(?:base_)?model(?:_name)?(?:_or_path|_id)?")
_ADAPTERS = re.compile(r"\b(?:peft|LoraConfig)\b")  # of a model only they are saved
# In quotes, or as a shell's variable; not the SM_80 of a compiler's option.
_SM = re.compile(r"""["'${]SM_(?:[A-Z]\w*|(?=["']))""")
_AIP = re.compile(r"""["'${]AIP_(?:[A-Z]\w*|(?=["']))""")
_OPT_ML = re.compile(r"(?m)^(?![^\n]*SM_[A-Z])(?![^\S\n]*#)[^\n]*/opt/ml/\w")
KEEP_LIMIT = "20GB"  # entrypoints/launcher/output/keep_choice.py
WEIGHT_BYTES, STATE_BYTES = 2, 12  # of a parameter: in 16 bits, and in 32 bits with the two moments of Adam
# Libraries and programs that use a GPU.
_GPU = re.compile(
    r"\b(torch(run)?|accelerate|transformers|tensorflow|keras|jax|flax|lightning|deepspeed|cupy|vllm|numba|xgboost|lightgbm"
    r"|cuda|nvidia|gpus?)\b",
    re.IGNORECASE,
)
# What reads checkpoint.keep: the variable, or the context of cloudtrain_runtime.
_KEEP = re.compile(r"\b(CLOUDTRAIN_CHECKPOINT_KEEP|checkpoint_keep|TrainerCheckpoints)\b")
_TRAINERS = re.compile(r"\b(?:transformers|trl)\b")
# What joins processes, or tells them apart: a script with none of it runs alike in each of them.
_JOINS = re.compile(
    r"\b(distributed|init_process_group|accelerate|Accelerator|\w*Trainer|deepspeed|lightning|fabric|horovod|mpi4py|ray|jax"
    r"|flax|tensorflow|transformers|trl|composer|colossalai|megatron|\w*RANK|\w*WORLD_SIZE|MASTER_ADDR|cloudtrain_runtime"
    r"|SLURM_\w+)\b"
)
# Our own folder and functions, and what the Trainer, Accelerate, DeepSpeed, Lightning, fairseq and hand-written loops call
# it. Rather too many than too few: no warning about a script that does resume.
_RESUMES = re.compile(
    r"CHECKPOINT_DIR|cloudtrain_runtime|resum|restor|load_state|torch\.load|CheckpointManager|distributed\.checkpoint"
    r"|(?:load|last|latest|newest|find|read)_?(?:checkpoint|ckpt|snapshot)|(?:checkpoint|ckpt|snapshot)_?(?:path|dir|file)",
    re.IGNORECASE,
)
LIBRARIES = re.compile(r"\b(?:accelerate|transformers|trl|deepspeed)\b")


def fit_script(job: Job, texts: Texts, backend: str) -> tuple[Job, list[str]]:
    """Return the job with what its script needs though nothing in the job says so, and notes on that."""
    changes: dict[str, Any] = {}
    notes: list[str] = []
    if job.trainer:
        return job, notes
    folders = job.env.get("PYTHONPATH", "").split(":")
    if not job.has_rank_env and texts.find(world.HINT):
        if why := world.why_needed(texts, folders):
            changes["distributed_env"] = "always"
            notes.append(
                f"one process: RANK, WORLD_SIZE and MASTER_ADDR are set anyway, because {why} (distributed_env)"
            )
        elif other := world.first_need(texts):
            notes.append(f"{other}, but {texts.entry} does not load that file")
    ranks = job.form == "script" and (job.has_rank_env or "distributed_env" in changes)
    framework, importer = world.framework(texts, folders) if ranks and job.distributed_env == "auto" else ("", "")
    if framework:
        changes["distributed_env"] = framework
        notes.append(f"{importer} imports {framework}: {world.FRAMEWORKS[framework]} are set (distributed_env)")
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


def unread_directives(case: Case) -> Iterator[str]:
    """Name scripts that the job starts, and whose #SBATCH lines nothing reads."""
    words = re.split(r"[\s;&|()]+", case.job.run) if case.job.run else case.job.argv()
    names = {word.removeprefix("./") for word in words if not word.endswith((".py", ".yaml", ".yml", ".json"))}
    for name in sorted(names & case.source.names):
        from cloudtrain.job import forms

        if forms.of_text(case.source.read(name)):
            yield f"{name} has #SBATCH lines, which have no effect here: submit that file itself (cloudtrain submit {name})"


def no_resume(case: Case) -> Iterator[str]:
    """Say where a script of the user's own gets several attempts, though it cannot resume, as far as can be seen."""
    job, texts = case.job, case.source
    if job.retry.max_attempts == 1 or job.trainer or job.resume_args or job.entrypoint == CALL or _has_engine(job):
        return
    words = [*job.args, *job.hyperparameters, *job.env]
    if texts.complete and not any(_RESUMES.search(text) for text in (" ".join(words), *texts.files.values())):
        yield (
            f"{job.retry.max_attempts} attempts, but no code in the source seems to load a checkpoint, "
            "so each would start from the beginning; "
            "save in $CLOUDTRAIN_CHECKPOINT_DIR and load from it, or set retry.max_attempts to 1"
        )


def not_sent(case: Case) -> Iterator[str]:
    """Name files that the source or the command names, and that are not packaged."""
    job = case.job
    if not job.source.startswith("git+"):
        yield from mentions(case.source, [*job.argv()[1:], *job.env.values()] if job.form != "shell" else [])


def copies(case: Case) -> Iterator[str]:
    """Say where nothing in the source joins the ranks; a package that the script imports may still do so."""
    job, plan, texts = case.job, case.plan, case.source
    count = plan.main_nodes * int(plan.manifest["processes_per_node"])
    if job.form != "script" or job.trainer or job.parallelism.strategy not in ("none", "ddp"):
        return
    if count == 1 or not texts.entry.endswith(".py") or texts.find(_JOINS, (".py",)) or not texts.complete:
        return
    yield (
        f"{count} copies of {texts.entry} run independently: no file of the source forms a process group, as"
        " torch.distributed and accelerate do"
    )


def of_backend(case: Case) -> Iterator[str]:
    """Pass on a backend's notes; the one on a job without GPUs only where its script could use a GPU."""
    notes = case.plan.notes
    if not (case.job.trainer or _GPU.search(case.command) or case.source.find(_GPU, (".py", ".sh", ".yaml"))):
        yield from without(notes, Fact.NO_GPUS)
    else:
        yield from notes


def arguments(case: Case) -> Iterator[str]:
    """Say what the script would misread of the arguments that a job gives; nothing is changed by itself."""
    job = case.job
    if job.form != "script" or job.trainer or not (job.hyperparameters or job.args):
        return
    declared = options.declared(case.source)
    if declared.hydra and job.arg_style != "hydra" and (name := next(iter(job.hyperparameters), "")):
        yield f"--{name} is given, and {declared.hydra} reads overrides of hydra: set arg_style: hydra to pass {name}=..."
        return
    hf = job.arg_style == "hf"
    given = {name: value for name, value in job.hyperparameters.items() if isinstance(value, bool)}
    pairs = pairwise([*job.args, "--"])
    bare = [word[2:] for word, following in pairs if word.startswith("--") and following.startswith("--")]
    if job.arg_style != "hydra":
        bare += [name for name, value in given.items() if value and not hf]
        for name in bare:
            if (option := declared.by_name.get(name)) and option.takes_value:
                yield f"--{name} has no value, but {option.place} needs one: set arg_style: hf to pass --{name} true"
    for name, value in given.items():
        option = declared.by_name.get(name)
        if hf and option and not option.takes_value:
            text = str(value).lower()
            yield f"--{name} {text} is given, and {option.place} takes no value: set arg_style: argparse to pass --{name} alone"
        elif job.arg_style == "argparse" and not value and declared.hf_parser:
            yield (
                f"--{name} false is left out, and {declared.hf_parser} may have another default: set arg_style: hf to pass false"
            )


def _has_engine(job: Job) -> bool:
    return job.checkpoint.engine == "cloudtrain"


def unused_engine(case: Case) -> Iterator[str]:
    """Say where checkpoint.engine changes nothing: the shared trainer has its own, and other loops need a line of code."""
    job, texts = case.job, case.source
    if not _has_engine(job) or job.entrypoint == CALL:
        return
    if job.trainer or job.entrypoint == IN_MEMORY:
        yield "checkpoint.engine changes nothing: the shared trainer writes its own checkpoints"
    elif texts.complete and job.form == "script" and not texts.find(_TRAINERS):
        yield (
            "checkpoint.engine is cloudtrain, but nothing in the source imports transformers or trl: "
            "other loops save and resume by code of their own"
        )


def unread_keep(case: Case) -> Iterator[str]:
    """Say where nothing in the source reads how many checkpoints to keep."""
    job, texts = case.job, case.source
    if _has_engine(job):
        return
    keep, usual = job.checkpoint.keep, type(job.checkpoint).model_fields["keep"].default
    if keep == usual or job.trainer or job.entrypoint in (CALL, IN_MEMORY) or _KEEP.search(case.command):
        return
    if texts.complete and not texts.find(_KEEP):
        yield (
            f"checkpoint.keep is {keep}, but nothing in the source reads it: only the shared trainer deletes its older"
            " checkpoints; a script reads CLOUDTRAIN_CHECKPOINT_KEEP and deletes its own"
        )


def strategy(case: Case) -> Iterator[str | Problem]:
    """Refuse a strategy that the ranks would not run, and say which keys of an Accelerate file count for nothing."""
    job, texts = case.job, case.source
    file = job.parallelism.accelerate_config
    if not file and job.parallelism.strategy not in module("launcher.prepare.declared").SHARDED:
        return
    config: dict[str, Any] = {}
    if file:
        try:
            config = _read_config(texts, file)
        except (OSError, ValueError) as error:
            message = f"{file} is not a valid Accelerate configuration: {error}"
            yield Problem(message, "parallelism.accelerate_config")
            return
    yield from _find_problems(job, texts, case.gpus, config)
    if replaced := _find_replaced(job, config):
        yield replaced


def separate_trainings(case: Case) -> Iterator[str]:
    """Say where accelerate launch in a command would start separate trainings on CPU."""

    def read(name: str) -> dict[str, Any]:
        try:
            return _read_config(case.source, name)
        except (OSError, ValueError):
            return {}

    if case.job.form != "script" and not case.gpus and "ACCELERATE_USE_CPU" not in case.job.env:
        note = launchers.cpu_note(case.command, read)
        yield from [note] * bool(note)


def _find_problems(job: Job, texts: Texts, gpus: int, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield why a job's strategy would not be what its ranks run.

    Args:
        job: any job; those of the shared trainer have no such problems.
        texts: what the source's files hold.
        gpus: GPUs of a node, as the backend gives them.
        config: what the Accelerate file holds; empty without one.
    """
    strategy: str = job.parallelism.strategy
    path, name = "parallelism.strategy", strategy
    if config:
        path, name = "parallelism.accelerate_config", f"of type {config.get('distributed_type')}"
    sharded = (
        config.get("distributed_type") in ("FSDP", "DEEPSPEED")
        if config
        else strategy in module("launcher.prepare.declared").SHARDED
    )
    if job.trainer or job.entrypoint in (CALL, IN_MEMORY) or not sharded or strategy in _declared(texts):
        return
    if not gpus:
        yield Problem(
            f"is {name}, but the job requests no GPU: without GPUs Accelerate silently uses plain data parallel",
            path,
            "set resources.accelerators, or, to try it on CPU, write parallelism: {strategy: ddp}"
            + (" in place of accelerate_config" if config else ""),
        )
    if not _uses_accelerate(job, texts):
        yield Problem(
            f"is {name}, which needs Accelerate, but no file and no requirement mentions accelerate, transformers, "
            "trl or deepspeed",
            path,
            f"remove it, or, if the script shards the model itself, say so in a comment: # cloudtrain: {strategy}",
        )


def _find_replaced(job: Job, config: Mapping[str, Any]) -> str:
    """Return which keys of an Accelerate file count for nothing, because the job says otherwise; "" for none."""
    ours = {"num_processes": job.world_size, "num_machines": job.main_nodes}
    nested = config.get("deepspeed_config")
    values = {**config, **(nested if isinstance(nested, dict) else {})}
    replaced = []
    for key, usual in module("launcher.prepare.accelerate_keys").WORLD.items():
        value = values.get(key)
        if value not in (None, "", usual, ours.get(key)):
            replaced.append(f"{key} {value}" + (f" (the job's is {ours[key]})" if key in ours else ""))
    if not replaced:
        return ""
    return f"{job.parallelism.accelerate_config}: cloudtrain's own settings replace {', '.join(replaced)}"


def _read_config(texts: Texts, name: str) -> dict[str, Any]:
    """Return what an Accelerate file of the source holds; raises OSError, and ValueError for one that is not a mapping."""
    import yaml

    try:
        config = yaml.safe_load((texts.root / name).read_text("utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(str(error).replace("\n", " ")) from None
    if not isinstance(config, dict) or not config:
        raise ValueError("it has no keys")
    return config


def _uses_accelerate(job: Job, texts: Texts) -> bool:
    """Return whether a file or the job's requirements mention Accelerate or what stands on it; True where not all is read."""
    found = list(texts.files.values())
    if job.environment.requirements:
        found.append((texts.root / job.environment.requirements).read_text("utf-8", "replace"))
    return any(LIBRARIES.search(text) for text in found) or not texts.complete


def _declared(texts: Texts) -> set[str]:
    """Return what the script declares that it does itself."""
    return set(
        re.findall(r"\w+", " ".join(module("launcher.prepare.declared").LINE.findall(texts.files.get(texts.entry, ""))))
    )


def results_outside(case: Case) -> Iterator[str | Problem]:
    """Refuse results that cannot come home: in folders outside of the script's own, but on this machine.

    On machines of the user's own, and below a path that the job's nodes mount, the folder may be on a shared disk; what a
    script has as a default may be unused. These are notes.
    """
    job, texts, traits = case.job, case.source, registry.traits(case.plan.backend)
    if job.trainer or job.form == "shell" or traits.in_place:
        return
    given = _given(job)
    own_disks = traits.own_machines and traits.paths is Paths.NODES
    shared = [
        str(path) for path in (job.output, *(each.uri for each in job.inputs.values()), *_mounts(case.plan.request))
    ]
    lost = "is outside of the script's folder: its files are not copied back, and the next attempt"
    for (name, value), key in given.items():
        option = name.lstrip("-").rpartition(".")[2]
        if not value.startswith(("/", "~")) or not _RESULTS_NAME.fullmatch(option) or _ELSEWHERE.search(value):
            continue
        if own_disks or any(path.startswith("/") and PurePosixPath(value).is_relative_to(path) for path in shared):
            yield f"{name} {value} {lost} finds them only on a disk that all nodes share; write {name} out"
        elif job.keep == "none" or option.startswith("log") or case.plan.attempt > 1:  # a resume changes no argument
            yield f"{name} {value} {lost} does not find them; write {name} out"
        else:
            hint = f"write {name} out, or set keep: none if nothing of it is needed"
            yield Problem(f"{name} {value} {lost} does not find them", key, hint)
    named = {name.lstrip("-").replace("-", "_") for name, _ in given}
    match = texts.find(_RESULTS_DEFAULT, (".py",))
    if match and (default := _RESULTS_NAME.match(match.text)) and default[0] not in named:
        folder = re.split(r"[\"']", match.text)[-2]
        again = "finds them only on a disk that all nodes share" if own_disks else "does not find them"
        if not _ELSEWHERE.search(folder):
            yield f"{match.place}: {default[0]} {folder} {lost} {again}; write a relative path, such as out"


def model_over_limit(case: Case) -> Iterator[str]:
    """Say where checkpoints of a model that the job names are larger than what `keep: auto` copies back."""
    job, texts = case.job, case.source
    if job.trainer or job.form == "shell" or job.keep != "auto":
        return
    limit = size_bytes(job.keep_limit or KEEP_LIMIT)
    named = [value for (name, value), _ in _given(job).items() if _MODEL.fullmatch(name.lstrip("-").replace("-", "_"))]
    names = list(filter(None, dict.fromkeys([job.fit.model] if job.fit.model else named)))
    if not names:
        return
    from cloudtrain.forecast import models  # only here: most jobs name no model

    for name in names:
        if isinstance(shape := models.find(name, texts.root), str):
            continue
        weights, state = shape.parameters * WEIGHT_BYTES, shape.parameters * STATE_BYTES
        if (weights if texts.find(_ADAPTERS, (".py",)) else state) > limit:
            yield (
                f"{name}: its weights are about {format_size(weights)} in 16 bits, a checkpoint with Adam's state about"
                f" {format_size(state)}, and at most {job.keep_limit or KEEP_LIMIT} of a node are copied back: set keep_limit"
            )


def _given(job: Job) -> dict[tuple[str, str], str]:
    """Return the options of a job's script with their values -> the key of the job that has them."""
    given = {(f"--{name}", str(value)): f"hyperparameters.{name}" for name, value in job.hyperparameters.items()}
    for word, following in pairwise([*job.argv()[1:], ""]):
        name, equals, value = word.partition("=")
        given.setdefault((name, value if equals else following), "args")
    return given


def _mounts(request: object) -> Iterator[str]:
    """Yield the paths at which a platform's request mounts volumes."""
    for name, value in request.items() if isinstance(request, Mapping) else ():
        if name in ("mountPath", "mount") and isinstance(value, str):
            yield value
    inner = request.values() if isinstance(request, Mapping) else request if isinstance(request, list) else ()
    for value in inner:
        yield from _mounts(value)
