"""Publish the trained model in the run's folder, and upload it to the Hugging Face Hub."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from . import collectives, lora
from .errors import Unsupported
from .tensor_files import TensorFormat, write

if TYPE_CHECKING:
    import torch


class Unwritten(Exception):
    """The trained model could not be written; str() says where and why."""


SMALL_BYTES = 2**30  # of a model that one rank may load to write a sample of its text


def check_token() -> None:
    """Refuse before training what could not be uploaded after it."""
    if not os.environ.get("HF_TOKEN"):
        raise Unsupported("--push_to_hub needs the secret HF_TOKEN (secrets: {HF_TOKEN: ...} in the job)")


def save(model: Any, tokenizer: Any, folder: Path, epoch: int, check_current: Callable[[], None]) -> None:
    """Write the model, or its adapter alone, as from_pretrained reads it, or else its state alone, and the tokenizer.

    What was in the folder is replaced once all is written. A start that was replaced publishes nothing: `check_current`
    raises Unsupported, or `withdraw` has removed what it wrote.
    """
    from safetensors.torch import save_model

    with _published(folder, epoch, check_current) as partial:
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(partial)
        else:
            save_model(model, str(partial / "model.safetensors"))
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)


def saves_in_parts(model: Any, merge: bool = False) -> bool:
    """Return whether a model can be written tensor by tensor as it would be written whole.

    Args:
        model: its values are not used; None where it is to be written whole.
        merge: whether its adapter is merged into it.
    """
    import torch
    from transformers import PreTrainedModel

    if model is None:
        return False
    if lora.is_adapted(model):
        return not merge or saves_in_parts(lora.parted(model)[0])
    if not isinstance(model, PreTrainedModel):
        state = model.state_dict()  # its modules may keep more than tensors there
        return not hasattr(model, "save_pretrained") and all(isinstance(each, torch.Tensor) for each in state.values())
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # before version 5 names were never converted
        return True
    return not get_model_conversion_mapping(model, add_legacy=False)


def save_in_parts(
    bare: Any,
    tensors: Callable[[list[str]], Iterator[tuple[str, torch.Tensor | None]]],
    tokenizer: Any,
    folder: Path,
    epoch: int,
    check_current: Callable[[], None],
    merge: bool = False,
) -> None:
    """Write a model one whole tensor after the other, or its adapter alone; collective.

    Args:
        bare: the model; its values are not used.
        tensors: returns tensors by name, whole and on the CPU on rank 0, None elsewhere; collective.
        merge: whether its adapter is merged into it.
    """
    if merge:
        adapted = bare
        bare, sources = lora.parted(adapted)
        tensors = lora.merged_tensors(adapted, sources, tensors)
    elif lora.is_adapted(bare):
        names = collectives.from_rank_0(lambda: lora.adapter_names(bare))
        state = dict(tensors(names))
        if collectives.rank() == 0:
            with _published(folder, epoch, check_current) as partial:
                bare.save_pretrained(partial, state_dict=state)
                if tokenizer is not None:
                    tokenizer.save_pretrained(partial)
        return
    formats: dict[str, TensorFormat] = {}
    seen: set[int] = set()
    ignored = getattr(bare, "_keys_to_ignore_on_save", None) or ()
    for name, tensor in bare.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and name not in ignored:  # a tied one has one name
            formats[name] = TensorFormat(tuple(tensor.shape), tensor.dtype)
        seen.add(id(tensor))
    source = tensors(list(formats))
    if collectives.rank() != 0:
        for _ in source:
            pass
        return
    with _published(folder, epoch, check_current) as partial:
        write(partial, formats, cast("Iterator[tuple[str, torch.Tensor]]", source))
        if hasattr(bare, "save_pretrained"):
            bare.config.architectures = [type(bare).__name__]
            bare.config.save_pretrained(partial)
            if bare.can_generate():
                bare.generation_config.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)


def load_small(folder: Path) -> Any:
    """Return a language model that was saved, None where it takes more than SMALL_BYTES."""
    from transformers import AutoModelForCausalLM

    if sum(file.stat().st_size for file in folder.glob("*.safetensors")) > SMALL_BYTES:
        return None
    return AutoModelForCausalLM.from_pretrained(folder)


@contextmanager
def _published(folder: Path, epoch: int, check_current: Callable[[], None]) -> Iterator[Path]:
    """Give a folder to write in; what is in it then replaces what was in the model's folder."""
    partial = folder.with_name(f"{folder.name}.partial-{epoch}")
    withdraw(folder, epoch + 1)
    try:
        partial.mkdir(parents=True)
        yield partial
        check_current()
        folder.mkdir(parents=True, exist_ok=True)
        written = sorted(partial.iterdir())
        # File by file: the folder itself may be a mount point.
        for file in written:
            shutil.move(file, folder / file.name)
        partial.rmdir()
        stale = {*folder.glob("model*.safetensors"), *folder.glob("model*.safetensors.index.json")}
        for file in stale - {folder / file.name for file in written}:  # an earlier start wrote other files
            file.unlink()
    except Exception as error:
        check_current()
        if isinstance(error, OSError) or is_full(error):
            shutil.rmtree(partial, ignore_errors=True)  # it takes room that a checkpoint may need
            raise Unwritten(f"the trained model could not be written to {folder}: {error}") from None
        raise


def is_full(error: Exception) -> bool:
    """Return whether an error of a library that writes tensors is that of a full disk."""
    return any(text in str(error) for text in ("No space left", "os error 28", "Disk quota exceeded"))


def withdraw(folder: Path, epoch: int) -> None:
    """Remove what starts before this one have written and not published; they can publish it no more."""
    for partial in folder.parent.glob(f"{folder.name}.partial-*"):
        if int(partial.name.rpartition("-")[2]) < epoch:
            with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as gone, suppress(FileNotFoundError):
                partial.rename(Path(gone) / "model")


def push(folder: Path, name: str, private: bool) -> str:
    """Upload the folder and return the repository's address; the token is HF_TOKEN."""
    from huggingface_hub import HfApi

    api = HfApi(token=os.environ["HF_TOKEN"])
    url = api.create_repo(name, private=private, exist_ok=True)
    api.upload_folder(repo_id=name, folder_path=folder, commit_message="Model trained with cloudtrain")
    return str(url)
