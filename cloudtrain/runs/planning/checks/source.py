"""Checks that read the text of the source's files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from cloudtrain.backends import registry
from cloudtrain.backends.api import Paths
from cloudtrain.backends.notes import Fact, without
from cloudtrain.job import sbatch
from cloudtrain.source import options
from cloudtrain.source.node_code import IN_MEMORY
from cloudtrain.source.texts import mentions

if TYPE_CHECKING:
    from cloudtrain.runs.planning.checks.case import Case

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
# Our own folder and functions, and what the Trainer, Accelerate, DeepSpeed, Lightning, fairseq and hand-written loops call
# it. Rather too many than too few: no warning about a script that does resume.
_RESUMES = re.compile(
    r"CHECKPOINT_DIR|cloudtrain_runtime|resum|restor|load_state|torch\.load|CheckpointManager|distributed\.checkpoint"
    r"|(?:load|last|latest|newest|find|read)_?(?:checkpoint|ckpt|snapshot)|(?:checkpoint|ckpt|snapshot)_?(?:path|dir|file)",
    re.IGNORECASE,
)


def results_outside(case: Case) -> Iterator[str]:
    """Name results that cannot come home: in folders outside of the script's own, but on this machine."""
    job, texts, traits = case.job, case.source, registry.traits(case.plan.backend)
    if job.trainer or job.form == "shell" or traits.in_place:
        return
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
    yield from (f"{what} {lost}; write {instead}" for what, instead in found.items() if not _ELSEWHERE.search(what))


def unread_directives(case: Case) -> Iterator[str]:
    """Name scripts that the job starts, and whose #SBATCH lines nothing reads."""
    words = re.split(r"[\s;&|()]+", case.job.run) if case.job.run else case.job.argv()
    names = {word.removeprefix("./") for word in words if word.endswith((".sh", ".sbatch", ".slurm"))}
    for name in sorted(names & case.source.names):
        if sbatch.is_batch_script(case.source.read(name)):
            yield f"{name} has #SBATCH lines, which have no effect here: submit that file itself (cloudtrain submit {name})"


def no_resume(case: Case) -> Iterator[str]:
    """Say where a script of the user's own gets several attempts, though it cannot resume, as far as can be seen."""
    job, texts = case.job, case.source
    if job.retry.max_attempts == 1 or job.trainer or job.resume_args:
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
    count = int(plan.manifest["nodes"]) * int(plan.manifest["processes_per_node"])
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
    """Say what the script would misread of the booleans that a job gives; nothing is changed by itself."""
    job = case.job
    if job.form != "script" or job.trainer or not (job.hyperparameters or job.args):
        return
    declared = options.declared(case.source)
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


def unread_keep(case: Case) -> Iterator[str]:
    """Say where nothing in the source reads how many checkpoints to keep."""
    job, texts = case.job, case.source
    keep, usual = job.checkpoint.keep, type(job.checkpoint).model_fields["keep"].default
    if keep == usual or job.trainer or job.entrypoint == IN_MEMORY or _KEEP.search(case.command):
        return
    if texts.complete and not texts.find(_KEEP):
        yield (
            f"checkpoint.keep is {keep}, but nothing in the source reads it: only the shared trainer deletes its older"
            " checkpoints; a script reads CLOUDTRAIN_CHECKPOINT_KEEP and deletes its own"
        )
