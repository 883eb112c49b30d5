"""What cannot be trained is refused with one sentence before anything is sent, and what can is not."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.data import Dataset, IterableDataset

from cloudtrain import DistributedTraining
from cloudtrain.errors import BadRequest, CloudtrainError
from cloudtrain.training import checks

ROW = {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}
DATA = [(torch.ones(4), torch.ones(1))] * 8


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only, self.norm = torch.nn.Linear(4, 1), torch.nn.BatchNorm1d(1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.only(inputs))


class NoForward(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = torch.nn.Linear(4, 1)


class Broken(Net):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs[:, :3])


class Half(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spare = torch.nn.Linear(1, 1)


class Torn(Dataset):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> object:
        return DATA[0] if index < 49 else open("/nowhere/row")  # noqa: SIM115


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


def language_model(kind: str = "llama"):
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2))
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))


def headless() -> torch.nn.Module:
    return language_model().model


def rows(last: dict) -> list[dict]:
    return [ROW] * 7 + [last]


def on_meta() -> torch.nn.Module:
    with torch.device("meta"):
        return Net()


REFUSED = {
    "no forward": ({"model": NoForward}, 'NotImplementedError: Module .NoForward. is missing the required "forward"'),
    "shapes": (
        {"model": Broken},
        r"mat1 and mat2 shapes cannot be multiplied \(8x3 and 4x1\) \(.*test_checks.py:\d+\)",
    ),
    "without values": ({"model": on_meta}, "only.weight of Net is on the meta device and has no values"),
    "without shapes": ({"model": lambda: torch.nn.LazyLinear(1)}, "weight of LazyLinear has no shape yet"),
    "unused by ddp": (
        {"model": Half, "nodes": 2},
        "2 trained parameters take no part in the loss, such as spare.weight",
    ),
    "torn at its end": (
        {"data": Torn()},
        "the data set data cannot be read on this machine, sample 49: FileNotFoundError",
    ),
    "unequal keys": (
        {"model": language_model, "data": rows({"input_ids": [1]})},
        "sample 7 of data has the keys input_ids, sample 0 has the keys input_ids, labels",
    ),
    "unequal lengths": (
        {"model": language_model, "data": rows({"input_ids": [1], "labels": [1]})},
        "no batch can be made of the first 8 samples: RuntimeError: stack expects",
    ),
    "unequal items": ({"data": [*DATA, (1, 2, 3)]}, "sample 8 of data has 3 items, sample 0 has 2 items"),
    "no loss": (
        {"model": headless, "data": [{"input_ids": torch.tensor([1, 2])}] * 8},
        "ValueError: LlamaModel returns no loss for input_ids: pass loss=, or labels in each sample",
    ),
    "a name as loss": ({"loss": "mse"}, "loss must be a function, not a str"),
    "a loss of one argument": (
        {"loss": lambda outputs: outputs.mean()},
        "takes 1 positional argument but 2 were given",
    ),
    "a loss for each sample": ({"loss": lambda outputs, target: outputs - target}, r"the loss has the shape \(8, 1\)"),
    "a loss without gradient": ({"loss": lambda outputs, target: target.mean()}, "does not depend on the model's"),
    "a number as loss": ({"loss": lambda outputs, target: 1.0}, "the loss is a float, not a tensor"),
    "an optimizer that was made": (
        {
            "optimizer": object.__new__(torch.optim.SGD)
        },  # made whole it imports the compiler, seconds at each collection
        "optimizer must be a function, not a SGD",
    ),
    "no optimizer": ({"optimizer": list}, "optimizer returns a list"),
    "no collate": ({"collate": lambda: 1}, "no batch can be made of the first 8 samples: TypeError"),
    "a stream held out": ({"eval_data": Stream()}, "eval_data is an IterableDataset, which has no length"),
    "held-out samples of another width": (
        {"eval_data": [(torch.ones(5), torch.ones(1))] * 8},
        "the model cannot be evaluated on the first 8 samples of eval_data: RuntimeError: mat1 and mat2",
    ),
    "held-out samples of unequal width": (
        {"eval_data": [(torch.ones(4), torch.ones(1)), (torch.ones(3), torch.ones(1))]},
        "no batch can be made of the first 2 samples of eval_data: RuntimeError: stack expects",
    ),
    "a misspelt argument": ({"learning_rat": 1e-2}, "learning_rat is not an argument of train_distributed"),
    "nothing held out": ({"eval_data": []}, "eval_data is empty"),
    "fp16 without a GPU": ({"fp16": True}, "fp16 needs a GPU"),
    "bf16 between CPUs": ({"gradient_compression": "bf16"}, "gradient_compression='bf16' needs a GPU"),
    "all dropped": ({"dataloader_drop_last": True}, "8 samples are fewer than one batch of 32"),
    "no folder": ({"data": "/nowhere/rows"}, "/nowhere/rows is not a folder that save_to_disk wrote"),
    "no plan for layers": (
        {"model": lambda: language_model("gpt2"), "data": rows(ROW), "nodes": 2, "parallelism": {"tp_size": 2}},
        "transformers has no tensor parallel plan for gpt2",
    ),
    "stages of one sample": (
        {"model": language_model, "data": rows(ROW), "batch_size": 1, "parallelism": {"pp_size": 2}},
        "--per_device_train_batch_size 1 does not suit a pipeline of 2",
    ),
    "a sequence that is too short": (
        {"model": lambda: language_model("gpt2"), "data": rows(ROW), "parallelism": {"cp_size": 16}},
        "cp_size 16 splits each sequence into 32 chunks, and the model's sequences have at most 16",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_is_refused_before_submit(home: Path, case: str):
    options, sentence = REFUSED[case]
    options = {"model": Net, "data": DATA} | options
    with pytest.raises(CloudtrainError, match=sentence) as refused:
        DistributedTraining(target="local").train_distributed(options.pop("model")(), **options)
    assert refused.value.exit_code == 2 and not (home / "runs").exists()


@pytest.mark.parametrize(
    ("given", "meant"),
    [("batch_sise", "batch_size"), ("warmup_step", "warmup_steps"), ("proceses_per_node", "processes_per_node")],
)
def test_a_misspelt_argument_gets_the_one_that_is_meant(given: str, meant: str):
    with pytest.raises(BadRequest) as refused:
        DistributedTraining(target="local").train_distributed(Net(), DATA, **{given: 1})
    assert refused.value.hint == f"did you mean {meant}?"


def test_an_evaluation_is_tried_without_dropout_and_with_one_sample():
    """A batch norm of one sample can be evaluated, and not trained."""
    assert checks.try_batch(Net(), DATA, {}, True, 32, held_out=DATA[:1]) == ""


def test_a_gpu_on_a_machine_without_one_is_refused(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # where no nvidia-smi is
    with pytest.raises(CloudtrainError, match="is GPU:1, 1 GPU in all, and this machine shows no GPU"):
        DistributedTraining(target="local").train_distributed(Net(), DATA, nodes=1, use_gpus=True)


def test_an_image_that_is_too_old_is_refused(tmp_path: Path):
    from cloudtrain import Job
    from cloudtrain.runs.planning.checks.job import find_refusals
    from cloudtrain.source.node_code import IN_MEMORY

    parallelism, image = {"tp_size": 2}, "pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime"
    job = Job(
        source=str(tmp_path), entrypoint=IN_MEMORY, parallelism=parallelism, processes_per_node=2,
        hyperparameters={"language_model": True, "num_attention_heads": 2},
    )  # fmt: skip
    [problem] = find_refusals(job, parallelism, 2, 1, images=[image])
    assert problem.message == "tp_size needs torch 2.13.0 or newer, in pytorch is 2.8.0"


def test_the_trial_leaves_model_and_random_numbers_alone():
    model, drawn = Net(), torch.get_rng_state()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert checks.try_batch(model, DATA, {}, True, 32, ddp=True) == ""
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert torch.equal(torch.get_rng_state(), drawn) and model.only.weight.grad is None


def test_what_fails_for_the_lack_of_a_gpu_here_or_is_too_large_is_left_to_the_nodes(monkeypatch: pytest.MonkeyPatch):
    class OnGPU(Net):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs.to("cuda"))

    if not torch.cuda.is_available():
        assert checks.try_batch(OnGPU(), DATA, {}, True, 32, gpus=True).startswith("this machine has no GPU (")
        with pytest.raises(BadRequest, match="cannot be trained on the first 8 samples"):
            checks.try_batch(OnGPU(), DATA, {}, True, 32)
    monkeypatch.setattr(checks, "MAX_TRIED", 4)
    assert checks.try_batch(NoForward(), DATA, {}, True, 32) == "the model has 5 parameters"


def test_functions_without_a_name_are_no_reason_to_refuse():
    """cloudpickle takes lambdas: a dataset and a loss may have them."""

    class Doubled(Dataset):
        def __init__(self) -> None:
            self.change = lambda value: value * 2

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return self.change(torch.ones(4)), torch.ones(1)

    samples = checks.read_samples(Doubled())
    assert samples[0][0].tolist() == [2.0] * 4
    assert (
        checks.try_batch(Net(), samples, {"loss": lambda outputs, target: (outputs - target).square().mean()}, True, 8)
        == ""
    )
