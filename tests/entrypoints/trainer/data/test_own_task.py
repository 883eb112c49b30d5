"""A task of the user's own and preference tuning: the numbers of one process on every strategy, and right ones."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from tests.entrypoints.training import ENTRYPOINTS, TINY, Trainer, texts, train

from trainer import preview  # isort: skip
from trainer.data import tasks  # isort: skip
from trainer.data.language import macro_f1  # isort: skip
from trainer.kinds import BUILT_IN, Kind  # isort: skip

assert ENTRYPOINTS
pytestmark = [pytest.mark.train, pytest.mark.timeout(600)]

STRATEGIES = {
    "ddp": ("DistributedDataParallel", 1.0),
    "fsdp": ("FSDP2", 0.7),
    "zero1": ("DeepSpeedEngine", 1.0),
    "zero2": ("DeepSpeedEngine", 1.0),
    "zero3": ("DeepSpeedEngine", 0.7),
}
LONG = ("zero1", "zero2", "zero3")
ALL = [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in STRATEGIES]
# Sequences of unequal length: the loss is the mean over their items, not over samples. 13 samples are held out.
TASK = """
import torch
from torch.nn import functional


class Sums:
    def __init__(self, arguments, inputs, width=4, kind="plain"):
        assert width == 8 and kind == "deep"
        self.width = width
        draw = torch.Generator().manual_seed(5)
        self.rows = [torch.rand(2 + number % 5, generator=draw) for number in range(50)]

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(1, self.width), torch.nn.Tanh(), torch.nn.Linear(self.width, 1))

    def train_data(self):
        return self.rows[13:]

    def eval_data(self):
        return self.rows[:13]

    def collate(self, samples):
        return {"items": torch.cat(samples)[:, None], "first": torch.stack([row[0] for row in samples])}

    def count(self, batch):
        return len(batch["items"])

    def loss(self, model, batch):
        outputs = model(batch["items"])
        return functional.mse_loss(outputs, batch["items"] ** 2), outputs

    def predictions(self, outputs, batch):
        return {"first": batch["first"], "names": [str(float(value)) for value in batch["first"]]}

    def metrics(self, predictions):
        assert len(set(predictions["names"])) == 13
        return {"samples": len(predictions["first"]), "total": predictions["first"].sum()}

    def samples(self, predictions):
        return [{"name": name} for name in sorted(predictions["names"])]

    def parameter_groups(self, model):
        return [
            {"params": [each for each in model.parameters() if each.dim() == 2]},
            {"params": [each for each in model.parameters() if each.dim() == 1], "lr": 0.0},
        ]


class Empty(Sums):
    def model(self):
        with torch.device("meta"):
            return super().model()
"""
COMMON = ["--max_steps", "6", "--gradient_accumulation_steps", "2", "--logging_steps", "1", "--max_grad_norm", "0.5"]
COMMON += ["--per_device_eval_batch_size", "3", "--eval_strategy", "steps", "--eval_steps", "3"]
OWN = ["--task_args", "width=8", "kind=deep", "--learning_rate", "0.05", *COMMON]
CLASSES = {"own": "Sums", "own, on the meta device": "Empty"}
SIZE = "--per_device_train_batch_size"


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw, file = random.Random(3), tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = []
    for _ in range(40):
        prompt = "".join(draw.choices("abcdef", k=draw.randint(2, 5))) + " "
        chosen, rejected = "good" + " yes" * draw.randint(0, 3), "bad" + " no" * draw.randint(0, 3)
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def preferences(pairs: Path) -> list[str]:
    return [*TINY, "--task", "dpo", "--dataset", str(pairs), "--validation_split_percentage", "30", *COMMON]


def run_own(folder: Path, kind: str = "own", world: int = 1, **env: str) -> Trainer:
    (folder / "mypkg").mkdir(parents=True)
    (folder / "mypkg" / "task.py").write_text(TASK)
    return train(folder, ["--task", f"mypkg.task:{CLASSES[kind]}", *OWN, SIZE, str(4 // world)], world, **env)


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory, pairs: Path) -> Callable[[str], Trainer]:
    """Return the run of one process, trained once."""
    base, made = tmp_path_factory.mktemp("alone-own"), {}

    def run(kind: str) -> Trainer:
        if kind not in made:
            here = base / kind
            made[kind] = run_own(here, kind) if kind in CLASSES else train(here, [*preferences(pairs), SIZE, "4"])
        return made[kind]

    return run


def results(done: Trainer) -> list[dict[str, float]]:
    """Return what every row of metrics says, without speeds."""
    return [
        {name: value for name, value in row.items() if not name.endswith("_per_s") and isinstance(value, int | float)}
        for row in done.events("metric")
    ]


@pytest.mark.parametrize("kind", [*CLASSES, "dpo"])
@pytest.mark.parametrize("strategy", ALL)
def test_two_ranks_give_the_numbers_of_one(
    tmp_path: Path, strategy: str, kind: str, alone: Callable[[str], Trainer], pairs: Path
):
    env = {"CLOUDTRAIN_PARALLELISM": json.dumps({"strategy": strategy})}
    args = [*preferences(pairs), SIZE, "2"]
    run = tmp_path / "run"
    done = run_own(run, kind, 2, **env) if kind in CLASSES else train(run, args, 2, **env)
    world, (wrapper, share) = done.events("world")[0], STRATEGIES[strategy]
    assert (world["world_size"], world["wrapper"]) == (2, wrapper)
    assert len(world["parameters_per_rank"]) == 2
    assert max(world["parameters_per_rank"]) <= share * world["parameters"]
    expected, found = results(alone(kind)), results(done)
    assert len(expected) == len(found) >= 9
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        assert mine == pytest.approx(theirs, abs=1e-5, rel=1e-4)
    ours, other = (load_file(each.run / "model" / "model.safetensors") for each in (done, alone(kind)))
    assert all(torch.allclose(ours[name], other[name], atol=2e-4) for name in other)


def test_a_task_of_ones_own_is_trained_by_its_class(alone: Callable[[str], Trainer]):
    done = alone("own")
    last = results(done)[-1]
    draw = torch.Generator().manual_seed(5)
    rows = [torch.rand(2 + number % 5, generator=draw) for number in range(50)]
    assert last["eval_samples"] == results(done)[0]["eval_samples"] == 13
    (table,) = (row for row in done.events("media") if row["name"] == "predictions")
    assert [float(name) for (name,) in table["shown"]["rows"]] == pytest.approx(
        sorted(float(row[0]) for row in rows[:13])
    )
    assert last["eval_total"] == pytest.approx(sum(float(row[0]) for row in rows[:13]), rel=1e-6)
    state = load_file(done.run / "model" / "model.safetensors")
    items = torch.cat(rows[:13])[:, None]
    hidden = functional.linear(items, state["0.weight"], state["0.bias"]).tanh()
    loss = functional.mse_loss(functional.linear(hidden, state["2.weight"], state["2.bias"]), items**2)
    assert last["eval_loss"] == pytest.approx(float(loss), rel=1e-5), "the mean over items, not over batches"
    assert last["eval_loss"] < results(done)[0]["eval_loss"]
    torch.manual_seed(42)
    first = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    assert torch.equal(state["0.bias"], first[0].bias), "its group has a learning rate of 0"
    assert not torch.allclose(state["0.weight"], first[0].weight, atol=1e-3)


def test_the_loss_and_rewards_of_preferences_are_those_of_the_formula(tmp_path: Path, pairs: Path, alone):
    """A second run begins at the first one's model: that is its reference."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference = alone("dpo").run / "model"
    args = ["--task", "dpo", "--model", str(reference), "--dataset", str(pairs), "--eval_dataset", str(pairs)]
    args += ["--dpo_beta", "0.3", "--learning_rate", "2e-3", "--max_steps", "3", "--sample_tokens", "0"]
    done = train(tmp_path / "run", args)
    rows = results(done)
    assert rows[0]["eval_loss"] == pytest.approx(math.log(2), abs=1e-6), "the model is its reference before training"

    tokenizer = AutoTokenizer.from_pretrained(reference)
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (tmp_path / "run" / "model", reference)]

    def log_probability(model, prompt: str, answer: str) -> float:
        begin, end = tokenizer(prompt)["input_ids"], [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            said = model(torch.tensor([begin + end])).logits[0].log_softmax(-1)
        return sum(float(said[len(begin) - 1 + at, token]) for at, token in enumerate(end))

    losses, right = [], 0
    for row in map(json.loads, pairs.read_text().splitlines()):
        rewards = []
        for name in ("chosen", "rejected"):
            mine, theirs = (log_probability(model, row["prompt"], row[name]) for model in models)
            rewards.append(0.3 * (mine - theirs))
        losses.append(math.log1p(math.exp(rewards[1] - rewards[0])))
        right += rewards[0] > rewards[1]
    assert rows[-1]["eval_loss"] == pytest.approx(sum(losses) / 40, rel=1e-4)
    assert rows[-1]["eval_rewards/accuracies"] == pytest.approx(right / 40)
    assert rows[-1]["eval_loss"] < rows[0]["eval_loss"]


def test_a_resumed_run_has_the_same_reference_model(tmp_path: Path, pairs: Path, alone: Callable[[str], Trainer]):
    args = [*preferences(pairs), SIZE, "4", "--save_steps", "3"]
    train(tmp_path / "run", args)
    (last,) = (tmp_path / "run" / "checkpoints").glob("step-00000006*")
    shutil.rmtree(last)
    again = train(tmp_path / "run", args, attempt=2)
    assert min(again.losses()) == 4 and again.losses()[4] != pytest.approx(math.log(2), abs=1e-3)
    whole = alone("dpo").losses()
    assert again.losses() == {step: whole[step] for step in (4, 5, 6)}


DERIVED = """
from trainer.data.language import CausalLM
from trainer.data.preference import PreferenceTuning


class Mine(PreferenceTuning):
    def metrics(self, predictions):
        raise NotImplementedError


class Scaled(CausalLM):
    scale = 1

    def losses(self, model, batch):
        return self.scale * super().losses(model, batch)
"""


def test_a_class_that_derives_from_a_built_in_one_goes_the_same_way(tmp_path: Path, pairs: Path, alone):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "derived.py").write_text(DERIVED)
    args = [*preferences(pairs), SIZE, "4"]
    args[args.index("dpo")] = "derived:Mine"
    done = train(tmp_path / "run", args)
    assert results(done) == results(alone("dpo"))
    tables = [[row["name"] for row in run.events("media")] for run in (done, alone("dpo"))]
    assert tables[0] == tables[1] == ["samples"]


def test_the_loss_of_a_derived_class_is_what_is_learned(tmp_path: Path):
    """A language model's own loss is made in chunks, without the method that the class has replaced."""
    (tmp_path / "derived.py").write_text(DERIVED)
    args = [*TINY, "--dataset", str(texts(tmp_path / "texts")), "--task", "derived:Scaled", "--max_steps", "2"]
    args += ["--task_args", "scale=0"]
    rows = results(train(tmp_path, args))
    assert [row["loss"] for row in rows if "loss" in row] == [0, 0]
    assert rows[0]["eval_loss"] == rows[-1]["eval_loss"] > 1


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_name_of_a_built_in_task_is_short_for_its_class(name: str):
    found, known = tasks.task_class(name), BUILT_IN[name]
    assert found is tasks.task_class(known.path) and issubclass(found, known.kind)
    for attribute in (
        vars(Kind).keys() - vars(object).keys() - {"__annotations__"}
    ):  # what a plan reads is what a node has
        if not attribute.startswith("__"):
            mine, planned = (getattr(each, attribute) for each in (found, known.kind))
            assert getattr(mine, "__func__", mine) == getattr(planned, "__func__", planned), attribute


@pytest.mark.parametrize("task", ["dpo", "mypkg.task:Sums"])
@pytest.mark.parametrize("key", ["tp_size", "pp_size", "cp_size"])
def test_a_plan_refuses_what_cannot_run_it(task: str, key: str):
    (problem,) = preview.problems(["--task", task], {"strategy": "ddp", key: 2}, 2, 1)
    assert "works with strategies none, ddp, fsdp, hsdp and zero1 to zero3" in problem
    assert preview.problems(["--task", task], {"strategy": "fsdp"}, 2, 1) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [("mypkg.tusk:Sums", "no module mypkg.tusk"), ("mypkg.task:Some", "has no Some"), ("json:JSONEncoder", "takes")],
)
def test_a_class_that_is_not_there_is_refused(tmp_path: Path, name: str, said: str):
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg" / "task.py").write_text(TASK)
    with Trainer(tmp_path, ["--task", name]) as trainer:
        codes = trainer.codes()
    if name.startswith("json"):
        assert codes == [1]  # an error of the class itself keeps its traceback
    else:
        assert codes == [78] and said in trainer.output()


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("mypkg.task:Sums", ""),
        ("mypkg.task:Alias", ""),
        ("mypkg:Sums", ""),
        ("mypkg.tusk:Sums", "--task mypkg.tusk:Sums: there is no mypkg/tusk.py in the source"),
        ("mypkg.task:Some", "--task mypkg.task:Some: mypkg/task.py has no class Some"),
        ("broken:Sums", "broken.py is not Python"),
    ],
)
def test_a_plan_refuses_a_class_that_the_source_does_not_have(tmp_path: Path, task: str, said: str):
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg" / "__init__.py").write_text("from .task import Sums\n")
    (tmp_path / "mypkg" / "task.py").write_text(TASK + "\nAlias = Sums\n")
    (tmp_path / "broken.py").write_text("class\n")
    found = preview.problems(["--task", task], {}, 1, 1, source=tmp_path)
    assert said in found[0] if said else found == []


@pytest.mark.parametrize(
    ("task", "strategy", "said"),
    [
        ("whole:Sums", "fsdp", True),
        ("whole:Sums", "zero3", True),
        ("whole:Sums", "ddp", False),
        ("mypkg.task:Empty", "fsdp", False),
        ("derived:Mine", "fsdp", False),
        ("dpo", "fsdp", False),
    ],
)
def test_a_plan_says_that_each_rank_builds_the_whole_model(tmp_path: Path, task: str, strategy: str, said: bool):
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg" / "task.py").write_text(TASK)
    (tmp_path / "whole.py").write_text(TASK.partition("class Empty")[0])
    (tmp_path / "derived.py").write_text(DERIVED)
    found = preview.notes(["--task", task], {"strategy": strategy}, tmp_path)
    assert ["each rank builds the whole model" in note for note in found] == [False] * (":" in task) + [True] * said


def test_macro_f1():
    from sklearn.metrics import f1_score

    labels, guesses = torch.tensor([0, 0, 0, 0, 1, 1, 2]), torch.tensor([0, 0, 0, 1, 1, 2, 2])
    kinds = {name: f1_score(labels, guesses, average=name) for name in ("macro", "micro", "weighted")}
    assert macro_f1(guesses, labels) == pytest.approx(kinds["macro"])
    assert len({round(value, 3) for value in kinds.values()}) == 3
