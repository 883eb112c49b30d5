"""The scripts that are run, what their logs look like, and where what they save is found."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloudtrain.events import State

LAYOUTS: dict[str, tuple[str, ...]] = {"one": (), "two": ("--nproc", "2"), "nodes": ("--num-nodes", "2")}
LIGHTNING = {  # it wants to be told the world, as everywhere else
    "one": (),
    "two": ("--nproc", "2", "--set", "hyperparameters.devices=2"),
    "nodes": ("--num-nodes", "2", "--set", "hyperparameters.num_nodes=2"),
}
RANK = r"rank (\d+) of (\d+) done"


@dataclass(frozen=True)
class Case:
    """One folder below scripts/: a script in the shape of a public one, and its job file.

    loss      finds `step` and `loss` in a line of rank 0
    kill_at   after how many such lines the script is killed
    resumes   exact: a second attempt ends with the unbroken run's loss; close: it continues, with other random numbers;
              anew: it starts at the first step again
    model     below the folder that fetch fills; `read` returns a number of it, which `printed` finds in the log
    layouts   name -> the words that submit gets
    ranks     finds a rank's number and the size of its world in a line; None where the script prints none
    files     a pattern of files below what was fetched, one of each rank; "" where ranks write none
    starts    ranks that the command itself starts on each node; 0: the job's
    metric    the name that the history has for what `loss` finds; None where its steps are not compared
    ending    LOST: all processes are killed at once; PREEMPTED: the nodes get the notice that their machines go
    """

    loss: str
    kill_at: int
    resumes: str
    model: str
    read: Callable[[Path], float]
    printed: str | None = r"parameter norm ([\d.]+)"
    needs: tuple[str, ...] = ("torch",)
    layouts: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: LAYOUTS)
    ranks: str | None = RANK
    files: str = ""
    starts: int = 0
    ending: State = State.LOST
    metric: str | None = None


def only(*names: str) -> dict[str, tuple[str, ...]]:
    """Return some of the layouts."""
    return {name: LAYOUTS[name] for name in names}


def norm(tensors: Iterable[Any]) -> float:
    """Return the root of the sum of squares, as the scripts print it."""
    return math.sqrt(sum(float(tensor.detach().double().pow(2).sum()) for tensor in tensors))


def saved(*keys: str) -> Callable[[Path], float]:
    """Return what reads the norm of a state dict that torch.save wrote, below some keys."""

    def read(path: Path) -> float:
        import torch

        state = torch.load(path, weights_only=False)
        for key in keys:
            state = state[key]
        return norm(value for name, value in state.items() if name.endswith(("weight", "bias")))

    return read


def pretrained(kind: str) -> Callable[[Path], float]:
    """Return what reads the norm of a folder that save_pretrained wrote, by the name of its class in transformers."""

    def read(path: Path) -> float:
        import transformers

        return norm(getattr(transformers, kind).from_pretrained(path).parameters())

    return read


def adapter(path: Path) -> float:
    """Return the norm of the adapters that PEFT saved."""
    from safetensors.torch import load_file

    return norm(load_file(path / "adapter_model.safetensors").values())


def engine(path: Path) -> float:
    """Return the norm of the model in the checkpoint that DeepSpeed's file `latest` names."""
    return saved("module")(path / (path / "latest").read_text() / "mp_rank_00_model_states.pt")


def accuracy(path: Path) -> float:
    """Return what a forest of scikit-learn gets right of the digits that it has not seen."""
    import joblib
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    _, inputs, _, labels = train_test_split(*load_digits(return_X_y=True), random_state=0)
    return float(joblib.load(path).score(inputs, labels))


TRAINER = r"'loss': '?(?P<loss>[\d.e-]+).*'epoch': '?(?P<step>[\d.e-]+)"
HF = ("transformers", "accelerate")
CLASSIFIER, CAUSAL = pretrained("AutoModelForSequenceClassification"), pretrained("AutoModelForCausalLM")
CASES = {
    "accelerate_nlp": Case(
        r"step (?P<step>\d+): loss (?P<loss>[\d.]+)", 40, "exact", "model", CLASSIFIER, needs=HF, metric="loss",
    ),
    "ddp_tutorial": Case(
        r"\[GPU0\] Epoch (?P<step>\d+) .*Loss: (?P<loss>[\d.]+)", 3, "exact", "model/model.pt", saved(), metric="loss",
    ),
    "deepspeed": Case(
        r"\[ (?P<step>\d+) \] loss: (?P<loss>[\d.]+)", 2, "exact", "checkpoints", engine, needs=("deepspeed",)
    ),
    "fsdp": Case(
        r"Step (?P<step>\d+), Loss: (?P<loss>[\d.]+)", 30, "exact", "model/model.pt", saved(), starts=2,
        layouts=only("one", "nodes"), ranks=r"rank (\d+) of (\d+) holds", metric="loss"
    ),
    "hydra": Case(
        r"epoch=(?P<step>\d+) loss=(?P<loss>[\d.]+)", 1, "anew", "outputs/model.pt", saved(), needs=("hydra", "torch"),
        metric="loss",
    ),
    "imagenet": Case(
        r"Epoch: \[(?P<step>\d+)\]\[ 30/.*Loss (?P<loss>[\d.e+-]+)", 3, "exact", "outputs/checkpoint.pth.tar",
        saved("state_dict"), ending=State.PREEMPTED, metric="loss"
    ),
    "lightning": Case(
        r"epoch=\d+ step=(?P<step>\d+) train_loss=(?P<loss>[\d.]+)", 2, "exact", "checkpoints/checkpoints/last.ckpt",
        saved("state_dict"), needs=("lightning",), layouts=LIGHTNING, metric="train_loss"
    ),
    "mnist": Case(
        r"Train Epoch: (?P<step>\d+) \[3840.*Loss: (?P<loss>[\d.]+)", 2, "anew", "outputs/mnist_cnn.pt", saved(),
        layouts=only("one"), ranks=None, metric="loss",
    ),
    "nanogpt": Case(
        r"iter (?P<step>\d+): loss (?P<loss>[\d.]+)", 210, "close", "checkpoints/ckpt.pt", saved("model"), None,
        layouts=only("one"), ranks=None, metric="loss"
    ),
    "peft_lora": Case(TRAINER, 15, "exact", "checkpoints/adapter", adapter, needs=(*HF, "peft"), metric="loss"),
    "run_clm": Case(
        TRAINER, 15, "exact", "checkpoints", CAUSAL, None, needs=(*HF, "datasets"),
        ranks=r"Process rank: (\d+), world size: (\d+)", metric="loss",
    ),
    "sagemaker_pytorch": Case(
        r"Train Epoch: (?P<step>\d+) .*\(100%\)\] Loss: (?P<loss>[\d.]+)", 2, "anew", "model/model.pth", saved(),
        layouts=only("one", "nodes"), metric="loss"
    ),
    "sklearn": Case(
        r"round (?P<step>\d+): .*accuracy=(?P<loss>[\d.]+)", 3, "anew", "model/model.joblib", accuracy,
        r"accuracy=([\d.]+)", needs=("sklearn",), layouts=only("one"), ranks=None, metric="accuracy"
    ),
    "trainer_bare": Case(TRAINER, 3, "anew", "model", CLASSIFIER, needs=HF, metric="loss"),
    "trl_sft": Case(
        TRAINER, 10, "exact", "checkpoints", CAUSAL, None, needs=(*HF, "trl"), ranks=None,
        files="checkpoints/checkpoint-40/rng_state*.pth", metric="loss"
    ),
}  # fmt: skip
