"""Model and data in memory become files of a job's source, and the trained model is loaded from what comes back.

A transformers model that its configuration makes again, and a `datasets.Dataset`, are saved as files of their own kinds.
All else is pickled on the user's machine, with the classes of the script, notebook and own modules in it (pickling.py;
entrypoints/trainer/pickled.py reads it). Parameters, large tensors and arrays are in a file beside it, which a rank maps.
What comes back is safetensors: nothing that a node wrote is unpickled.
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import BadRequest
from cloudtrain.source.node_code import module
from cloudtrain.training import pickling

if TYPE_CHECKING:
    from cloudtrain.runs.run import Run

LARGE_BYTES = 1 << 30  # of what is sent: more gets a line, every node receives its own copy
HELD_BYTES = 1 << 28  # of what each rank holds in memory: more gets a line
HIDDEN = 64  # width of a synthetic model


def make_synthetic(model: Any, data: Any, seed: int) -> tuple[str, Any, Any]:
    """Return name, module and data of two classes that a plane parts, all but some; raises BadRequest."""
    import torch

    if not (isinstance(model, Mapping) and isinstance(data, Mapping)):
        raise BadRequest(
            "one of model and data is a dictionary: a test with generated data needs both dictionaries",
            'model={"model_name": "net"}, data={"samples": 1000}; otherwise pass a module and a dataset',
        )
    if strange := [*(model.keys() - {"model_name"}), *(data.keys() - {"samples", "features"})]:
        raise BadRequest(f"a synthetic training has no option {strange[0]}", "use model_name, samples and features")
    samples, features = data.get("samples", 1000), data.get("features", 16)
    for name, value in (("samples", samples), ("features", features)):
        if not isinstance(value, int) or value < 1:
            raise BadRequest(f"{name} must be a whole number above 0, not {value!r}")
    if samples * features * 4 > LARGE_BYTES:
        raise BadRequest(
            f"{samples:,} samples of {features:,} features are over {LARGE_BYTES >> 30} GiB, the most that is made up",
            "lower samples or features, or give data of your own, which has no limit",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = torch.nn.Sequential(torch.nn.Linear(features, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 2))
        torch.manual_seed(seed)
        inputs, plane = torch.randn(samples, features), torch.randn(features)
        classes = inputs @ plane + torch.randn(samples) * features**0.5 * 0.1 > 0
    name = str(model.get("model_name", "synthetic"))
    return name, made, torch.utils.data.TensorDataset(inputs, classes.long())


def sizes_of(model: Any, loss: Any) -> dict[str, Any]:
    """Return the hyperparameters of a language model that is trained on its labels; of any other model none."""
    if (
        loss is not None
        or not type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        or not type(model).__module__.startswith("transformers.")
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


def ship(folder: Path, model: Any, datasets: Mapping[str, Any], parts: Mapping[str, Any]) -> list[str]:
    """Write what the ranks need below a folder and return what the user may want to know, a sentence each.

    Raises:
        BadRequest: something cannot be pickled, or there is no room for it.
    """
    import cloudpickle

    shipped = folder / "shipped"
    shipped.mkdir()
    notes = []
    rest = {name: part for name, part in parts.items() if part is not None}
    try:
        if rebuilds(model):
            model.save_pretrained(shipped / "model")
            if frozen := [name for name, each in model.named_parameters() if not each.requires_grad]:
                (shipped / "frozen.json").write_text(json.dumps(frozen), "utf-8")
        else:
            rest["model"] = model
            if reason := pickling.own_kind(model):
                notes.append(f"each rank loads the whole model: {reason}")
        for name, data in datasets.items():
            listed = type(data).__module__.startswith("datasets.") and hasattr(data, "save_to_disk")
            if listed and "transform" not in data.format["format_kwargs"]:  # a function, which its files cannot have
                data.save_to_disk(shipped / name)
            elif data is not None:
                rest[name] = data
        if rest:
            if (held := pickling.dump(rest, shipped)) > HELD_BYTES:
                notes.append(
                    f"each rank holds {held / 1e9:,.1f} GB of objects in memory, such as texts: tensors, arrays and "
                    "lists of samples are read from files instead"
                )
            own, ignore = Path(cloudpickle.__file__).parent, shutil.ignore_patterns("__pycache__")
            shutil.copytree(own, folder / "cloudpickle", ignore=ignore)
    except OSError as error:
        raise BadRequest(f"model and data cannot be written in {folder.parent}: {error}", "set TMPDIR") from error
    size = sum(file.stat().st_size for file in shipped.rglob("*") if file.is_file())
    if size > LARGE_BYTES:
        notes.append(f"model and data take {size / 1e9:,.1f} GB of the bundle, of which every node receives a copy")
    return notes


def rebuilds(model: Any) -> bool:
    """Return whether a model of transformers is, but for its values, what its class makes of its configuration."""
    import torch

    if not (type(model).__module__.startswith("transformers.") and hasattr(model, "save_pretrained")):
        return False
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    changed = any(any(map(vars(each).get, hooks)) or "forward" in vars(each) for each in model.modules())
    checkpointing = any(getattr(each, "gradient_checkpointing", False) for each in model.modules())
    if changed or checkpointing or model.config._attn_implementation not in (None, "sdpa"):
        return False
    if not module("trainer.publish").saves_in_parts(model):  # its files have other tensors than the model
        return False
    try:
        with torch.device("meta"):
            again = type(model)(copy.deepcopy(model.config))
    except Exception:  # of the constructor of any model
        return False

    def outline(of: Any) -> list[tuple[str, Any]]:
        return [(name, each.shape) for name, each in of.state_dict().items()]

    classes = [type(each) for each in model.modules()]
    return classes == [type(each) for each in again.modules()] and outline(model) == outline(again)


def load(run: Run, model: Any) -> None:
    """Put what the run has trained into the model, one tensor after the other."""
    with tempfile.TemporaryDirectory(prefix="cloudtrain-") as folder:
        put(run.fetch(Path(folder) / "run", ["model"]) / "model", model)


def put(folder: Path, model: Any) -> None:
    """Put what is in a trained model's folder into the model."""
    if (adapter := folder / "adapter_model.safetensors").exists():
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        set_peft_model_state_dict(model, load_file(adapter))
    elif not read_values(model, folder):  # transformers gives the tensors of some models other names in files
        model.load_state_dict(type(model).from_pretrained(folder).state_dict())


def read_values(model: Any, folder: Path) -> bool:
    """Put the tensors of a folder's safetensors files into a model; return False, before any, where names differ."""
    import torch
    from safetensors import safe_open

    state = model.state_dict(keep_vars=True)
    with ExitStack() as opened:
        files = [opened.enter_context(safe_open(path, "pt")) for path in sorted(folder.glob("*.safetensors"))]
        names = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        held = {id(state[name]) for name in names if name in state}
        ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
        missing = [name for name, each in state.items() if id(each) not in held and name not in ignored]
        known = {state[name].data_ptr() for name in names if name in state}
        if any(state[name].data_ptr() not in known for name in missing) or names.keys() - state.keys():
            return False
        with torch.no_grad():
            for name, file in names.items():
                state[name].copy_(file.get_tensor(name))
    return True
