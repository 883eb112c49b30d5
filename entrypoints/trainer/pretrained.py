"""Find the tensors of a pretrained model in its safetensors files, to be read in slices."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from . import collectives

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class Whole(Exception):
    """The model has to be built with its values by transformers itself; str() says why."""


@dataclass
class Files:
    """The tensors of a pretrained model: the file of each."""

    name: str
    tensors: dict[str, Path]
    opened: dict[Path, Any] = field(default_factory=dict)

    def slice(self, key: str) -> Any:
        """Return a tensor of which indexing reads a part; the file is mapped, not read."""
        from safetensors import safe_open

        path = self.tensors[key]
        if path not in self.opened:
            self.opened[path] = safe_open(path, framework="pt")
        return self.opened[path].get_slice(key)

    def match(self, model: Any, mismatched: bool) -> dict[int, Callable[[], Any]]:
        """Return what reads the parameters that the files have, by the parameter's id, and fill in the buffers.

        Names are those that transformers reads them by. Raises Whole where it would do more than rename tensors.

        Args:
            mismatched: whether a tensor of another shape is drawn instead, for a new head.
        """
        state = model.state_dict(keep_vars=True)
        found: dict[int, str] = {}
        unused = []
        renamed = _renaming(model)
        for key in self.tensors:
            tensor = state.get(renamed(key))
            if tensor is None or list(tensor.shape) != self.slice(key).get_shape():
                if tensor is not None and not mismatched:
                    raise Whole(f"{key} of {self.name} has another shape than the model")
                unused.append(key)
            elif found.setdefault(id(tensor), key) != key:
                raise Whole(f"{self.name} has two tensors, {found[id(tensor)]} and {key}, for one of the model")
            elif not tensor.is_meta:
                tensor.copy_(self.slice(key)[...])
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
        unused = [key for key in unused if not any(re.search(pattern, key) for pattern in ignored)]
        drawn = [name for name, each in model.named_parameters() if id(each) not in found]
        if not found:
            raise Whole(f"{self.name} has no tensor with a name of this model")
        if collectives.rank() == 0:
            for names, what in ((drawn, "drawn, as the files have none"), (unused, "in the files and not used")):
                if names:
                    print(f"{len(names)} tensors of {self.name} are {what}: {_few(names)}", flush=True)
        return {key: partial(self.slice, name) for key, name in found.items()}


def find(name: str) -> Files:
    """Return the files of a model in a folder or on the hub; raises Whole where it is stored in another way."""
    from transformers.utils import cached_file

    def file(path: str) -> Path | None:
        found = cached_file(name, path, _raise_exceptions_for_missing_entries=False)
        return None if found is None else Path(found)

    if file("adapter_config.json"):
        raise Whole(f"{name} is an adapter")
    if path := file(WEIGHTS):
        from safetensors import safe_open

        with safe_open(path, framework="pt") as opened:
            return Files(name, dict.fromkeys(opened.keys(), path))
    if not (index := file(INDEX)):
        raise Whole(f"{name} has no {WEIGHTS}")
    places: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
    paths = {each: file(each) for each in set(places.values())}
    if missing := [each for each, path in paths.items() if path is None]:
        raise OSError(f"{name} lacks {missing[0]}, which its index names")
    return Files(name, {key: paths[each] for key, each in places.items()})  # type: ignore[misc]


def config(name: str, more: dict[str, Any]) -> Any:
    """Return the model's configuration; raises Whole for a quantized one."""
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(name, **more)
    if getattr(found, "quantization_config", None):
        raise Whole(f"{name} is quantized")
    return found


def add_generation_config(model: Any, name: str) -> None:
    """Let the model write as its files say, if they do."""
    from transformers import GenerationConfig

    if model.can_generate():
        try:
            model.generation_config = GenerationConfig.from_pretrained(name)
        except OSError:
            return


def _renaming(model: Any) -> Callable[[str], str]:
    """Return what makes the model's name of a tensor out of that in the files; it raises Whole for what is converted."""
    if not hasattr(model, "base_model_prefix"):  # none of transformers
        return str
    state, prefix = model.state_dict(), f"{model.base_model_prefix}."
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key
    except ImportError:  # before version 5

        def rename_exactly(key: str) -> str:
            for name in (key, key.removeprefix(prefix), prefix + key):
                if name in state:
                    return name
            raise Whole(f"this version of transformers does not say what it makes of {key}")

        return rename_exactly
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters: list[Any] = [each for each in transforms if not isinstance(each, WeightRenaming)]

    def rename(key: str) -> str:
        name, converted = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if converted is not None:
            raise Whole(f"transformers converts its tensor {key}")
        return name

    return rename


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
