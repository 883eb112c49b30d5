"""The shared trainer: trains a language model on one process or on many nodes.

A small language model from scratch, on the standard library's own source, in a minute on one core:

    python train.py --dataset python-stdlib --max_train_bytes 400000 --tokenizer bpe:1024 --hidden_size 128 \
        --block_size 128 --max_steps 100 --learning_rate 3e-3

A pretrained one on one's own texts (`cloudtrain submit` starts the ranks; by hand, each needs RANK, LOCAL_RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT):

    python train.py --model gpt2 --dataset "texts/*.txt" --bf16 --num_train_epochs 1

Conversations, through a chat template, an adapter that learns the answers:

    python train.py --task chat --model Qwen/Qwen3-0.6B --dataset chats.jsonl --use_peft --bf16

Classes of texts:

    python train.py --task sequence-classification --model distilbert-base-uncased --dataset reviews.csv

Preferences (DPO), rows with prompt, chosen and rejected:

    python train.py --task dpo --model Qwen/Qwen3-0.6B --dataset preferences.jsonl --bf16

A class of one's own, which gives model, data and loss:

    python train.py --task mypkg.task:MyTask --task_args width=64

`python train.py --help` lists all arguments. Ends with 0 when trained, 75 when asked to leave (it may be resumed), 78
when it refuses to begin, 2 for flags that cannot be meant.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent / "path"))  # where it is started by hand

import cloudtrain_runtime as runtime
from trainer import collectives, strategies
from trainer.arguments import Arguments, parse, parse_or_exit
from trainer.errors import Divergence, Ended, Unsupported, check_versions, exit_when_unsupported
from trainer.strategies import accelerate_file, mesh


def main(parse: Callable[[Sequence[str]], Arguments] = parse, prepare: Any = None) -> int:
    arguments = parse_or_exit(sys.argv[1:], parse)  # before torch is imported, which takes seconds
    context = runtime.context()
    runtime.install()
    try:
        with exit_when_unsupported():
            parallelism = accelerate_file.resolve(context.parallelism, arguments)
            plan = mesh.choose_plan(parallelism, context.world_size, context.num_nodes)
            check_versions(plan.splits_model)
            return train(arguments, context, plan, prepare)
    except Ended as end:
        print(f"train.py: {end}", file=sys.stderr, flush=True)
        return collectives.leave(1)
    except Exception:
        traceback.print_exc()
        return collectives.leave(1)  # while the frames of the traceback still hold the process group
    except SystemExit as refusal:
        return collectives.leave(int(refusal.code or 0))


def train(arguments: Arguments, context: runtime.RunContext, plan: mesh.ParallelismPlan, prepare: Any = None) -> int:
    """Train and return the exit code; `prepare(arguments, inputs)` makes another task than the arguments name."""
    from accelerate.utils import set_seed
    from trainer import mfu, publish, trackers
    from trainer import model as models
    from trainer.best import BestEvaluation
    from trainer.checkpoints.files import folder_of
    from trainer.checkpoints.manager import CheckpointManager
    from trainer.checkpoints.state import TrainingState, set_random_state
    from trainer.data import documents, tasks
    from trainer.evaluation import describe, evaluate
    from trainer.loop import Loop
    from trainer.metrics import Meter, MetricsLogger
    from trainer.strategies.compatibility import check_arguments
    from transformers.utils.logging import disable_progress_bar

    # -----------------------------------------------------------------------------------------------------------------
    # Setup
    arguments.model, arguments.tokenizer = (
        documents.located(name, context.inputs) for name in (arguments.model, arguments.tokenizer)
    )
    if arguments.push_to_hub:
        publish.check_token()
    disable_progress_bar()  # type: ignore[no-untyped-call]  # a log has no use for one
    logger = MetricsLogger(main=context.rank == 0)
    trackers_wanted = trackers.choose(arguments.report_to) or None
    strategy = strategies.build_strategy(plan, arguments, log_with=trackers_wanted, project_dir=context.output_dir)
    accelerator = strategy.accelerator
    check_arguments(arguments, plan, strategy.device)
    set_seed(arguments.seed)  # alike on all ranks: they build the same model

    # -----------------------------------------------------------------------------------------------------------------
    # Data
    task = strategy.task = (prepare or tasks.prepare)(arguments, context.inputs)
    pinned = accelerator.device.type == "cuda"
    batches, feed = feed_of(task, arguments, plan, context.rank, pinned)
    if batches.steps_per_epoch == 0:
        raise Unsupported(
            f"{len(task.train)} samples are fewer than one batch of {batches.global_batch}, and the last is dropped"
        )
    held_out = None
    if task.held_out is not None:
        size = arguments.per_device_eval_batch_size
        held_out = strategy.held_out(task.held_out, size, task.collate, pinned)

    # -----------------------------------------------------------------------------------------------------------------
    # Model
    total_steps = arguments.max_steps
    if total_steps < 0:
        total_steps = math.ceil(arguments.num_train_epochs * batches.steps_per_epoch)
    logger.total_steps = total_steps
    bare: Any = tasks.build_model(task, arguments)
    model_type = getattr(getattr(bare, "config", None), "model_type", type(bare).__name__)
    parameters = sum(parameter.numel() for parameter in bare.parameters())
    learned = sum(parameter.numel() for parameter in bare.parameters() if parameter.requires_grad)
    work = None if task.unit != "tokens" else mfu.work(bare, arguments.block_size)
    models.compiled(bare, arguments)
    strategy.prepare(bare, lambda model: task.optimizer(model, arguments))
    del bare  # some strategies have it in parts now
    model = strategy.model
    task.prepared(strategy)
    schedule = models.schedule(strategy.optimizer, arguments, total_steps)
    training = TrainingState(
        model, strategy.optimizer, schedule, accelerator.scaler, strategy.parts_kept, plan.described, strategy.tied
    )

    sizes = {"parameters": parameters, "parameters_learned": learned, "total_steps": total_steps}
    logger.say(f"data: {task.described}")
    use = report_world(strategy, arguments, plan, logger, work, {"type": model_type, **sizes})

    # -----------------------------------------------------------------------------------------------------------------
    # Checkpoints, what is reported, and where an earlier attempt left off
    every_steps, every_s = intervals(arguments, context)
    keep = arguments.save_total_limit if arguments.save_total_limit > 0 else context.checkpoint_keep or 3
    folder = Path(context.checkpoint_dir)
    manager = CheckpointManager(
        folder, context.attempt, keep, logger.event, logger.say, given=context.epoch, behind=arguments.save_async
    )
    meter, best, divergence = Meter(accelerator.device, use, task.unit), BestEvaluation(arguments), Divergence()
    loop: Loop
    first_loss = None

    def save() -> None:
        if divergence.steps:
            return  # a later start would continue from it
        loop.saved_step = loop.step
        position = {"step": loop.step, "first_loss": first_loss, "best": best.state(), **batches.place()}
        manager.save(loop.step, training, position, {"meter": meter.state()})

    def save_best() -> None:
        before, best.checkpoint = best.checkpoint, folder_of(manager.folder, loop.step, manager.epoch).name
        save()
        manager.wait()
        if manager.saved_step != loop.step:  # the disk is full, say
            best.checkpoint = before
        manager.best = best.checkpoint

    def report(values: dict[str, float]) -> None:
        values["epoch"] = round(batches.passed, 4)
        logger.metrics(loop.step, **values)
        logger.line(loop.step, values)
        if not math.isfinite(values["loss"]):
            logger.event("alarm", step=loop.step, reason=f"the loss is {values['loss']}")
        divergence.update(loop.step, values["loss"])

    def evaluate_when_due() -> bool:
        """Evaluate where it is due after this step; True when training on is of no more use."""
        if held_out is None or not evaluation_is_due(arguments, loop.step, batches.exhausted):
            return False
        scores = evaluate(strategy, held_out)
        logger.metrics(loop.step, **scores)
        logger.say(f"step {loop.step}/{total_steps}  held-out {describe(scores)}")
        if best.update(scores) and best.keeps:
            save_best()
        if best.enough:
            logger.say(
                f"{best.in_vain} evaluations in a row without improvement: stopping at step {loop.step}/{total_steps}"
            )
        return best.enough

    loop = Loop(
        strategy, batches, feed, schedule=schedule, meter=meter, logger=logger, manager=manager, main=context.rank == 0,
        total_steps=total_steps, save=save, report=report, logging_steps=arguments.logging_steps,
        log_first=arguments.logging_first_step, every_steps=every_steps, every_s=every_s,
        max_grad_norm=arguments.max_grad_norm, evaluate=evaluate_when_due,
    )  # fmt: skip
    resumed = manager.resume(training)
    model_folder = Path(context.model_dir)
    publish.withdraw(model_folder, manager.epoch)
    if trackers.begin(accelerator, arguments, context):
        logger.accelerator = accelerator
    if resumed is not None:
        position, mine = resumed
        loop.step, first_loss = position["step"], position["first_loss"]
        batches.go_to(position)
        best.set_state(position["best"])
        best.checkpoint = manager.hold_best(best.checkpoint)
        if mine:
            meter.set_state(mine["meter"])
    elif held_out is not None and arguments.eval_on_start:
        scores = evaluate(strategy, held_out)
        first_loss = scores["eval_loss"]
        logger.say(f"held-out loss {first_loss:.3f} before training")
        logger.metrics(0, **scores)
    if resumed is not None:
        strategy.settle(lambda: one_loss(strategy, task))
    # Each rank drops out its own, but those that share the same samples, tokens and layers.
    apart = (
        plan.data_rank(context.rank) + 7919 * plan.stage_rank(context.rank) + 104729 * plan.context_rank(context.rank)
    )
    set_seed(arguments.seed + apart)
    if resumed is not None and mine:
        set_random_state(mine["random"])  # the last thing before the first step: nothing may draw in between

    # -----------------------------------------------------------------------------------------------------------------
    # The training (trainer/loop.py)
    try:
        stopped = loop.run(over=best.enough)
    except Ended:
        manager.wait()  # what is being written was taken before
        raise
    if stopped:
        logger.say(f"stop requested: saved at step {loop.step}/{total_steps}")
        trackers.finish(accelerator)
        return collectives.leave(runtime.EXIT_RESUMABLE)

    # -----------------------------------------------------------------------------------------------------------------
    # What came of it
    divergence.end()
    save()  # for a run whose steps were all done before
    manager.wait()
    scores: dict[str, float] = {}
    if held_out is not None:
        scores = final_scores(
            strategy, held_out, best, lambda: manager.go_back(best.checkpoint, training), logger, loop.step
        )
    if arguments.torch_compile:
        logger.say(f"model compiled by torch.compile with {arguments.torch_compile_backend}: {models.graphs()} graphs")
    place = task.tokenizer, model_folder, manager.epoch, manager.check_current
    try:
        trained = write_model(strategy, arguments, place)
    except publish.Unwritten as error:
        raise Ended(f"{error}; {manager.last_good}: make room, then run `cloudtrain resume`") from None
    if trained is not None and task.generates and arguments.sample_tokens > 0:
        write_samples(task, trained, arguments, logger, loop.step)
    if context.rank == 0:
        logger.table(loop.step, "predictions", task.table)
        say_results(arguments, scores, first_loss, model_folder, logger)
    manager.check_ranks()  # a start that was replaced meanwhile does not end as a success
    trackers.finish(accelerator)
    return collectives.leave(0)


def report_world(
    strategy: Any, arguments: Arguments, plan: mesh.ParallelismPlan, logger: Any, work: Any, model: dict[str, Any]
) -> Any:
    """Log the model, the ranks and the versions; return how the FLOPs are counted, None where that is not known."""
    import accelerate
    import torch
    import transformers
    from trainer import mfu

    facts = strategy.describe()
    versions = {library.__name__: library.__version__ for library in (torch, transformers, accelerate)}
    counts = {name: value for name, value in model.items() if name != "type"}
    if (use := mfu.use(work, strategy.device, facts["mixed_precision"], arguments.dtype)) is not None:
        counts |= {"flops_per_token": use.work.token, "flops_per_pair": use.work.pair, "peak_flops": use.peak}
    logger.event("world", versions=versions, **counts, **facts)
    in_dtype = "" if arguments.dtype == "float32" else f" in {arguments.dtype}"
    learn = (
        "" if model["parameters_learned"] == model["parameters"] else f", {model['parameters_learned']:,} of them learn"
    )
    logger.say(
        f"model: {model['type']}, {model['parameters']:,} parameters{in_dtype}, "
        f"{facts['parameters_per_rank'][0]:,} of them on rank 0{learn}; "
        f"{plan.world} x {facts['device']}, strategy {plan.described}, wrapper {facts['wrapper']}"
    )
    return use


def feed_of(task: Any, arguments: Arguments, plan: mesh.ParallelismPlan, rank: int, pinned: bool) -> tuple[Any, Any]:
    """Return the place in the data (GlobalBatches or StreamBatches) and this rank's micro-batches from there on."""
    from trainer.data.samples import GlobalBatches, accumulation, loader

    batching: dict[str, Any] = {
        "per_device": arguments.per_device_train_batch_size,
        "accumulation": accumulation(arguments, plan.data_ranks),
        "world": plan.data_ranks,  # the others take the samples of one of these
        "rank": plan.data_rank(rank),
        "full": plan.pipeline > 1,
    }
    if arguments.streaming:
        stream = task.stream(**batching)
        return stream, stream
    batches = GlobalBatches(len(task.train), seed=arguments.seed, drop_last=arguments.dataloader_drop_last, **batching)
    workers = arguments.dataloader_num_workers
    return batches, loader(task.train, workers, pinned, batch_sampler=batches, collate_fn=task.collate)


def write_model(strategy: Any, arguments: Arguments, place: Any) -> Any:
    """Publish the trained model and return it, on the ranks that have it whole, for samples of text; collective.

    Args:
        place: tokenizer, folder, this start's number, and what raises Unsupported where a later one has replaced it.
    """
    from trainer import lora, publish
    from trainer import model as models

    trained: Any
    if publish.saves_in_parts(strategy.bare, arguments.merge_adapter):
        publish.save_in_parts(models.plain(strategy.bare), strategy.tensors, *place, merge=arguments.merge_adapter)
        if strategy.runs_whole:
            trained = models.plain(strategy.accelerator.unwrap_model(strategy.model))
        else:
            trained = publish.load_small(place[1]) if collectives.rank() == 0 and arguments.sample_tokens > 0 else None
        if strategy.context is not None:
            strategy.context.take_off()
    elif (trained := strategy.whole()) is not None:
        trained = models.plain(trained)
        if arguments.merge_adapter:
            trained = lora.merged(trained)
        publish.save(trained, *place)
    return trained


def final_scores(
    strategy: Any, held_out: Any, best: Any, go_back: Callable[[], bool], logger: Any, step: int
) -> dict[str, float]:
    """Return the scores of the trained model; the best checkpoint is loaded before where it is better. Collective."""
    from trainer.evaluation import evaluate

    scores: dict[str, float] = evaluate(strategy, held_out)
    if scores:
        logger.metrics(step, **scores)
        if best.keeps and not best.update(scores) and go_back():
            scores = evaluate(strategy, held_out)
            logger.metrics(step, **scores)
            logger.say(f"loaded the checkpoint with the best evaluation, {best.checkpoint}")
    return scores


def say_results(arguments: Arguments, scores: Any, first_loss: float | None, folder: Path, logger: Any) -> None:
    """Print the scores and where the model is, and upload it where that is asked for."""
    from trainer import publish
    from trainer.evaluation import describe

    if scores:
        before, legend = ("", "") if first_loss is None else (f"{first_loss:.3f} -> ", "  (before -> after training)")
        logger.say(f"held-out loss {before}{describe(scores).removeprefix('loss ')}{legend}")
    logger.say(f"model saved in {folder}")
    if arguments.push_to_hub:
        logger.say(f"model uploaded to {publish.push(folder, arguments.hub_model_id, arguments.hub_private_repo)}")


def write_samples(task: Any, trained: Any, arguments: Arguments, logger: Any, step: int) -> None:
    """Log what the trained model writes after each prompt; of a model in parts all ranks write together."""
    samples = [
        {"prompt": prompt, "text": task.generate(trained, prompt, arguments.sample_tokens, arguments.seed)}
        for prompt in (arguments.sample_prompt, *arguments.sample_prompts)
    ]
    logger.say("sample:\n" + "\n".join(f"    {line}" for row in samples for line in row["text"].splitlines()))
    logger.table(step, "samples", samples)


def one_loss(strategy: Any, task: Any) -> Any:
    """Return the loss of one sample, of no meaning but its graph."""
    return strategy.losses(strategy.to_device(task.collate([task.train[0]]))).sum()


def evaluation_is_due(arguments: Arguments, step: int, epoch_ends: bool) -> bool:
    """Return whether an evaluation follows this step."""
    if arguments.eval_strategy == "epoch":
        return epoch_ends
    every = arguments.eval_steps if arguments.eval_steps > 0 else arguments.logging_steps
    return arguments.eval_strategy == "steps" and step % every == 0


def intervals(arguments: Arguments, context: runtime.RunContext) -> tuple[int | None, float | None]:
    """Return (steps, seconds) between checkpoints; the arguments are stronger than the job, neither means 15 minutes."""
    if arguments.save_steps > 0:
        return arguments.save_steps, None
    if context.checkpoint_every_steps is None and context.checkpoint_every_s is None:
        return None, 900.0
    return context.checkpoint_every_steps, context.checkpoint_every_s


if __name__ == "__main__":
    sys.exit(main())
