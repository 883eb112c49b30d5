"""Load what a training has left: a folder of transformers, a LoRA adapter, or a checkpoint of the shared trainer."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .checkpoints import files
from .errors import Unsupported, describe_missing

ADAPTER = "adapter_config.json"
TOKENIZER = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece")  # how a tokenizer's files begin
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_CLASSIFIER = "ForSequenceClassification"


@dataclass
class Saved:
    """A trained model in eval mode, and its tokenizer."""

    model: Any
    tokenizer: Any
    classifies: bool  # texts; else it is a language model


@dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint of a run."""

    step: int
    path: Path
    complete_model: bool  # a folder of transformers; else the state of the shared trainer


def load(folder: Path, base: str, dtype: torch.dtype, device: torch.device) -> Saved:
    """Return the model of a folder; raises Unsupported for what is none.

    Args:
        folder: what `save_pretrained` of transformers or peft has written, the tokenizer's too.
        base: where the pretrained model of an adapter is; "" is what the adapter names.
    """
    from transformers import AutoTokenizer

    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    there = f"it has {', '.join(names[:5])}" if names else "it is empty"
    if ADAPTER in names:
        model, base = _adapted(folder, base, dtype)
    elif "config.json" in names:
        model, base = _whole(str(folder), dtype), ""
    else:
        raise Unsupported(f"{folder} is no model of transformers: neither config.json nor {ADAPTER} is in it; {there}")
    source = str(folder)
    if not any(name.startswith(TOKENIZER) for name in names):
        if not base:
            raise Unsupported(f"{folder} has no tokenizer: save it there too (tokenizer.save_pretrained); {there}")
        print(f"the adapter's folder has no tokenizer: that of {base} is used", flush=True)
        source = base
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise Unsupported(f"the tokenizer of {source} cannot be loaded: {describe_missing(source, error)}") from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    classifies = _kind(model.config, str(folder)) == _CLASSIFIER
    return Saved(model.to(device).eval(), tokenizer, classifies)


def _whole(name: str, dtype: torch.dtype) -> Any:
    """Return a model of transformers with all its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    auto: Any
    try:
        classifies = _kind(AutoConfig.from_pretrained(name), name) == _CLASSIFIER
        auto = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
        model, info = auto.from_pretrained(name, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise Unsupported(f"the model {name} cannot be loaded: {describe_missing(name, error)}") from None
    if missing := sorted(info["missing_keys"]):  # transformers draws them at random and only warns
        raise Unsupported(
            f"{name} does not contain the weights of {len(missing)} parameters of the model, such as {missing[0]}"
        )
    return model


def _adapted(folder: Path, base: str, dtype: torch.dtype) -> tuple[Any, str]:
    """Return the pretrained model with the folder's adapter in it, and where the former is."""
    try:
        from peft import PeftModel
    except ImportError:
        raise Unsupported("an adapter needs the package peft (pip install peft)") from None
    try:
        described = json.loads((folder / ADAPTER).read_bytes())
        base = base or str(described["base_model_name_or_path"] or "")
        kind = described.get("task_type")
    except (ValueError, KeyError, TypeError) as error:
        raise Unsupported(f"{folder / ADAPTER} cannot be read ({type(error).__name__})") from None
    if os.path.isabs(base) and not os.path.isdir(base):
        hint = "name it with --base, or save the merged model (merge_adapter of the shared trainer)"
        raise Unsupported(f"the pretrained model of the adapter, {base}, is not on this machine: {hint}")
    bare = _bare_classifier(folder, base, dtype) if kind == "SEQ_CLS" else _whole(base, dtype)
    try:
        return PeftModel.from_pretrained(bare, str(folder)), base
    except (OSError, ValueError, RuntimeError) as error:
        raise Unsupported(f"the adapter of {folder} does not fit {base}: {_first_line(error)}") from None


def _bare_classifier(folder: Path, base: str, dtype: torch.dtype) -> Any:
    """Return a classifier whose head comes with the adapter: it has as many classes as that."""
    from safetensors import safe_open
    from transformers import AutoModelForSequenceClassification

    auto: Any = AutoModelForSequenceClassification
    try:
        with safe_open(str(folder / "adapter_model.safetensors"), "pt") as file:
            heads = [name for name in file.keys() if re.search(r"(score|classifier|out_proj)\.weight$", name)]  # noqa: SIM118
            classes = file.get_slice(heads[-1]).get_shape()[0]
        return auto.from_pretrained(base, dtype=dtype, num_labels=classes)
    except (OSError, ValueError, IndexError) as error:
        raise Unsupported(f"the classes of the adapter {folder} are not known: {_first_line(error)}") from None


def _kind(config: Any, name: str) -> str:
    """Return the end of the architecture's name; raises Unsupported for what no evaluation here is for."""
    architecture = (config.architectures or [""])[0]
    for end in (*_CAUSAL, _CLASSIFIER):
        if architecture.endswith(end):
            return end
    what = f"a {architecture}" if architecture else "of no known architecture"
    raise Unsupported(f"{name} is {what}: language models and classifiers of texts can be evaluated")


def find_checkpoints(folder: Path) -> list[SavedCheckpoint]:
    """Return a run's complete checkpoints, of each step the newest, in the order of their steps.

    What is left out is printed. Raises Unsupported when none is left.
    """
    found: dict[int, SavedCheckpoint] = {}
    for checkpoint in files.find(folder):  # the newest attempt first
        if checkpoint.step in found:
            continue
        problem = files.damage(checkpoint.path) or _unreadable(checkpoint.path)
        if problem:
            print(f"checkpoint {checkpoint.path.name} is left out: {problem}", flush=True)
        else:
            found[checkpoint.step] = SavedCheckpoint(checkpoint.step, checkpoint.path, _has_model(checkpoint.path))
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        number = re.search(r"(\d+)$", path.name)  # checkpoint-500 of transformers' Trainer
        if number and not files.NAME.fullmatch(path.name) and _has_model(path):
            found.setdefault(int(number[1]), SavedCheckpoint(int(number[1]), path, True))
    if not found:
        raise Unsupported(f"{folder} has no checkpoint that can be read as a model")
    return [found[step] for step in sorted(found)]


def _has_model(path: Path) -> bool:
    return any((path / name).is_file() for name in ("config.json", ADAPTER))


def _unreadable(path: Path) -> str:
    if _has_model(path) or (path / "state" / ".metadata").is_file():
        return ""
    return "it is of DeepSpeed's own format, or of another tool"


def read_checkpoint(saved: Saved, checkpoint: SavedCheckpoint) -> None:
    """Put the weights of a checkpoint of the shared trainer into the model; raises Unsupported where they do not fit."""
    import warnings

    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as load_state

    state = {"model": get_model_state_dict(saved.model)}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load_state(state, checkpoint_id=checkpoint.path / "state", no_dist=True)
    except (CheckpointException, RuntimeError, ValueError, OSError) as error:
        raise Unsupported(
            f"checkpoint {checkpoint.path.name} does not fit the run's model (was an adapter merged?): {_first_line(error)}"
        ) from None
    set_model_state_dict(saved.model, state["model"])
    saved.model.eval()


def checkpoints_with_models(
    found: list[SavedCheckpoint], last: Saved, base: str, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[SavedCheckpoint, Saved]]:
    """Yield each checkpoint with its model; `last`, the run's own model, holds other weights afterwards."""
    for checkpoint in found:
        if checkpoint.complete_model:
            yield checkpoint, load(checkpoint.path, base, dtype, device)
        else:
            read_checkpoint(last, checkpoint)
            yield checkpoint, last


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
