"""Model and data in memory become files of a job's source, and the trained model is loaded from what comes back.

A transformers model and a `datasets.Dataset` are saved as files of their own kinds. Everything else is pickled on the
user's machine, with the classes of the script, notebook and own modules in it (entrypoints/trainer/pickled.py reads it).
What comes back is safetensors: nothing that a node wrote is unpickled.
"""

from __future__ import annotations

import os
import shutil
import site
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any

from cloudtrain.errors import BadRequest

if TYPE_CHECKING:
    from cloudtrain.runs.run import Run

MAX_BYTES = 1 << 30  # of model and data together: every node gets its own copy of them
MAX_SYNTHETIC = 1 << 32  # of made-up numbers, which every rank holds in memory
HIDDEN = 64  # width of a synthetic model
HERE = "save the data to a bucket (save_to_disk of `datasets`) and pass its URI, or write a job with `inputs`"


def check(model: Any, data: Any) -> None:
    """Raise BadRequest for what is no model, or no dataset."""
    import torch

    if not isinstance(model, torch.nn.Module):
        raise BadRequest(
            f"a {type(model).__name__} is not a model that can be trained",
            'pass a torch module, or {"model_name": ...} for a synthetic one',
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise BadRequest(f"{type(model).__name__} has no parameter to train")
    if isinstance(data, str):
        return
    if not isinstance(data, torch.utils.data.IterableDataset) and not (
        hasattr(data, "__len__") and hasattr(data, "__getitem__")
    ):
        raise BadRequest(
            f"a {type(data).__name__} is not a map-style dataset and not an IterableDataset",
            "pass a dataset with __len__ and __getitem__, such as a list",
        )
    first = next(iter(data), None) if isinstance(data, torch.utils.data.IterableDataset) or not len(data) else data[0]
    if first is None:
        raise BadRequest("the dataset is empty")
    if not isinstance(sample := first, list | tuple | Mapping):
        raise BadRequest(
            f"a sample of the data is a {type(sample).__name__}, which cannot be trained on",
            "return (input, ..., target), or a dictionary with labels",
        )


def make_synthetic(model: Any, data: Any) -> tuple[str, Any, dict[str, int]]:
    """Return name, module and hyperparameters of what two dictionaries ask for; raises BadRequest."""
    import torch

    if not (isinstance(model, Mapping) and isinstance(data, Mapping)):
        raise BadRequest(
            "one of model and data is a dictionary: a test with generated data needs both dictionaries",
            'model={"model_name": "net"}, data={"samples": 1000}; otherwise pass a module and a dataset',
        )
    if strange := [*(model.keys() - {"model_name"}), *(data.keys() - {"samples", "features"})]:
        raise BadRequest(f"a synthetic training has no option {strange[0]}", "use model_name, samples and features")
    sizes = {"samples": data.get("samples", 1000), "features": data.get("features", 16)}
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise BadRequest(f"{name} must be a whole number above 0, not {value!r}")
    if sizes["samples"] * sizes["features"] * 4 > MAX_SYNTHETIC:
        raise BadRequest(
            f"{sizes['samples']:,} samples of {sizes['features']:,} features are over {MAX_SYNTHETIC >> 30} GiB",
            "use fewer samples",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = torch.nn.Sequential(
            torch.nn.Linear(sizes["features"], HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 2)
        )
    return str(model.get("model_name", "synthetic")), made, sizes


def sizes_of(model: Any, loss: Any) -> dict[str, Any]:
    """Return the hyperparameters of a language model that is trained on its labels; of any other model none."""
    if (
        loss is not None
        or not type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        or not _of_transformers(model)
    ):
        return {}
    config, heads = model.config, model.config.num_attention_heads
    own_heads = getattr(config, "num_key_value_heads", None) or heads
    return {
        "language_model": True,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": own_heads,
    }


def ship(folder: Path, model: Any, datasets: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Write what the ranks need below a folder; raises BadRequest when it is too large or cannot be pickled."""
    import cloudpickle

    shipped = folder / "shipped"
    shipped.mkdir()
    rest = {name: part for name, part in parts.items() if part is not None}
    if _of_transformers(model):
        model.save_pretrained(shipped / "model")
    else:
        rest["model"] = _on_cpu(model)
    for name, data in datasets.items():
        if type(data).__module__.startswith("datasets.") and hasattr(data, "save_to_disk"):
            data.save_to_disk(shipped / name)
        elif data is not None:
            rest[name] = data
    if rest:
        with open(shipped / "parts.pkl", "wb") as stream, _own_modules_by_value():
            try:
                cloudpickle.dump(rest, _Bounded(stream))
            except BadRequest:
                raise
            except Exception as error:  # whatever an object's own __reduce__ raises
                raise BadRequest(f"model or data cannot be pickled: {type(error).__name__}: {error}") from error
        shutil.copytree(
            Path(cloudpickle.__file__).parent, folder / "cloudpickle", ignore=shutil.ignore_patterns("__pycache__")
        )
    size = sum(file.stat().st_size for file in shipped.rglob("*") if file.is_file())
    if size > MAX_BYTES:
        raise BadRequest(_too_large(), HERE)


class _Bounded:
    """A file to write to that refuses to grow beyond what may be sent."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream, self.left = stream, MAX_BYTES

    def write(self, piece: Any) -> int:
        self.left -= memoryview(piece).nbytes
        if self.left < 0:
            raise BadRequest(_too_large(), HERE)
        return self.stream.write(piece)


def _too_large() -> str:
    return f"model and data are over {MAX_BYTES >> 20:,} MiB, and every node would receive a copy"


def _of_transformers(model: Any) -> bool:
    """Return whether a model is a class of the library itself, which loads again without a pickle."""
    return type(model).__module__.startswith("transformers.") and hasattr(model, "save_pretrained")


def _on_cpu(model: Any) -> Any:
    if all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers())):
        return model
    from copy import deepcopy

    return deepcopy(model).to("cpu")


@contextmanager
def _own_modules_by_value() -> Iterator[None]:
    """Let classes of the user's own modules be pickled whole: the nodes have what is installed, and no more."""
    import cloudpickle

    installed = _installed()
    before = cloudpickle.list_registry_pickle_by_value()
    mine = [
        module
        for name, module in list(sys.modules.items())
        if name not in before
        and _is_own(name, module)
        and not os.path.realpath(str(module.__file__)).startswith(installed)
    ]
    for module in mine:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in mine:
            cloudpickle.unregister_pickle_by_value(module)


def _is_own(name: str, module: Any) -> bool:
    """Return whether a module is a file's, and not ours; the script itself is pickled by value anyhow."""
    return (
        isinstance(module, ModuleType)
        and bool(getattr(module, "__file__", None))
        and module.__name__ == name
        and name != "__main__"
        and name.partition(".")[0] != "cloudtrain"
    )


def _installed() -> tuple[str, ...]:
    """Return the folders of what is installed, and of Python itself."""
    paths = {path for name, path in sysconfig.get_paths().items() if name.endswith("lib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages()}
    return tuple(os.path.realpath(path) + os.sep for path in paths)


def load(run: Run, model: Any) -> None:
    """Put what the run has trained into the model."""
    from safetensors.torch import load_model

    with tempfile.TemporaryDirectory(prefix="cloudtrain-") as folder:
        fetched = run.fetch(Path(folder) / "run", ["model"])
        load_model(model, fetched / "model" / "model.safetensors")
