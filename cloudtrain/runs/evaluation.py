"""Submit the evaluation of a run's model: a job of its own, which reads that model by an input that names the run.

Its source is made here: the file of data, the tasks' folder and the requirements. What runs is entrypoints/evaluate_model.py;
its results reach the evaluated run through history/evaluations.py.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import BadRequest
from cloudtrain.history.evaluations import LABEL, last_step
from cloudtrain.job.problems import fit_name
from cloudtrain.runs.sending.exactly_once import ExactlyOnce, Submitted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cloudtrain.backends.plan import Plan
    from cloudtrain.history.store import Store
    from cloudtrain.runs.planning.budgets import Confirm

ENTRY = ".cloudtrain/evaluate_model.py"
HARNESS = "lm-eval==0.4.13"  # https://pypi.org/project/lm-eval/, 2026-11-25
ADAPTER = "adapter_config.json"
TOKENIZER = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece")  # as in entrypoints/trainer/saved.py
_SAME = ("options", "image", "resources", "output", "env")  # of the evaluated run's job, on its own target
_ALLOWED = ("allow_secrets", "allow_large", "allow_pointers")
# Of the shared trainer's hyperparameters, those that say how data is read.
_READ = ("task", "block_size", "text_column", "messages_column", "label_column")


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated; see `Run.evaluate`."""

    data: str | None = None
    tasks: tuple[str, ...] = ()
    include_path: str | None = None
    prompts: tuple[str, ...] = ()
    every_checkpoint: bool = False
    limit: int | None = None


def submit_evaluation(
    store: Store,
    run_id: str,
    evaluation: Evaluation,
    *,
    target: str | None = None,
    sets: Sequence[str] = (),
    key: str | None = None,
    watch: bool = True,
    confirm: Confirm | None = None,
    force: bool = False,
) -> tuple[Submitted, list[str]]:
    """Submit the evaluation of a run and return it with notes; blocking. Raises BadRequest for what cannot be evaluated."""
    _check(evaluation)
    with tempfile.TemporaryDirectory(prefix=".eval-", dir=store.home) as folder:
        job = make_job(store, run_id, evaluation, Path(folder), target)
        submitter = ExactlyOnce(job["target"], home=store.home, watch=watch, confirm=confirm, force=force)
        plan, bundle = submitter.plan_job(job, sets, key)
        check_model(plan)
        sent = submitter.adopt_interrupted(plan, key, adopt=False)
        sent = sent or submitter.send_once(plan, bundle, key=key, parent=run_id)
    waits = [f"{run_id} has not ended yet: it is evaluated once it has SUCCEEDED"] if "after" in job else []
    return sent, [*submitter.notes, *waits]


def make_job(store: Store, run_id: str, evaluation: Evaluation, source: Path, target: str | None) -> dict[str, Any]:
    """Return the job that evaluates a run, and write its source into a folder."""
    record, trained = store.find(run_id), store.attempts(run_id)[-1].plan
    own = trained.target or trained.backend
    given: dict[str, Any] = {}
    inputs: dict[str, Any] = {"model": {"run": record.run_id, "what": "model"}}
    if evaluation.every_checkpoint:
        inputs["checkpoints"] = {"run": record.run_id, "what": "checkpoints"}
        given["checkpoints"] = "input:checkpoints"
    if record.status.state.final:
        given["step"] = last_step(store, run_id)
    hyperparameters = trained.job.get("hyperparameters") or {}
    named = str(hyperparameters.get("model") or "")
    base, _, below = named.removeprefix("input:").partition("/")
    if hyperparameters.get("use_peft") and named.startswith("input:"):
        inputs["base"] = {
            name: value for name, value in trained.job["inputs"][base].items() if name != "sha256" and value
        }
        if "run" in inputs["base"]:
            inputs["base"].pop("uri", None)
        given["base"] = f"input:base/{below}".rstrip("/")
    elif hyperparameters.get("use_peft") and hyperparameters.get("merge_adapter") is not True:
        given |= _copy_base(named, trained, store, source)
    if trained.job.get("trainer"):
        given |= {name: hyperparameters[name] for name in _READ if name in hyperparameters}
    _stage(evaluation, source, inputs, given)
    job: dict[str, Any] = {
        "name": fit_name(f"eval-{record.name}"),
        "source": os.fspath(source),
        "entrypoint": ENTRY,
        "hyperparameters": given,
        "inputs": inputs,
        "processes_per_node": 1,
        "labels": {LABEL: record.run_id},
        "metrics": "off",  # its results are those of the evaluated run
        "target": target or own,
    }
    if not record.status.state.final:
        job["after"] = [record.run_id]
    if "base" in given and "base" not in inputs:  # its files are those of the training's source
        job |= {name: trained.job[name] for name in _ALLOWED if trained.job.get(name)}
    if target in (None, own):
        job |= {name: trained.job[name] for name in _SAME if trained.job.get(name)}
    elif trained.job.get("env"):
        job["env"] = trained.job["env"]
    if token := (trained.job.get("secrets") or {}).get("HF_TOKEN"):
        job["secrets"] = {"HF_TOKEN": token}
    return job


def check_model(plan: Plan) -> None:
    """Raise BadRequest where the folder of the model can be read here and holds none that can be evaluated."""
    place = plan.job["inputs"]["model"]
    folder = Path(place["uri"])
    # No digest: the run has not ended, and its model may not be whole yet. The job itself refuses what it cannot read.
    if not place.get("sha256") or "://" in place["uri"] or not folder.is_dir():
        return
    names = sorted(path.name for path in folder.iterdir())
    problem = ""
    if ADAPTER not in names and "config.json" not in names:
        problem = f"is not a folder of transformers: neither config.json nor {ADAPTER} is in it"
    elif ADAPTER not in names and not any(name.startswith(TOKENIZER) for name in names):
        problem = "has no tokenizer"
    if problem:
        hint = "save model and tokenizer with save_pretrained in the folder that CLOUDTRAIN_MODEL_DIR names"
        raise BadRequest(f"the model of {place['run']} {problem}; it has {', '.join(names[:5])} ({folder})", hint)


def _check(evaluation: Evaluation) -> None:
    if not (evaluation.data or evaluation.tasks or evaluation.prompts):
        raise BadRequest("there is nothing to evaluate", "name a file (--data), tasks (--tasks) or a prompt (--prompt)")
    if evaluation.data and "://" not in evaluation.data and not Path(evaluation.data).is_file():
        raise BadRequest(
            f"the data file {evaluation.data} does not exist on this machine", "--data takes a file, or a URI of one"
        )
    if evaluation.include_path and not Path(evaluation.include_path).is_dir():
        raise BadRequest(
            f"{evaluation.include_path} is not a folder on this machine", "--include-path takes a folder of YAML files"
        )
    if evaluation.include_path and not evaluation.tasks:
        raise BadRequest("--include-path works only together with --tasks", "--tasks NAME")


def _copy_base(model: str, trained: Plan, store: Store, source: Path) -> dict[str, str]:
    """Copy an adapter's base model out of the packaged source of its training; return its flag, {} if it is not in there."""
    from cloudtrain.source.bundle import Bundle

    folder = os.path.normpath(model)
    bundle = Bundle.stored(store.home / "bundles", str(trained.bundle.get("sha256")))
    # A link to a folder is a file of the bundle.
    if bundle is None or not any(file.path == folder or file.path.startswith(f"{folder}/") for file in bundle.files):
        return {}
    with tempfile.TemporaryDirectory(prefix=".eval-", dir=store.home) as place:
        bundle.extract(Path(place, "source"))
        if not (base := Path(place, "source", folder)).is_dir():
            return {}
        shutil.copytree(base, source / folder)
    return {"base": folder}


def _stage(evaluation: Evaluation, source: Path, inputs: dict[str, Any], given: dict[str, Any]) -> None:
    """Write what goes with the job into its source, and name it in its inputs and hyperparameters."""
    if evaluation.data and "://" in evaluation.data:
        inputs["data"] = {"uri": evaluation.data}
        given |= {"data": "input:data", "name": Path(evaluation.data).stem}
    elif evaluation.data:
        file = Path(evaluation.data)
        (source / "data").mkdir(exist_ok=True)
        shutil.copyfile(file, source / "data" / file.name)
        given["data"] = f"data/{file.name}"
    if evaluation.tasks:
        given["tasks"] = list(evaluation.tasks)
        (source / "requirements.txt").write_text(f"{HARNESS}\n")
    if evaluation.include_path:
        folder = Path(evaluation.include_path).resolve()
        here = Path.cwd().resolve()
        # Tasks name their files relative to the working directory: the folder keeps its place in it.
        inside = folder.is_relative_to(here) and folder != here
        name = folder.relative_to(here) if inside else Path("tasks")
        shutil.copytree(folder, source / name, dirs_exist_ok=True)
        given["include_path"] = name.as_posix()
    if evaluation.prompts:
        given["prompt"] = list(evaluation.prompts)
    if evaluation.limit is not None:
        given["limit"] = evaluation.limit
    if not any(source.iterdir()):
        (source / "evaluation.json").write_text(json.dumps(given) + "\n")
