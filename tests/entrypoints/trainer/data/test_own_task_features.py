"""Classes of the source of every descent use what the built-in tasks use: streams, LoRA, the loss in chunks, evaluations,
tables, parameter groups. Two ranks give the numbers of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.entrypoints.training import TINY, Trainer, texts, train

pytestmark = [pytest.mark.train, pytest.mark.timeout(600)]

TASK = """
import torch
from torch.utils.data import IterableDataset, get_worker_info
from trainer.data.language import CausalLM, Chat, Classification
from trainer.data.preference import PreferenceTuning
from trainer.data.row_files import Document
from trainer.data.samples import Blocks, padded
from trainer.data.stream import Texts
from trainer.data.tasks import Task
from transformers import AutoModelForCausalLM, AutoTokenizer

ROWS = [torch.arange(3 + number % 6) * (number + 3) % 200 + 10 for number in range(60)]


class Shown:
    rate = 0.02

    def parameter_groups(self, model):
        head = getattr(model, "lm_head", None) or model.get_output_embeddings()
        made = "in chunks" if "ChunkedLoss" in repr(getattr(head, "forward", "")) else "whole"
        print(f"logits {made}, {type(model).__name__}, rate {self.rate}", flush=True)
        return [{"params": [each for each in model.parameters() if each.requires_grad], "lr": self.rate}]

    def predictions(self, outputs, batch):
        return {"first": [float(row.reshape(-1, row.shape[-1])[0].float().logsumexp(0)) for row in outputs]}

    def samples(self, predictions):
        return [{"first": value} for value in sorted(predictions["first"])]


class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        begin, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        yield from items(ROWS[begin::step])


def items(rows):
    return [{"input_ids": row, "labels": row} for row in rows]


class Plain(Shown):
    own_arguments = ("sample_prompt",)

    def __init__(self, arguments, inputs, rate=0.0):
        self.arguments, self.rate = arguments, rate
        self.tokenizer = AutoTokenizer.from_pretrained(arguments.model)

    def model(self):
        return AutoModelForCausalLM.from_pretrained(self.arguments.model, dtype=torch.float32)

    def train_data(self):
        return Stream() if self.arguments.streaming else items(ROWS)

    def eval_data(self):
        return items(ROWS[:9])

    def collate(self, samples):
        return padded(samples, pad=0)

    def generate(self, model, prompt):
        return f"{prompt} and more"


class Direct(Shown, Task):
    writes = streams = True

    @classmethod
    def prepare(cls, arguments, inputs):
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        size = arguments.block_size
        held = Blocks(torch.cat(ROWS[:20]).numpy(), size)
        text = [Document(str(row), lambda row=row: tokenizer.decode(row)) for row in ROWS]
        return cls(tokenizer, Texts(lambda epoch: iter(text), tokenizer, size), held, torch.utils.data.default_collate)


class OwnCausal(Shown, CausalLM):
    pass


class OwnChat(Shown, Chat):
    pass


class OwnClasses(Shown, Classification):
    def predictions(self, outputs, batch):
        return Classification.predictions(self, outputs, batch) | super().predictions(outputs, batch)


class OwnPairs(Shown, PreferenceTuning):
    pass
"""
TEMPLATE = "{% for message in messages %}{{ message['role'][0] + message['content'] }}{% endfor %}"
STREAMING = ["--streaming"]
CHUNKED = {"Plain": "in chunks", "Direct": "in chunks", "OwnCausal": "in chunks", "OwnChat": "in chunks"}
TEXTS = {"Plain": "ab and more", "OwnChat": "ab\n"}  # of others the prompt is continued
COMMON = ["--use_peft", "--lora_target_modules", "q_proj", "v_proj", "--lora_dropout", "0", "--max_steps", "4"]
COMMON += ["--logging_steps", "1", "--eval_strategy", "steps", "--eval_steps", "2", "--block_size", "16"]
COMMON += [
    "--validation_split_percentage",
    "30",
    "--per_device_eval_batch_size",
    "2",
    "--sample_tokens",
    "3",
    "--task_args",
    "rate=0.05",
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a pretrained model and data of each kind."""
    folder = tmp_path_factory.mktemp("base")
    args = [*TINY, "--dataset", str(texts(folder / "texts", 3)), "--max_steps", "2", "--sample_tokens", "0"]
    train(folder / "run", args)
    rows = [(f"{'ab' * (1 + number % 3)}{number} ", "good" if number % 3 else "bad") for number in range(24)]
    kinds = {
        "OwnCausal": [{"text": text + answer} for text, answer in rows],
        "OwnChat": [{"prompt": text, "completion": answer} for text, answer in rows],
        "OwnClasses": [{"text": text, "label": answer} for text, answer in rows],
        "OwnPairs": [{"prompt": text, "chosen": answer, "rejected": "no"} for text, answer in rows],
    }
    for name, each in kinds.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
    (folder / "chat.jinja").write_text(TEMPLATE)
    return folder


def run(folder: Path, base: Path, name: str, world: int, *more: str, **env: str) -> Trainer:
    folder.mkdir()
    (folder / "own.py").write_text(TASK)
    args = ["--task", f"own:{name}", "--model", str(base / "run" / "model"), *COMMON, *more]
    if (base / f"{name}.jsonl").exists():
        args += ["--dataset", str(base / f"{name}.jsonl")]
    if name == "OwnCausal":
        args += ["--eval_dataset", str(base / "OwnCausal.jsonl")]
    if name != "OwnClasses":
        args += ["--sample_prompt", "ab"]
    if name == "OwnChat":
        args += ["--chat_template_path", str(base / "chat.jinja"), "--assistant_only_loss", "false"]
    return train(folder, [*args, "--per_device_train_batch_size", str(4 // world)], world, **env)


def results(done: Trainer) -> list[dict[str, float]]:
    return [
        {name: value for name, value in row.items() if not name.endswith("_per_s") and isinstance(value, int | float)}
        for row in done.events("metric")
    ]


def tables(done: Trainer) -> dict[str, list]:
    return {row["name"]: row["shown"]["rows"] for row in done.events("media")}


@pytest.mark.parametrize("name", ["Plain", "Direct", "OwnCausal", "OwnChat", "OwnClasses", "OwnPairs"])
def test_a_class_uses_everything_in_one_process_and_in_two(tmp_path: Path, base: Path, name: str):
    more = STREAMING if name in ("Plain", "Direct", "OwnCausal") else []
    if name == "OwnCausal":
        more = [*more, "--shuffle_buffer_size", "3"]
    one, two = (run(tmp_path / str(world), base, name, world, *more, **env) for world, env in
                ((1, {}), (2, {"CLOUDTRAIN_PARALLELISM": json.dumps({"strategy": "ddp"})})))  # fmt: skip
    expected, found = results(one), results(two)
    assert len(expected) == len(found) >= 7 and [row["step"] for row in found if "loss" in row] == [1, 2, 3, 4]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5, rel=1e-4)
    assert expected[-1]["eval_loss"] != pytest.approx(expected[0]["eval_loss"], abs=1e-4), "it learns"
    for done in (one, two):
        assert f"logits {CHUNKED.get(name, 'whole')}, Peft" in done.output() and "rate 0.05" in done.output()
        assert done.events("metric")[1]["learning_rate"] == pytest.approx(0.05)
        assert (done.run / "model" / "adapter_config.json").is_file()
        rows = tables(done)
        values = [float(row[0]) for row in rows["predictions"]]
        assert values == pytest.approx([float(row[0]) for row in tables(one)["predictions"]], abs=1e-3)
        assert len(values) > 1 and values == sorted(values)
        if name == "OwnClasses":
            assert "samples" not in rows and "eval_f1" in expected[-1]
        else:
            [(_, text)] = rows["samples"]
            assert text.startswith(TEXTS.get(name, "ab"))


@pytest.mark.parametrize("name", ["Plain", "OwnChat"])
def test_the_same_with_the_model_in_shards(tmp_path: Path, base: Path, name: str):
    one = run(tmp_path / "one", base, name, 1)
    two = run(tmp_path / "two", base, name, 2, CLOUDTRAIN_PARALLELISM=json.dumps({"strategy": "fsdp"}))
    for mine, theirs in zip(results(two), results(one), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5, rel=1e-4)


def test_the_class_of_the_page_that_derives_from_task(tmp_path: Path, base: Path):
    page = (Path(__file__).parents[4] / "docs" / "how" / "own-task.md").read_text()
    (tmp_path / "lines.py").write_text(page.partition('```python title="lines.py"')[2].partition("```")[0])
    args = ["--task", "lines:Lines", "--model", str(base / "run" / "model"), "--block_size", "8", "--max_steps", "3"]
    done = train(tmp_path, [*args, "--learning_rate", "0.01", "--logging_steps", "1", "--sample_tokens", "2"])
    losses = done.losses()
    assert losses[3] < losses[1] and "samples" in tables(done)
