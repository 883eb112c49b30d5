"""DistributedTraining: a model in memory, trained over nodes through a submitted job.

    from cloudtrain import DistributedTraining

    result = DistributedTraining(target="local").train_distributed(model, data, nodes=3)
    result["final_loss"], result["model"]

Model and data travel in the job's source (entrypoints/trainer/pickled.py says in which form) and are the same on every node. A
transformers model and a `datasets.Dataset` travel as files of their own kinds; everything else is pickled, here, by its
owner, with the classes of his script, notebook and own modules in it. What comes back is safetensors: nothing that a
node wrote is unpickled.
"""

from __future__ import annotations

import logging
import os
import shutil
import site
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any

from cloudtrain.errors import BadRequest, MissingExtra, RunFailed
from cloudtrain.events import MARK, State, Status

if TYPE_CHECKING:
    from cloudtrain.runs.run import Run

ENTRYPOINT = ".cloudtrain/trainer/pickled.py"
MAX_BYTES = 1 << 30  # of model and data together: every node gets its own copy of them
MAX_SYNTHETIC = 1 << 32  # of made-up numbers, which every rank holds in memory
HIDDEN = 64  # width of a synthetic model
HERE = "put it into files or a bucket and write a job with `inputs`"
_logger = logging.getLogger("cloudtrain.training")


class DistributedTraining:
    """Trains models in memory over the nodes of a target.

    `target`, `home` and the options are Submitter's. Subclasses may override `communication_hook` (how gradients are
    synchronised), `recover` (what follows a failure) and `log` (where words go; else the logger cloudtrain.training).
    """

    def __init__(self, target: str | None = None, *, home: Path | None = None, **options: Any) -> None:
        self.target = target
        self.home = home
        self.options = options

    def train_distributed(
        self,
        model: Any,
        data: Any,
        nodes: int = 1,
        use_gpus: bool | str = False,
        *,
        epochs: float = 1.0,
        batch_size: int = 32,
        learning_rate: float = 1e-3,
        loss: Callable[..., Any] | None = None,
        optimizer: Callable[..., Any] | None = None,
        collate: Callable[..., Any] | None = None,
        seed: int = 42,
        logging_steps: int = 10,
        **job: Any,
    ) -> dict[str, Any]:
        """Train a model on a map-style dataset over nodes and return what came of it; blocks until the run is final.

        `model` is a torch module or a transformers model and is trained in place; `data[i]` is a sequence whose last
        item is the target, or a dictionary of the model's arguments with `labels`. Instead, `{"model_name": ...}` and
        `{"samples": n, "features": m}` train a small synthetic model on that much synthetic data. `use_gpus` may name
        the accelerators of a node ("A100:8"), True is one. `batch_size` is one process's share of a step;
        `loss(outputs, target)` is a mean over it, by default cross entropy for whole targets and the squared error
        for others; `optimizer(parameters)` makes one, by default AdamW. `job` is whatever else a Job takes
        (processes_per_node, limits, retry, env, name, ...).

        Raises BadRequest for what cannot be sent, and RunFailed, with the first failing rank's last words in its notes.
        """
        _torch()
        synthetic = isinstance(model, Mapping) or isinstance(data, Mapping)
        if synthetic:
            name, model, size = _synthetic(model, data)
        else:
            name, size = type(model).__name__, {}
            _check(model, data)
        parts = {
            "loss": loss,
            "optimizer": optimizer,
            "collate": collate,
            "communication_hook": self.communication_hook(),
        }
        with tempfile.TemporaryDirectory(prefix="cloudtrain-") as folder:
            _ship(Path(folder), model, None if synthetic else data, parts)
            settings = {
                "num_train_epochs": epochs,
                "per_device_train_batch_size": batch_size,
                "learning_rate": learning_rate,
                "logging_steps": logging_steps,
                "seed": seed,
                "python": f"{sys.version_info.major}.{sys.version_info.minor}",
                **size,
            }
            self.log(f"distributed training of {name} begins: {nodes} nodes")
            run = self._submit(folder, nodes, use_gpus, settings, job)
        self.log(f"{run.run_id} is submitted to {run.record.backend}")
        self._follow(run)
        _load(run, model)
        result = {
            "model_name": name,
            **_world(run),
            "status": "distributed_trained",
            "final_loss": run.metrics("loss")[-1].value,
            "run_id": run.run_id,
            "synthetic": synthetic,
            "model": model,
        }
        self.log(
            f"distributed training of {name} ends: {result['nodes_used']} nodes, {result['device']}, "
            f"final loss {result['final_loss']:.4f}"
        )
        return result

    # -- what subclasses may change -----------------------------------------------------------------------------------

    def communication_hook(self) -> Callable[..., Any] | None:
        """Return a communication hook of DistributedDataParallel, `hook(state, bucket)`, or None for its all-reduce.

        It runs on the ranks and may not refer to this object.
        """
        return None

    def recover(self, run: Run, status: Status) -> bool:
        """Return whether a run that ended otherwise than SUCCEEDED resumes from its last checkpoint; here: no.

        Preempted and lost attempts are started again without being asked, as `retry` says.
        """
        return False

    def log(self, text: str) -> None:
        """Take a sentence on the training, or a line of its ranks."""
        _logger.info("%s", text)

    def __reduce__(self) -> Any:
        raise BadRequest(
            f"a {type(self).__name__} does not travel to the nodes", "let no hook, loss or dataset refer to it"
        )

    # -- the steps ----------------------------------------------------------------------------------------------------

    def _submit(self, source: str, nodes: int, use_gpus: bool | str, settings: Mapping[str, Any], more: Any) -> Run:
        from cloudtrain.job.job import Job
        from cloudtrain.runs.submit import Submitter

        gpus = {"accelerators": use_gpus if isinstance(use_gpus, str) else "GPU:1"} if use_gpus else {}
        wanted = {
            "name": "distributed-training",
            "source": source,
            "allow_large": ["shipped/**"],  # bounded here already
            "entrypoint": ENTRYPOINT,
            "num_nodes": nodes,
            "hyperparameters": settings,
            "resources": gpus,
            **more,
        }
        run = Submitter(self.target, home=self.home, **self.options).submit(Job(**wanted))
        run.acknowledge()
        return run

    def _follow(self, run: Run) -> None:
        """Say the run's lines until it is final; raises RunFailed."""
        from cloudtrain.cli.view.log import LastLines

        last_lines, cursor = LastLines(), None
        while True:
            try:
                for line in run.logs(follow=True, after=cursor, raw=True):
                    cursor = line.cursor
                    last_lines.add(line)
                    if line.rank >= 0 and not line.text.startswith(MARK):
                        self.log(f"[{line.node}:{line.rank}] {line.text}")
                status = run.wait()
            except KeyboardInterrupt:
                self.log(f"detached: {run.run_id} keeps running; cloudtrain cancel {run.run_id} ends it")
                raise
            if status.state is State.SUCCEEDED:
                return
            if status.state is State.CANCELLED or not self.recover(run, status):
                break
            self.log(f"{run.run_id} ended {status.state}: it resumes from its last checkpoint")
            run.resume()
        failure = RunFailed(run.run_id, status)
        rank_name, lines = last_lines.failure_lines(_failed_rank(run))
        if lines:
            failure.add_note("\n".join([f"{rank_name}:", *lines]))
        self.log(str(failure))
        raise failure


def _torch() -> None:
    try:
        import cloudpickle  # noqa: F401
        import safetensors  # noqa: F401
        import torch  # noqa: F401
    except ImportError:
        raise MissingExtra("DistributedTraining", "train") from None


def _check(model: Any, data: Any) -> None:
    """Raise BadRequest for what is no model, or no map-style dataset."""
    import torch

    if not isinstance(model, torch.nn.Module):
        raise BadRequest(
            f"a {type(model).__name__} is no model to train",
            'pass a torch module, or {"model_name": ...} for a synthetic one',
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise BadRequest(f"{type(model).__name__} has no parameter to train")
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise BadRequest(
            f"a {type(data).__name__} is no map-style dataset", "it needs __len__ and __getitem__, as a list has"
        )
    if len(data) == 0:
        raise BadRequest("the dataset is empty")
    if not isinstance(sample := data[0], list | tuple | Mapping):
        raise BadRequest(
            f"a sample of the data is a {type(sample).__name__}",
            "it is (input, ..., target), or a dictionary with labels",
        )


def _synthetic(model: Any, data: Any) -> tuple[str, Any, dict[str, int]]:
    """Return name, module and hyperparameters of what two dictionaries ask for; raises BadRequest."""
    import torch

    if not (isinstance(model, Mapping) and isinstance(data, Mapping)):
        raise BadRequest(
            "model and data are both dictionaries (synthetic), or neither",
            'as {"model_name": "net"}, {"samples": 1000}',
        )
    if strange := [*(model.keys() - {"model_name"}), *(data.keys() - {"samples", "features"})]:
        raise BadRequest(f"a synthetic training has no {strange[0]}", "it has model_name, samples and features")
    sizes = {"samples": data.get("samples", 1000), "features": data.get("features", 16)}
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise BadRequest(f"{name} is a whole number from 1 on, not {value!r}")
    if sizes["samples"] * sizes["features"] * 4 > MAX_SYNTHETIC:
        raise BadRequest(
            f"{sizes['samples']:,} samples of {sizes['features']:,} features are over {MAX_SYNTHETIC >> 30} GiB",
            "ask for fewer",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = torch.nn.Sequential(
            torch.nn.Linear(sizes["features"], HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 2)
        )
    return str(model.get("model_name", "synthetic")), made, sizes


def _ship(folder: Path, model: Any, data: Any, parts: Mapping[str, Any]) -> None:
    """Write what the ranks need below a folder; raises BadRequest when it is too large or cannot be pickled."""
    import cloudpickle

    shipped = folder / "shipped"
    shipped.mkdir()
    rest = {name: part for name, part in parts.items() if part is not None}
    if _of_transformers(model):
        model.save_pretrained(shipped / "model")
    else:
        rest["model"] = _on_cpu(model)
    if type(data).__module__.startswith("datasets.") and hasattr(data, "save_to_disk"):
        data.save_to_disk(shipped / "data")
    elif data is not None:
        rest["data"] = data
    if rest:
        with open(shipped / "parts.pkl", "wb") as stream, _own_modules_by_value():
            try:
                cloudpickle.dump(rest, _Bounded(stream))
            except BadRequest:
                raise
            except Exception as error:  # whatever an object's own __reduce__ raises
                raise BadRequest(f"model or data cannot be pickled: {type(error).__name__}: {error}") from error
        shutil.copytree(
            Path(cloudpickle.__file__).parent, folder / "cloudpickle", ignore=shutil.ignore_patterns("__pycache__")
        )
    size = sum(file.stat().st_size for file in shipped.rglob("*") if file.is_file())
    if size > MAX_BYTES:
        raise BadRequest(_too_large(), HERE)


class _Bounded:
    """A file to write to that refuses to grow beyond what may be sent."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream, self.left = stream, MAX_BYTES

    def write(self, piece: Any) -> int:
        self.left -= memoryview(piece).nbytes
        if self.left < 0:
            raise BadRequest(_too_large(), HERE)
        return self.stream.write(piece)


def _too_large() -> str:
    return f"model and data are over {MAX_BYTES >> 20:,} MiB, which every node would get a copy of"


def _of_transformers(model: Any) -> bool:
    """Return whether a model is a class of the library itself, which loads again without a pickle."""
    return type(model).__module__.startswith("transformers.") and hasattr(model, "save_pretrained")


def _on_cpu(model: Any) -> Any:
    if all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers())):
        return model
    from copy import deepcopy

    return deepcopy(model).to("cpu")


@contextmanager
def _own_modules_by_value() -> Iterator[None]:
    """Let classes of the user's own modules be pickled whole: the nodes have what is installed, and no more."""
    import cloudpickle

    installed = _installed()
    before = cloudpickle.list_registry_pickle_by_value()
    mine = [
        module
        for name, module in list(sys.modules.items())
        if name not in before
        and _is_own(name, module)
        and not os.path.realpath(str(module.__file__)).startswith(installed)
    ]
    for module in mine:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in mine:
            cloudpickle.unregister_pickle_by_value(module)


def _is_own(name: str, module: Any) -> bool:
    """Return whether a module is a file's, and not ours; the script itself is pickled by value anyhow."""
    return (
        isinstance(module, ModuleType)
        and bool(getattr(module, "__file__", None))
        and module.__name__ == name
        and name != "__main__"
        and name.partition(".")[0] != "cloudtrain"
    )


def _installed() -> tuple[str, ...]:
    """Return the folders of what is installed, and of Python itself."""
    paths = {path for name, path in sysconfig.get_paths().items() if name.endswith("lib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages()}
    return tuple(os.path.realpath(path) + os.sep for path in paths)


def _load(run: Run, model: Any) -> None:
    """Put what the run has trained into the model."""
    from safetensors.torch import load_model

    with tempfile.TemporaryDirectory(prefix="cloudtrain-") as folder:
        fetched = run.fetch(Path(folder) / "run", ["model"])
        load_model(model, fetched / "model" / "model.safetensors")


def _world(run: Run) -> dict[str, Any]:
    """Return where the run really was trained, as its launchers and its rank 0 said."""
    newest = run.attempts[-1].attempt_id
    events = [event for event in run.store.events(run.run_id, "world") if event.attempt == newest]
    supervisors = {event.node: event.data for event in events if "pid" in event.data}
    [ranks] = [event.data for event in events if "device" in event.data]
    return {"nodes_used": len(supervisors), "world_size": ranks["world_size"], "device": ranks["device"]}


def _failed_rank(run: Run) -> int | None:
    """Return the rank that failed first in the newest attempt, as its launcher has it."""
    newest = run.attempts[-1].attempt_id
    failed_ranks: Sequence[Any] = [
        event.data.get("failed_rank", event.data.get("rank"))
        for event in run.store.events(run.run_id, "result")
        if event.attempt == newest
    ]
    return next((rank for rank in reversed(failed_ranks) if isinstance(rank, int)), None)
