"""Save the trained model as safetensors, and upload it to the Hugging Face Hub."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from .errors import Unsupported


def check_token() -> None:
    """Refuse before training what could not be uploaded after it."""
    if not os.environ.get("HF_TOKEN"):
        raise Unsupported("--push_to_hub needs the secret HF_TOKEN (secrets: {HF_TOKEN: ...} in the job)")


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write the model, or its adapter alone, and the tokenizer as from_pretrained reads them; what was there is
    replaced once all is written."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.config.use_cache = True
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    folder.mkdir(parents=True, exist_ok=True)
    # File by file: the folder itself may be a mount point.
    for file in sorted(partial.iterdir()):
        shutil.move(file, folder / file.name)
    partial.rmdir()


def push(folder: Path, name: str, private: bool) -> str:
    """Upload the folder and return the repository's address; the token is HF_TOKEN."""
    from huggingface_hub import HfApi

    api = HfApi(token=os.environ["HF_TOKEN"])
    url = api.create_repo(name, private=private, exist_ok=True)
    api.upload_folder(repo_id=name, folder_path=folder, commit_message="Model trained with cloudtrain")
    return str(url)
