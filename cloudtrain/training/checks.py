"""Refuse models, data and functions that cannot be trained, before anything is sent: the first samples are tried here.

The batch, the loss and the layout are checked by the functions that a rank calls.
"""

from __future__ import annotations

import copy
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from cloudtrain.errors import BadRequest
from cloudtrain.source.node_code import module
from cloudtrain.training.shipping import sizes_of

READ = 20  # samples that are read, and the last one
TRIED = 8  # of them in the batch that is tried, at most
MAX_TRIED = 1 << 26  # parameters of a model that is copied and run on this machine
_GPU = re.compile(r"cuda|nvidia|gpu|triton|flash", re.IGNORECASE)


def check(
    model: Any,
    data: Any,
    eval_data: Any,
    functions: Mapping[str, Any],
    nodes: int,
    use_gpus: bool | str,
    batch_size: int,
    options: Mapping[str, Any],
) -> str:
    """Raise BadRequest for what would fail on the nodes, as far as this machine can know.

    Returns:
        Why no batch was tried on this machine, or the empty text.
    """
    check_model(model)
    check_functions(**functions)
    own_collate, parallelism = functions["collate"] is not None, options.get("parallelism")
    held_out = []
    if eval_data is not None and not isinstance(eval_data, str):
        held_out = read_held_out(eval_data, own_collate)
    if options.get("fp16") and not use_gpus:
        raise BadRequest("fp16 needs a GPU", "pass use_gpus=True, or bf16=True instead")
    if options.get("gradient_compression") == "bf16" and not use_gpus:
        raise BadRequest("gradient_compression='bf16' needs a GPU", "pass use_gpus=True, or 'fp16' instead")
    if options.get("dataloader_drop_last") and hasattr(data, "__len__") and not isinstance(data, str):
        accumulation = options.get("gradient_accumulation_steps", 1)
        if len(data) < (batch := batch_size * accumulation * nodes):
            raise BadRequest(
                f"{len(data):,} samples are fewer than one batch of {batch:,}, and dataloader_drop_last drops it",
                "remove dataloader_drop_last, or reduce batch_size",
            )
    own_loss = not sizes_of(model, functions["loss"])
    if not own_loss:
        check_layout(model, parallelism, batch_size)
    if isinstance(data, str):
        return ""
    samples = read_samples(data, own_collate=own_collate)
    strategy = parallelism.get("strategy", "ddp") if isinstance(parallelism, Mapping) else parallelism or "ddp"
    ddp = strategy == "ddp" and (nodes != 1 or options.get("processes_per_node", 1) != 1)
    return try_batch(model, samples, functions, own_loss, batch_size, bool(use_gpus), ddp, held_out)


def check_model(model: Any) -> None:
    """Raise BadRequest for what is no model, or has nothing to train."""
    import torch
    from torch.nn.parameter import is_lazy

    name = type(model).__name__
    if not isinstance(model, torch.nn.Module):
        raise BadRequest(
            f"a {name} is not a model that can be trained",
            'pass a torch module, or {"model_name": ...} for a synthetic one',
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise BadRequest(f"{name} has no parameter to train")
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise BadRequest(f"{key} of {name} has no shape yet", "run the model once on a sample")
        if tensor.is_meta:
            raise BadRequest(f"{key} of {name} is on the meta device and has no values", "give it values first")


def check_functions(**functions: Any) -> None:
    """Raise BadRequest for a loss, an optimizer or a collate that cannot be called."""
    examples = {
        "loss": "torch.nn.functional.mse_loss",
        "optimizer": "lambda parameters: torch.optim.SGD(parameters, lr=0.1)",
        "collate": "a function of a list of samples",
    }
    for name, given in functions.items():
        if given is not None and not callable(given):
            raise BadRequest(f"{name} must be a function, not a {type(given).__name__}", f"pass {examples[name]}")


def read_samples(data: Any, name: str = "data", own_collate: bool = False) -> list[Any]:
    """Return the first samples of a dataset; raises BadRequest for what is none, or has samples that differ in form."""
    import torch

    streamed = isinstance(data, torch.utils.data.IterableDataset)
    if not streamed and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise BadRequest(
            f"a {type(data).__name__} is not a map-style dataset and not an IterableDataset",
            "pass a dataset with __len__ and __getitem__, such as a list",
        )
    data, place = _formatted(data), 0
    try:
        if streamed:
            samples = dict(enumerate(islice(iter(data), READ)))
        else:
            samples = {}
            for place in dict.fromkeys([*range(min(len(data), READ)), len(data) - 1]):
                if place >= 0:
                    samples[place] = data[place]
    except Exception as error:  # whatever the user's dataset raises
        raise BadRequest(
            f"the data set {name} cannot be read on this machine{'' if streamed else f', sample {place}'}: {described(error)}",
            "the first samples are read before anything is sent",
        ) from error
    if not samples:
        raise BadRequest("the dataset is empty" if name == "data" else f"{name} is empty")
    for place, sample in samples.items():
        if not isinstance(sample, list | tuple | Mapping):
            raise BadRequest(
                f"a sample of the data is a {type(sample).__name__}, which cannot be trained on",
                "let the dataset return (input, ..., target), or a dictionary with the key 'labels'",
            )
        if not own_collate and _form(sample) != _form(samples[0]):
            raise BadRequest(
                f"sample {place} of {name} has {_form(sample)}, sample 0 has {_form(samples[0])}",
                "give all samples the same form, or pass collate=",
            )
    return list(samples.values())


def _form(sample: Any) -> str:
    if isinstance(sample, Mapping):
        return f"the keys {', '.join(map(str, sorted(sample)))}"
    return f"{len(sample)} items"


def _formatted(data: Any) -> Any:
    """Return a dataset of the library `datasets` as the ranks read it, and any other one as it is."""
    if type(data).__module__.startswith("datasets.") and hasattr(data, "save_to_disk"):
        return data if data.format["type"] else data.with_format("torch")
    return data


def read_held_out(eval_data: Any, own_collate: bool) -> list[Any]:
    """Return the first samples of data that is held out; raises BadRequest for what cannot be evaluated on."""
    import torch

    if isinstance(eval_data, torch.utils.data.IterableDataset):
        raise BadRequest("eval_data is an IterableDataset, which has no length", "pass a list of its samples")
    return read_samples(eval_data, "eval_data", own_collate)


def try_batch(
    model: Any,
    samples: list[Any],
    parts: Mapping[str, Any],
    own_loss: bool,
    batch_size: int,
    gpus: bool = False,
    ddp: bool = False,
    held_out: Sequence[Any] = (),
) -> str:
    """Run a copy of the model on the first samples, forward and backward; return why it was not run, "" where it was.

    Args:
        model: the model.
        samples: the first samples.
        parts: the user's `loss`, `optimizer` and `collate`.
        own_loss: whether the loss is the user's, or one by what the samples are.
        batch_size: of one rank.
        gpus: whether the nodes have GPUs: what fails for the lack of one here is not refused.
        ddp: whether each trained parameter must have a gradient.
        held_out: the first samples of `eval_data`, on which the model is run too.

    Raises:
        BadRequest: no batch, no loss or no optimizer comes of it.
    """
    import torch

    task = module("trainer.data.in_memory").make_task(
        {"data": samples, "eval_data": held_out or None, **parts}, own_loss
    )
    trials = [(f"the first {(count := min(len(samples), max(batch_size, 1), TRIED))} samples", task.train, count)]
    if held_out:
        trials.append((f"the first {(count := min(len(held_out), TRIED))} samples of eval_data", task.held_out, count))
    batches = []
    for what, data, count in trials:
        with _refused(f"no batch can be made of {what}", "pass collate="):
            batches.append((what, task.collate([data[index] for index in range(count)])))
    numbers = sum(parameter.numel() for parameter in model.parameters())
    if numbers > MAX_TRIED:
        return f"the model has {numbers:,} parameters"
    try:
        mine = copy.deepcopy(model).train()
    except Exception as error:  # what cannot be copied is hardly pickled, which is refused with its reason
        return f"the model cannot be copied ({described(error)})"
    device = next(mine.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            for what, batch in batches:
                use = "trained" if batch is batches[0][1] else "evaluated"
                with _refused(f"the model cannot be {use} on {what}"), torch.set_grad_enabled(use == "trained"):
                    mine.train(use == "trained")
                    batch = task.to_device(batch, device)
                    loss = task.loss_of(mine, batch[1])[0] if own_loss else task.losses(mine, batch).sum()
                    if use == "trained":
                        _check_loss(loss)
                        loss.backward()
        except BadRequest as refused:
            cause = refused.__cause__
            if isinstance(cause, MemoryError | torch.OutOfMemoryError):
                return "this machine has too little memory"
            if gpus and not torch.cuda.is_available() and cause is not None and _GPU.search(str(cause)):
                return f"this machine has no GPU ({described(cause)})"
            raise
    trained = {name: each for name, each in mine.named_parameters() if each.requires_grad}
    unused = [name for name, parameter in trained.items() if parameter.grad is None]
    if ddp and unused:
        raise BadRequest(
            f"{len(unused)} trained parameters take no part in the loss, such as {unused[0]}: strategy ddp needs all",
            "freeze them (requires_grad_(False)), or use strategy fsdp",
        )
    if (make := parts.get("optimizer")) is not None:
        with _refused("optimizer fails on the model's parameters"):
            made = make(list(trained.values()))
        if not isinstance(made, torch.optim.Optimizer):
            raise BadRequest(f"optimizer returns a {type(made).__name__}", "return a torch.optim.Optimizer")
    return ""


def _check_loss(loss: Any) -> None:
    import torch

    if not isinstance(loss, torch.Tensor):
        raise BadRequest(f"the loss is a {type(loss).__name__}, not a tensor", "return the mean over the batch")
    if loss.numel() != 1:
        raise BadRequest(f"the loss has the shape {tuple(loss.shape)}", "return the mean over the batch, one number")
    if not loss.requires_grad:
        raise BadRequest("the loss does not depend on the model's parameters", "compute it without detach and no_grad")


def check_layout(model: Any, parallelism: Any, batch_size: int) -> None:
    """Raise BadRequest where a language model's layers, heads or sequences cannot be split as the job asks."""
    if not isinstance(parallelism, Mapping) or parallelism.get("accelerate_config"):
        return
    sizes = {key: parallelism.get(key) or 1 for key in ("tp_size", "pp_size", "cp_size")}
    if not all(isinstance(size, int) and size > 0 for size in sizes.values()) or max(sizes.values()) == 1:
        return
    unsupported = module("trainer.errors").Unsupported
    layout = {**parallelism, "strategy": "ddp", "dp_replicate_size": None, "dp_shard_size": None, "offload": None}
    try:
        world = sizes["tp_size"] * sizes["pp_size"] * sizes["cp_size"]
        plan = module("trainer.strategies.mesh").choose_plan(layout, world)
        module("trainer.strategies.fsdp").check_split(model, plan.tensor)
        if plan.pipeline > 1:
            module("trainer.strategies.stages").check_cut(model, plan.stages)
            module("trainer.strategies.pipeline").microbatches(plan, batch_size)
        if plan.context > 1:
            module("trainer.strategies.context_parallel").check_family(model.config.get_text_config(), plan.context)
    except unsupported as refusal:
        raise BadRequest(str(refusal)) from None


@contextmanager
def _refused(what: str, hint: str = "") -> Iterator[None]:
    """Make a BadRequest of any error."""
    try:
        yield
    except BadRequest:
        raise
    except Exception as error:  # of the user's model, loss or data
        raise BadRequest(f"{what}: {described(error)}", hint) from error


def described(error: BaseException) -> str:
    """Return an error in one line, with the newest place of the user's own code."""
    text = (str(error).strip().splitlines() or [""])[0]
    ours = [sys.prefix, str(Path(__file__).parents[1]), str(Path(traceback.__file__).parent)]
    ours += module("trainer").__path__
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(tuple(ours))]
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}{f': {text}' if text else ''}{place}"
