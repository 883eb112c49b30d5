"""A plan reads the first rows of the job's data files: what the training would refuse is refused with file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloudtrain.errors import BadJob
from cloudtrain.runs.planning.plan import Planner
from entrypoints.trainer.arguments import parse
from entrypoints.trainer.data import documents, rows

TALK = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
CHAT, DPO, CLASSES = {"task": "chat"}, {"task": "dpo"}, {"task": "sequence-classification"}
GOOD = {
    "causal-lm": [{"text": "once"}, {"text": ""}],
    "chat": [{"messages": TALK}, {"messages": json.dumps(TALK)}, {"prompt": "2+2?", "completion": "4"}],
    "dpo": [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": TALK[:1], "chosen": TALK[1:], "rejected": TALK[1:]},
    ],
    "sequence-classification": [{"text": "good", "label": 1}, {"text": "bad", "label": "0"}],
}


def write(file: Path, *lines: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def plan(folder: Path, name: str = "data/rows.jsonl", target: str = "local", **changes: object) -> None:
    given = {"model": "gpt2"} | changes.pop("hyperparameters", {}) | ({"dataset": name} if name else {})
    Planner(target).plan({"name": "x", "source": str(folder), "trainer": True, "hyperparameters": given, **changes})


def refused(folder: Path, *rest: object, **changes: object) -> list[str]:
    with pytest.raises(BadJob) as caught:
        plan(folder, *rest, **changes)
    return [f"{problem.path}: {problem.message}" for problem in caught.value.problems]


@pytest.fixture(autouse=True)
def _home(home: Path) -> None: ...


@pytest.mark.parametrize("task", GOOD)
def test_rows_of_the_right_shape_are_planned_and_the_training_reads_them(task, tmp_path):
    write(tmp_path / "data/rows.jsonl", *GOOD[task])
    plan(tmp_path, hyperparameters={"task": task})


@pytest.mark.parametrize(
    ("task", "lines", "expected"),
    [
        (CHAT, [GOOD["chat"][0], {"messages": [{"role": "user", "content": "2+2?"}]}],
         ":2: messages: no message by the assistant: there is nothing to learn (expected: {\"messages\": "),
        (CHAT, [GOOD["chat"][0], {"prompt": "2+2?", "completion": ""}], ":2: messages: the assistant's answer is empty"),
        (CHAT, [GOOD["chat"][0], "", {"question": "2+2?", "answer": "4"}],
         ":3: the row has no 'messages'; it has: question, answer (expected: "),
        (CHAT, [{"messages": "hello"}], ":1: messages: it is not a list of messages"),
        (DPO, [{"prompt": "a", "chosen": "b"}], ":1: the row has no 'rejected'; it has: prompt, chosen (expected: "),
        (DPO, [{"prompt": "a", "chosen": TALK, "rejected": "c"}], ":1: prompt, chosen and rejected must be texts, or all"),
        ({}, [{"content": "once"}], ":1: the row has no 'text'; it has: content; name your own with text_column (expected: "),
        ({}, [{"text": "once"}, "{'text': 'twice'}"], ":2: is not JSON: Expecting property name enclosed in double quotes"),
        ({}, ["[1, 2]"], ":1: the row is a list, not an object with columns"),
        (CLASSES, [{"text": "good"}], ":1: the row has no 'label'; it has: text"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_refused_with_file_line_and_what_is_expected(task, lines, expected, tmp_path):
    write(tmp_path / "data/rows.jsonl", *lines)
    [sentence] = refused(tmp_path, hyperparameters=task)
    assert sentence.startswith(f"hyperparameters.dataset: --dataset data/rows.jsonl: data/rows.jsonl{expected}")
    names, columns = [str(tmp_path / "data/rows.jsonl")], documents.Columns()
    arguments = parse(["--task", task.get("task", "causal-lm")])
    assert rows.wrong_row(GOOD[arguments.task][0], arguments) == ""
    if task == {}:  # what reads them on the node refuses them too
        with pytest.raises((documents.Unsupported, ValueError)):
            documents.load(names, columns, {})


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".json"])
def test_plan_and_training_name_the_same_line(ending, tmp_path, monkeypatch):
    """Of a file as it is named in the job, counted from 1, blank lines too."""
    monkeypatch.chdir(tmp_path)
    texts = {".jsonl": '{"text": "a"}\n\n{"text": null}\n', ".csv": "other,text\na,b\nc\n",
             ".json": '[{"text": "a"}, {"text": "b"}, {}]'}  # fmt: skip
    file = Path("data/late" + ending)
    file.parent.mkdir()
    file.write_text(texts[ending])
    [planned] = rows.problems(parse(["--dataset", str(file)]), {}, tmp_path)
    assert planned.startswith(f"--dataset {file}: {file}:3: the row has no 'text'; it has: ")
    for read in (documents.load, documents.stream):
        with pytest.raises(documents.Unsupported, match=rf"^{file}:3: the row has no 'text'; it has: "):
            [document.read() for document in read([str(file)], documents.Columns(), {})]


@pytest.mark.parametrize("task", ["chat", "dpo"])
def test_the_training_refuses_and_takes_the_same_rows(task, tmp_path):
    """The node's own functions, on rows that the plan takes and on rows that it refuses."""
    from entrypoints.trainer.data import chat, preference

    def taken(row: dict) -> bool:
        write(tmp_path / "one.jsonl", row)
        together = ("prompt", "chosen", "rejected") if task == "dpo" else ()
        columns = documents.Columns("messages", None, task == "chat", together=together)
        try:
            [document] = documents.load([str(tmp_path / "one.jsonl")], columns, {})
            if task == "chat":
                chat.conversation(document)
            else:
                values = json.loads(document.read())
                for answer in (values["chosen"], values["rejected"]):
                    preference._encoded("key", values["prompt"], answer, Tokenizer(), 99)
        except documents.Unsupported:
            return False
        return True

    wrong = [{"messages": TALK[:1]}, {"messages": "hello"}, {"text": "x"}, {"prompt": "a", "completion": None},
             {"prompt": "a", "chosen": "b"}, {"prompt": "a", "chosen": TALK, "rejected": "c"}]  # fmt: skip
    arguments = parse(["--task", task])
    for row in [*GOOD["chat"], *GOOD["dpo"], *GOOD["causal-lm"], *wrong]:
        assert taken(row) == (rows.wrong_row(row, arguments) == ""), row


class Tokenizer:
    """The calls of a tokenizer that `preference` makes."""

    eos_token_id = 0

    def __call__(self, text: str, **_: object) -> dict:
        return {"input_ids": list(text.encode())}

    def apply_chat_template(self, messages: list, **_: object) -> dict:
        return {"input_ids": [len(message["content"]) for message in messages]}


def test_a_plan_says_what_it_does_not_know_of_a_class_of_the_source(tmp_path):
    (tmp_path / "own.py").write_text("class Mine: ...\n")
    more = {"use_peft": True, "streaming": True, "max_steps": 2, "task_args": ["a=1"]}  # the node checks these

    def notes(task: str, **given: object) -> list[str]:
        job = {"name": "x", "source": str(tmp_path), "trainer": True, "hyperparameters": {"task": task, **given}}
        return [note for note in Planner("local").plan(job).notes if "--task" in note]

    [note] = notes("own:Mine", **more)
    assert note.startswith("--task own:Mine: only the node loads this class. The plan does not check its data")
    assert notes("causal-lm", dataset="python-stdlib") == []


def test_a_plan_says_which_arguments_a_pretrained_model_does_not_read(tmp_path):
    (tmp_path / "notes.txt").write_text("a source has a file\n")

    def notes(**given: object) -> list[str]:
        words = {"dataset": "python-stdlib", "hidden_size": 64, "dropout": 0.1, **given}
        job = {"name": "x", "source": str(tmp_path), "trainer": True, "hyperparameters": words}
        return [note for note in Planner("local").plan(job).notes if "no effect" in note]

    said = "--model org/name has its own configuration; no effect: --hidden_size, --dropout"
    assert notes(model="org/name") == [said]
    assert notes(model="org/name", hidden_size=256, dropout=-1.0) == []
    assert notes() == []


def test_other_kinds_of_files(tmp_path):
    write(tmp_path / "a.csv", "text,label", "good,1")
    write(tmp_path / "b.tsv", "text\tlabel", "good\t1")
    write(tmp_path / "c.json", json.dumps([{"text": "good", "label": 1}], indent=1))
    write(tmp_path / "d.txt", "good")
    for name in ("a.csv", "b.tsv", "c.json"):
        plan(tmp_path, name, hyperparameters=CLASSES)
    write(tmp_path / "a.csv", "sentence,label", "good,1")
    assert (
        "a.csv:1: the row has no 'text'; it has: sentence, label"
        in refused(tmp_path, "a.csv", hyperparameters=CLASSES)[0]
    )
    assert "d.txt: chat reads rows: jsonl, csv or parquet" in refused(tmp_path, "d.txt", hyperparameters=CHAT)[0]
    plan(tmp_path, "d.txt")


def test_parquet(tmp_path):
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"content": ["once"]}), tmp_path / "rows.parquet")
    assert "rows.parquet:1: the row has no 'text'; it has: content" in refused(tmp_path, "rows.parquet")[0]


def test_folders_globs_columns_and_inputs(tmp_path, tmp_path_factory):
    write(tmp_path / "data/a.jsonl", {"text": "once"})
    write(tmp_path / "data/b.jsonl", {"content": "once"})
    for name in ("data", "data/*.jsonl"):
        [sentence] = refused(tmp_path, name)
        assert "data/b.jsonl:1: the row has no 'text'" in sentence
    write(tmp_path / "data/a.jsonl", {"content": "once"})
    plan(tmp_path, "data", hyperparameters={"text_column": "content"})
    far = tmp_path_factory.mktemp("far") / "train.jsonl"
    write(far, {"content": "once"})
    [sentence] = refused(tmp_path, "", inputs={"train": str(far)})
    assert sentence == (
        f"hyperparameters.dataset: --dataset input:train: {far}:1: the row has no 'text'; it has: content; "
        'name your own with text_column (expected: {"text": "..."})'
    )
    write(tmp_path / "data/a.jsonl", {"text": "once"})
    [sentence] = refused(tmp_path, "data/a.jsonl", inputs={"validation": str(far.parent)})
    assert sentence.startswith(
        f"hyperparameters.eval_dataset: --eval_dataset input:validation: {far}:1: the row has no"
    )


def test_files_that_only_the_node_has_are_not_read(tmp_path, tmp_path_factory, monkeypatch):
    far = tmp_path_factory.mktemp("far") / "train.jsonl"
    write(far, {"content": "once"})
    write(tmp_path / "cloudtrain.toml", '[targets.lab]\nbackend = "ssh"\nhosts = [{address = "10.0.0.5"}]')
    monkeypatch.chdir(tmp_path)
    plan(tmp_path, "", target="lab", inputs={"train": str(far)})


def test_only_the_first_rows_are_read(tmp_path):
    write(tmp_path / "data/rows.jsonl", *[{"text": "once"}] * rows.FIRST, {"content": "late"})
    plan(tmp_path)
