"""LoRA adapters through peft: the pretrained weights are frozen, the adapter is trained."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from .errors import Unsupported
from .weights import Recorder, Weights, skeleton, take

BASE = ".base_layer."  # in the name of a tensor that a layer's adapter changes

if TYPE_CHECKING:
    import torch

    from .arguments import Arguments


def adapted(model: Any, arguments: Arguments, task_type: str | None = "") -> Any:
    """Return the model with an adapter in it, the only part that is trained; raises Unsupported when it finds no place.

    Args:
        model: any model, or one without values while what initialises the adapter is recorded.
        arguments: the trainer's.
        task_type: peft's word for the model, None for one that is not of transformers; "": that of the task.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise Unsupported("--use_peft needs the package peft (pip install peft)") from None
    # peft asks transformers for something by its old name, which would print a warning on every rank.
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
    targets: Any = arguments.lora_target_modules or None
    config = LoraConfig(
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        task_type=("CAUSAL_LM" if arguments.writes else "SEQ_CLS") if task_type == "" else task_type,
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise Unsupported(f"--use_peft: {str(error).strip().splitlines()[0]}") from None


def put_on(model: Any, arguments: Arguments) -> Any:
    """Return a model that a class of the source has built with an adapter in it.

    Its own values may still be in files. Raises Unsupported where they would be drawn: the adapter alone is saved.
    """
    name = type(model).__name__
    causal, classifies = name.endswith(("ForCausalLM", "LMHeadModel")), name.endswith("ForSequenceClassification")
    task_type = "CAUSAL_LM" if causal else "SEQ_CLS" if classifies else None
    if (values := take(model)) is None:
        return adapted(model, arguments, task_type)
    if values.draws:
        raise Unsupported(
            f"--use_peft trains an adapter of a pretrained model, but weights() of {arguments.task} does not name the "
            f"values of {next(iter(values.draws))}"
        )
    stored = {
        id(each): values.stored[values.names[own]] for own, each in model.named_parameters(remove_duplicate=False)
    }
    recorder = Recorder()
    with recorder.recording():
        model = adapted(model, arguments, task_type)
    model.initial_weights = Weights.of(model, recorder, arguments.seed, stored)
    if unknown := model.initial_weights.unknown:
        raise Unsupported(
            f"--use_peft cannot initialise {unknown[0]} on the meta device: build the model of {arguments.task} without it"
        )
    return model


def merged(model: Any) -> Any:
    """Return the plain model that a model with an adapter stands for."""
    return model.merge_and_unload()


def is_adapted(model: Any) -> bool:
    """Return whether a model is one of peft's, with an adapter in it."""
    return (peft := sys.modules.get("peft")) is not None and isinstance(model, peft.PeftModel)


def adapter_names(bare: Any) -> list[str]:
    """Return the names of those tensors that peft saves, in a model with an adapter but without values."""
    from peft import get_peft_model_state_dict

    state = bare.state_dict()
    saved = {id(tensor) for tensor in get_peft_model_state_dict(bare, state).values()}
    return [name for name, tensor in state.items() if id(tensor) in saved]


def parted(bare: Any) -> tuple[Any, dict[str, str]]:
    """Return the plain model below a model, without values, and for each of its tensors the name of that in the latter."""
    copied = skeleton(bare)
    names = {id(tensor): name for name, tensor in copied.state_dict(keep_vars=True).items()}
    plain = copied.unload()
    return plain, {name: names[id(tensor)] for name, tensor in plain.state_dict(keep_vars=True).items()}


def merged_tensors(
    bare: Any, sources: dict[str, str], tensors: Callable[[list[str]], Iterator[tuple[str, torch.Tensor | None]]]
) -> Callable[[list[str]], Iterator[tuple[str, torch.Tensor | None]]]:
    """Return what yields the tensors of the merged model, one layer after the other.

    Args:
        bare: the model with the adapter; its values are not used.
        sources: what `parted` has returned.
        tensors: returns tensors of the trained model by name, whole and on the CPU on rank 0, None elsewhere; collective.
    """

    state = bare.state_dict(keep_vars=True)
    changed: dict[int, list[str]] = {}  # the names of a tensor in layers with an adapter: of tied matrices several
    for name, tensor in state.items():
        if BASE in name:
            changed.setdefault(id(tensor), []).append(name)

    def merge(names: list[str]) -> Iterator[tuple[str, torch.Tensor | None]]:
        layers = [changed.get(id(state[sources[name]]), []) for name in names]
        found = tensors([each for name, own in zip(names, layers, strict=True) for each in made_of(name, own)])
        for name, own in zip(names, layers, strict=True):
            yield name, _merged(bare, own, [tensor for _, tensor in islice(found, len(made_of(name, own)))])

    def made_of(name: str, own: list[str]) -> list[str]:
        """Return the names of the tensors that a tensor of the merged model is made of: itself, and the adapters' own."""
        return [sources[name], *(each for source in own for each in _adapter(bare, source))]

    return merge


def _adapter(bare: Any, source: str) -> list[str]:
    """Return the names of the other tensors of a layer that has an adapter."""
    path = source.partition(BASE)[0]
    return [name for own in bare.get_submodule(path).state_dict() if (name := f"{path}.{own}") != source]


def _merged(bare: Any, own: list[str], found: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Return a tensor of the merged model, changed by each layer in `own` that has it; None where its parts are None."""
    tensor, *rest = found
    found.clear()
    if tensor is None or not own:
        return tensor
    tensor = tensor.clone()  # merging changes a layer in place, which may be what the trained model has
    for source in own:
        names = _adapter(bare, source)
        path, _, name = source.partition(BASE)
        state = {source.removeprefix(f"{path}."): tensor}
        for each, value in zip(names, rest, strict=False):
            assert value is not None
            state[each.removeprefix(f"{path}.")] = value.clone()
        del rest[: len(names)]
        layer = skeleton(bare.get_submodule(path))
        layer.load_state_dict(state, assign=True)
        layer.merge()
        tensor = layer.base_layer.get_parameter(name).detach()
    return tensor
