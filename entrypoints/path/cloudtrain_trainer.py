"""Checkpoints of transformers' Trainer, and of every trainer that is built on it, such as TRL's.

    trainer = SFTTrainer(...)
    cloudtrain_runtime.TrainerCheckpoints(trainer)
    trainer.train()

The folders are the Trainer's own, checkpoint-N: it writes and loads weights, optimizer, schedule and the random numbers of
each rank. Added is what it lacks:

    whole folders      written below another name; sha256 of each file in COMPLETE; a damaged one is passed over
    one history        what an earlier start of the run saves after a later one has begun is never chosen (cloudtrain_fence)
    when               checkpoint.every of the job; and, on SIGTERM, a last one at a step that all ranks agree on
    order of samples   by ResumableSampler: what fills up the Trainer's last step depends on the number of ranks
    random batches     masks, crops and noise are those of the epoch and the samples, whenever a batch is fetched
    number of ranks    gradient_accumulation_steps is fitted, so that a step has the same samples

The job's `checkpoint.engine: cloudtrain` does the same for each Trainer of a script that has no such line.
Standard library only until it is used; Python 3.9 on.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Optional

import cloudtrain_runtime as runtime
import cloudtrain_script_checkpoints as checkpoints
from cloudtrain_sampler import ResumableSampler, SeededBatches

FACTS = "cloudtrain.json"  # in a checkpoint: what its steps are made of
PARTIAL = ".cloudtrain-part-"  # begins the name of a folder that is being written; launcher/output/store.py does not upload it


class TrainerCheckpoints:
    """The checkpoints of one Trainer, and its callback. Make it on all ranks, before `train`.

    `train` then resumes from the newest complete checkpoint of the run by itself; a path that is given to it counts where it
    is of another folder. Several nodes need no common folder where each has the whole model.

    Args:
        trainer: A transformers.Trainer, or a trainer that is built on it.
        folder: Where the checkpoints are; None for the run's checkpoint_dir, and outside of cloudtrain for output_dir.
        keep: Number of newest checkpoints that are kept; None for save_total_limit, else for checkpoint.keep of the job.
    """

    def __init__(self, trainer: Any, folder: Optional[str] = None, keep: Optional[int] = None) -> None:
        self.trainer = trainer
        folder = folder or os.environ.get("CLOUDTRAIN_CHECKPOINT_DIR") or trainer.args.output_dir
        usual = {f"CLOUDTRAIN_{name}_DIR": trainer.args.output_dir for name in ("OUTPUT", "MODEL")}
        self.here = runtime.context({**usual, **os.environ, "CLOUDTRAIN_CHECKPOINT_DIR": os.path.abspath(folder)})
        self.folder = self.here.checkpoint_dir
        self.keep = keep or trainer.args.save_total_limit or self.here.checkpoint_keep
        self.sampler: Optional[ResumableSampler] = None
        self._theirs: Any = None  # a sampler that stays, and knows nothing of epochs
        self._batches: Optional[SeededBatches] = None
        changed = {
            "train": self._train, "_save_checkpoint": self._save,
            "_get_train_sampler": self._get_sampler, "get_train_dataloader": self._get_loader,
            "_issue_warnings_after_load": self._complete_load,
        }  # fmt: skip
        self._trainers = {name: getattr(trainer, name) for name in changed}
        vars(trainer).update(changed)
        trainer.add_callback(self)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Optional[Future[dict[str, Any]]] = None
        self._saved_at = time.monotonic()  # noqa: TID251 - our packages are not on a script's path
        self._epoch, self._shared, self._ours, self._stopped = 0, True, True, False
        self._resumed: Optional[str] = None  # the checkpoint, until the training begins
        self._reseed = ""  # what random numbers are drawn from on a rank for which the checkpoint has none
        self._store: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):  # the events of a callback, those of later versions too
            return lambda *args, **kwargs: None
        raise AttributeError(name)

    # -- resume ----------------------------------------------------------------------------------------------------

    def _train(self, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any) -> Any:
        if trial is not None:  # hyperparameter_search: each trial is a training of its own
            return self._trainers["train"](resume_from_checkpoint, trial, *args, **kwargs)
        path = self._begin()
        if resume_from_checkpoint is False:
            path = None
        elif isinstance(resume_from_checkpoint, (str, os.PathLike)):
            given = os.path.abspath(resume_from_checkpoint)
            path = path if os.path.dirname(given) == self.folder else given
        self._fit(path)
        self._resumed = path
        main = threading.current_thread() is threading.main_thread()
        if handles := main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            runtime.install()
        try:
            result = self._trainers["train"](path, trial, *args, **kwargs)
        finally:
            if handles:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.wait()
        if self._stopped:
            runtime.exit_resumable()
        return result

    def _begin(self) -> Optional[str]:
        """Claim a start of the run and return the newest complete checkpoint; collective."""
        from accelerate.utils import broadcast_object_list, gather_object

        first, mark = self.trainer.is_world_process_zero(), ""
        found: list[Any] = [None, 0, ""]
        if first:
            for name in os.listdir(self.folder):
                place = os.path.join(self.folder, name)
                for inner in os.listdir(place) if name.startswith(PARTIAL) else ():
                    _say(f"checkpoint {inner} is skipped: it is incomplete, and is removed")
                if name.startswith(PARTIAL):
                    shutil.rmtree(place, ignore_errors=True)
            path = checkpoints.find_latest(self.here, None)
            mark = f"{PARTIAL}{os.urandom(8).hex()}"
            os.mkdir(os.path.join(self.folder, mark))
            found = [path and os.path.relpath(path, self.folder), checkpoints.start(), mark]
        broadcast_object_list(found)
        name, self._epoch, mark = found
        seen = gather_object([os.path.isdir(os.path.join(self.folder, mark))])
        has = gather_object([name is None or os.path.isdir(os.path.join(self.folder, name))])
        self._shared = all(seen)
        if first:
            os.rmdir(os.path.join(self.folder, mark))
        if not self._shared and (self.trainer.is_fsdp_enabled or self.trainer.is_deepspeed_enabled):
            raise ValueError(
                f"rank {seen.index(False)} does not see rank 0's {self.folder}: a sharded model needs a folder of "
                "checkpoints that all nodes share"
            )
        if not all(has):
            raise FileNotFoundError(
                f"rank {has.index(False)} does not see {name} in {self.folder}, rank 0 does: name an output in the job, "
                "or a folder that all nodes share"
            )
        return name and os.path.join(self.folder, name)

    def _fit(self, path: Optional[str]) -> None:
        """Let a step have as many samples as those of the checkpoint have. Raises ValueError where the ranks cannot."""
        self._ours, self._reseed = True, ""
        if path is None:
            return
        try:
            with open(os.path.join(path, FACTS), "rb") as file:
                facts = json.load(file)
        except FileNotFoundError:  # the Trainer alone wrote it, in its own order
            self._ours = False
            return
        args, world = self.trainer.args, self.trainer.args.world_size
        wanted, now = int(facts["step_size"]), self._step_size()
        if int(facts["world_size"]) != world:
            self._reseed = f"{args.seed} {os.path.basename(path)} {self.here.rank}"
        if wanted == now:
            return
        ranks = now // (
            self.trainer._train_batch_size * args.gradient_accumulation_steps
        )  # that have their own samples
        if wanted % ranks:
            raise ValueError(
                f"{path} has {wanted} samples a step, which {ranks} ranks cannot share: use a number that divides it"
            )
        share = wanted // ranks
        size = next(each for each in range(self.trainer._train_batch_size, 0, -1) if share % each == 0)
        args.gradient_accumulation_steps = share // size
        if size != self.trainer._train_batch_size:
            args.per_device_train_batch_size = self.trainer._train_batch_size = size
        _say(f"{wanted} samples a step, as in {os.path.basename(path)}: {share // size} batches of {size} on each rank")

    def _step_size(self) -> int:
        trainer, args = self.trainer, self.trainer.args
        if hasattr(trainer, "get_total_train_batch_size"):
            return int(trainer.get_total_train_batch_size(args))
        return int(trainer._train_batch_size * args.gradient_accumulation_steps * args.world_size)

    def _get_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """Return the Trainer's sampler, or ours where it would give all samples in a random or in their own order."""
        from torch.utils.data import RandomSampler, SequentialSampler

        theirs, given = self._trainers["_get_train_sampler"](*args, **kwargs), self.trainer.args
        self.sampler = self._theirs = None
        if not self._ours or type(theirs) not in (RandomSampler, SequentialSampler):
            self._theirs = theirs if self._ours and not hasattr(theirs, "set_epoch") else None
            return theirs
        seed = given.seed if given.data_seed is None else given.data_seed
        random, cut = type(theirs) is RandomSampler, given.dataloader_drop_last
        self.sampler = ResumableSampler(len(theirs), self._step_size(), seed=seed, shuffle=random, drop_last=cut)
        return self.sampler

    def _complete_load(self, result: Any) -> None:
        """Load weights by the model's class where a checkpoint has other names: the Trainer would leave them as they are.

        Saving gives a model such as ViT, or one of experts, the names of its first version (transformers 5.23).
        """
        if not (result.missing_keys and result.unexpected_keys):
            self._trainers["_issue_warnings_after_load"](result)
            return
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        path = self._resumed or self.trainer.state.best_model_checkpoint
        model.load_state_dict(type(model).from_pretrained(path, dtype=model.dtype).state_dict())

    def _get_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the Trainer's loader; what is drawn for a batch, such as masks, is then the same after a resume."""
        loader = self._trainers["get_train_dataloader"](*args, **kwargs)
        self._batches = SeededBatches.of(loader, self.trainer.args.seed) if self._ours else None
        return loader

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give each rank random numbers of its own where the checkpoint has none for it."""
        self._resumed = None
        if self._reseed:
            import hashlib

            from transformers import set_seed

            set_seed(int.from_bytes(hashlib.sha256(self._reseed.encode()).digest()[:4], "big"))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the epoch's order; the Trainer itself skips what was trained on.

        TRL's RepeatSampler (GRPO) draws each epoch's order from where the one before has left its generator, and would draw
        the first epoch's again after a resume: here each epoch has a seed.
        """
        generator = getattr(self._theirs, "generator", None)
        if hasattr(generator, "manual_seed"):
            generator.manual_seed((args.seed if args.data_seed is None else args.data_seed) + int(state.epoch or 0))
        if self.sampler is not None:
            self.sampler.steps = state.global_step // self.sampler.steps_per_epoch * self.sampler.steps_per_epoch
        if self._batches is not None:
            self._batches.epoch.fill_(self.sampler.epoch if self.sampler else int(state.epoch or 0))

    # -- saving ----------------------------------------------------------------------------------------------------

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask for a save when it is due, and for the end when the job is to stop."""
        every_s, every_steps = self.here.checkpoint_every_s, self.here.checkpoint_every_steps
        age_s = time.monotonic() - self._saved_at  # noqa: TID251
        due = every_s is not None and self.here.rank == 0 and age_s >= every_s
        save, stop = self._agreed(state.global_step, due, runtime.stop_requested())
        if stop:
            self._stopped = control.should_training_stop = True
        if save or stop or (every_steps and state.global_step % every_steps == 0):
            control.should_save = True
        self._report()

    def _agreed(self, step: int, save: bool, stop: bool) -> tuple[bool, bool]:
        """Return what is done after this step; with several ranks it is what one of them has asked for at the last one.

        No rank ends a step before all have begun it: what one asks for at a step's end all read at the next one's.
        """
        if self.trainer.args.world_size == 1:
            return save, stop
        import torch
        import torch.distributed as dist

        if self._store is None:
            self._store = dist.PrefixStore("cloudtrain-checkpoints", dist.distributed_c10d._get_default_store())
        if self.trainer.args.device.type == "cuda" and not self.trainer.args.logging_nan_inf_filter:
            torch.cuda.synchronize()  # else the Trainer has waited for the step
        for kind, asked in (("save", save), ("stop", stop)):
            if asked:
                self._store.set(f"{kind}-{step + 1}", "1")
        return self._store.check([f"save-{step}"]), self._store.check([f"stop-{step}"])

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the last save: what may come now, the best model, needs it."""
        self.wait()

    def _save(self, model: Any, trial: Any = None, *args: Any, **kwargs: Any) -> None:
        """Let the Trainer write its folder below another name, and complete it in the background; collective."""
        from accelerate.utils import gather_object

        trainer, original = self.trainer, self._trainers["_save_checkpoint"]
        if trial is not None:
            original(model, trial, *args, **kwargs)
            return
        self.wait()
        step, first = trainer.state.global_step, trainer.is_world_process_zero()
        name = f"checkpoint-{step}"
        place = os.path.join(self.folder, f"{PARTIAL}{self._epoch}")
        partial, final = os.path.join(place, name), os.path.join(self.folder, name)
        trainer._get_output_dir = lambda *args, **kwargs: place
        try:
            original(model, trial, *args, **kwargs)
        finally:
            del trainer._get_output_dir
        state = pathlib.Path(partial, f"rng_state_{trainer.args.process_index}.pth")
        gathered = gather_object([state.read_bytes() if state.is_file() and not self._shared else None])
        if not self._shared and not first and trainer.is_local_process_zero():
            shutil.rmtree(place, ignore_errors=True)
        best = trainer.state.best_model_checkpoint
        if best and os.path.abspath(best) == partial:
            trainer.state.best_model_checkpoint = best = final
        self._saved_at = time.monotonic()  # noqa: TID251
        if not first:
            return
        for rank, data in enumerate(gathered):
            if data and rank:
                pathlib.Path(partial, f"rng_state_{rank}.pth").write_bytes(data)
        if self._ours:
            with open(os.path.join(partial, FACTS), "w") as stream:
                json.dump({"step_size": self._step_size(), "world_size": trainer.args.world_size}, stream)
        trainer.state.save_to_json(os.path.join(partial, "trainer_state.json"))
        self._writing = self._thread.submit(self._commit, partial, final, step, os.path.basename(best or ""))
        if trainer.control.should_training_stop or step >= trainer.state.max_steps or best == final:
            self.wait()

    def _commit(self, partial: str, final: str, step: int, best: str) -> dict[str, Any]:
        """Hash a folder, give it its name and remove older ones; return what is to be reported. On a thread of rank 0."""
        began = time.monotonic()  # noqa: TID251
        try:
            checkpoints.complete(partial, step, lambda *args, **data: None)
            if later := checkpoints.later_start(self.folder):
                shutil.rmtree(os.path.dirname(partial), ignore_errors=True)
                return {"replaced": f"start {later} of this run has started: this one, {self._epoch}, ends"}
            checkpoints.place(partial, final)
            if self.keep:
                checkpoints.prune(self.folder, self.keep, best)
        except OSError as error:
            shutil.rmtree(os.path.dirname(partial), ignore_errors=True)
            return {"reason": f"the checkpoint of step {step} could not be written to {self.folder}: {error}"}
        return {"step": step, "path": final, "seconds": round(time.monotonic() - began, 3)}  # noqa: TID251

    def wait(self) -> None:
        """Return when nothing is being written any more. Raises RuntimeError where a later start has replaced this one."""
        if self._writing is not None:
            self._writing.exception()
            self._report()

    def _report(self) -> None:
        """Report a save that is done; on the main thread: two that print at once would mix their lines."""
        if self._writing is None or not self._writing.done():
            return
        writing, self._writing = self._writing, None
        done = writing.result()
        if "replaced" in done:
            raise RuntimeError(done["replaced"])
        runtime.emit("checkpoint" if "step" in done else "alarm", **done)


def serve_all() -> None:
    """Let each Trainer of this process have its checkpoints from us, from the start of its training on."""
    sys.meta_path.insert(0, _Importer())


class _Importer:
    """Finds the module of the Trainer as it would be found without us, and changes its class when it has been loaded."""

    NAME = "transformers.trainer"
    _asks = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.NAME or self._asks:
            return None
        from importlib.util import find_spec

        self._asks = True
        try:
            spec = find_spec(name)
        finally:
            self._asks = False
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                _serve(module.Trainer)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _serve(kind: Any) -> None:
    original = kind.train

    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "train" in vars(self):  # it has its TrainerCheckpoints, which calls this
            return original(self, *args, **kwargs)
        made = TrainerCheckpoints(self)
        made._trainers["train"] = functools.partial(original, self)  # and no method of a subclass, which calls this
        return made._train(*args, **kwargs)

    kind.train = train


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
