"""Publish the trained model in the run's folder, and upload it to the Hugging Face Hub."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from .errors import Unsupported


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

    partial = folder.with_name(f"{folder.name}.partial-{epoch}")
    withdraw(folder, epoch + 1)
    partial.mkdir(parents=True)
    try:
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(partial)
        else:
            save_model(model, str(partial / "model.safetensors"))
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        check_current()
        folder.mkdir(parents=True, exist_ok=True)
        # File by file: the folder itself may be a mount point.
        for file in sorted(partial.iterdir()):
            shutil.move(file, folder / file.name)
        partial.rmdir()
    except Exception:
        check_current()
        raise


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
