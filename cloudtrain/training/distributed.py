"""DistributedTraining: a model in memory, trained over nodes through a submitted job.

    from cloudtrain import DistributedTraining

    result = DistributedTraining(target="local").train_distributed(model, data, nodes=3)
    result["final_loss"], result["model"]

Model and data are sent with the job's source and are the same on every node (shipping.py).
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import BadRequest, MissingExtra
from cloudtrain.events import Status
from cloudtrain.source.node_code import IN_MEMORY as ENTRYPOINT
from cloudtrain.training.checks import check
from cloudtrain.training.following import follow
from cloudtrain.training.options import divide
from cloudtrain.training.result import TrainingResult, read_world
from cloudtrain.training.shipping import load, make_synthetic, ship, sizes_of

if TYPE_CHECKING:
    from cloudtrain.runs.run import Run

_logger = logging.getLogger("cloudtrain.training")


class DistributedTraining:
    """Trains models in memory over the nodes of a target.

    Subclasses may override `communication_hook` (how gradients are synchronised), `recover` (whether a failed run
    resumes) and `log` (where lines go; by default to the logger cloudtrain.training).

    Args:
        target: A backend or a target of cloudtrain.toml; None for the default.
        home: Folder of the history; None for CLOUDTRAIN_HOME or ~/.local/share/cloudtrain.
        options: The other arguments of Submitter.
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
        eval_data: Any = None,
        seed: int = 42,
        logging_steps: int = 10,
        **options: Any,
    ) -> TrainingResult:
        """Train a model over nodes with the loop of the shared trainer and return the result; blocks until the run is final.

        Args:
            model: a torch module or a transformers model, trained in place; or `{"model_name": ...}`, a small synthetic one.
            data: `data[i]` is a sequence whose last item is the target, or a dictionary of the model's arguments with
                `labels`. An `IterableDataset` yields such samples in the same order every time, and needs `max_steps`;
                each rank reads its own shards where `num_shards` or `get_worker_info()` gives some.
                A text is the address (s3://, gs://, a path on the nodes) of a folder that `save_to_disk` of the library
                `datasets` wrote. Data may have any size. `{"samples": n, "features": m}` is synthetic data of that size.
            nodes: how many nodes train.
            use_gpus: the accelerators of a node ("A100:8"); True is one.
            epochs: passes over the data.
            batch_size: samples of one process in one forward pass.
            learning_rate: of the default optimizer; `optimizer` sets its own.
            loss: `loss(outputs, target)`, a mean over the batch; by default cross entropy for whole targets and the
                squared error for others.
            optimizer: `optimizer(parameters)` makes one; by default AdamW.
            collate: makes a batch of a list of samples; by default torch's.
            eval_data: data that is held out; it is evaluated before and after the training, and as `eval_strategy` says.
            seed: of the order of the samples and of the model's random numbers.
            logging_steps: steps between two points of the curves.
            options: arguments of the shared trainer (`gradient_accumulation_steps`, `bf16`, `lr_scheduler_type`,
                `max_grad_norm`, `eval_strategy`, `gradient_compression`), and keys of the job (`parallelism`,
                `processes_per_node`, `limits`, `retry`, `env`, `name`).

        Returns:
            model: the trained model, the same object.
            model_name: the name of its class.
            final_loss: the last loss that rank 0 logged.
            run_id: of the run, for `cloudtrain show`.
            nodes_used: nodes that trained.
            world_size: processes that trained.
            device: `cpu` or `cuda`, of rank 0.
            synthetic: whether model and data were made up.
            status: always "distributed_trained"; what fails raises.

        Raises:
            BadRequest: the model or the data cannot be sent, or the job is wrong.
            RunFailed: the run did not succeed; the first failing rank's last lines are in its notes.
        """
        _torch()
        sets, job = divide(options, own=signature(self.train_distributed).parameters.keys() - {"options"})
        synthetic = isinstance(model, Mapping) or isinstance(data, Mapping)
        name = type(model).__name__
        if synthetic:
            name, model, data = make_synthetic(model, data, seed)
        functions = {"loss": loss, "optimizer": optimizer, "collate": collate}
        if reason := check(model, data, eval_data, functions, nodes, use_gpus, batch_size, options):
            self.log(f"the first batch is tried on the nodes only: {reason}")
        parts = {**functions, "communication_hook": self.communication_hook()}
        addresses = {key: given for key, given in (("data", data), ("eval_data", eval_data)) if isinstance(given, str)}
        job["inputs"] = {**job.get("inputs", {}), **addresses}
        with tempfile.TemporaryDirectory(prefix="cloudtrain-") as folder:
            sent = {"data": data, "eval_data": eval_data} | dict.fromkeys(addresses)
            for note in ship(Path(folder), model, sent, parts):
                self.log(note)
            settings = {
                "num_train_epochs": epochs,
                "per_device_train_batch_size": batch_size,
                "learning_rate": learning_rate,
                "logging_steps": logging_steps,
                "seed": seed,
                "python": f"{sys.version_info.major}.{sys.version_info.minor}",
                "hook": parts["communication_hook"] is not None,
                "streaming": not (addresses or hasattr(data, "__len__")),
                **sizes_of(model, loss),
                **sets,
            }
            self.log(f"distributed training of {name} begins: {nodes} nodes")
            run = self._submit(folder, nodes, use_gpus, settings, job)
        self.log(f"{run.run_id} is submitted to {run.record.backend}")
        follow(run, self.log, self.recover)
        load(run, model)
        nodes_used, world_size, device = read_world(run)
        result: TrainingResult = {
            "model_name": name,
            "nodes_used": nodes_used,
            "world_size": world_size,
            "device": device,
            "status": "distributed_trained",
            "final_loss": run.metrics("loss")[-1].value,
            "run_id": run.run_id,
            "synthetic": synthetic,
            "model": model,
        }
        self.log(
            f"distributed training of {name} ends: {nodes_used} nodes, {device}, final loss {result['final_loss']:.4f}"
        )
        return result

    # -- what subclasses may change -----------------------------------------------------------------------------------

    def communication_hook(self) -> Callable[..., Any] | None:
        """Return a communication hook of DistributedDataParallel, `hook(state, bucket)`, or None for its all-reduce.

        It runs on the ranks and may not refer to this object.
        """
        return None

    def recover(self, run: Run, status: Status) -> bool:
        """Return whether a run that ended otherwise than SUCCEEDED resumes from its last checkpoint.

        By default it resumes if its last attempt has saved a checkpoint; otherwise it would fail in the same way again.
        Preempted and lost attempts are retried before this is called, as the key `retry` says.

        Args:
            run: The run that failed.
            status: Its status.

        Returns:
            True to resume the run, False to raise RunFailed.
        """
        from cloudtrain.runs.sending.retry import saved

        return run.attempts[-1].attempt_id in saved(run.store, run.run_id)

    def log(self, text: str) -> None:
        """Write one line: a sentence about the training, or a log line of a rank.

        Args:
            text: The line.
        """
        _logger.info("%s", text)

    def __reduce__(self) -> Any:
        raise BadRequest(
            f"a {type(self).__name__} cannot be sent to the nodes",
            "remove references to it from hooks, loss and dataset",
        )

    # -- the steps ----------------------------------------------------------------------------------------------------

    def _submit(self, source: str, nodes: int, use_gpus: bool | str, settings: Mapping[str, Any], more: Any) -> Run:
        from cloudtrain.job.job import Job
        from cloudtrain.runs.submit import Submitter

        gpus = {"accelerators": use_gpus if isinstance(use_gpus, str) else "GPU:1"} if use_gpus else {}
        wanted = {
            "name": "distributed-training",
            "source": source,
            "allow_large": ["shipped/**"],
            "entrypoint": ENTRYPOINT,
            "arg_style": "hf",  # some of its flags are on where they are not given
            "num_nodes": nodes,
            "hyperparameters": settings,
            "resources": gpus,
            "metrics": {"*": "off"},  # the trainer reports its own; a sentence of the log is none
            **more,
        }
        run = Submitter(self.target, home=self.home, **self.options).submit(Job(**wanted))
        run.acknowledge()
        return run


def _torch() -> None:
    try:
        import cloudpickle  # noqa: F401
        import safetensors  # noqa: F401
        import torch  # noqa: F401
    except ImportError:
        raise MissingExtra("DistributedTraining", "train") from None
