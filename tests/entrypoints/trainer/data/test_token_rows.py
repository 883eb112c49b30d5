"""Rows of chat, classification and preferences: tokenized once, kept by digest, and the same as in memory."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.entrypoints.training import TINY, ranks, train

from trainer.arguments import Arguments  # isort: skip
from trainer.data import chat, documents, progress, token_cache, token_rows, tokenizer  # isort: skip
from trainer.data.language import labelled  # isort: skip
from trainer.data.preference import _pairs  # isort: skip
from trainer.data.row_files import Columns  # isort: skip
from trainer.errors import Unsupported  # isort: skip
from trainer.labels import IGNORED  # isort: skip

TOGETHER = ("prompt", "chosen", "rejected")
COLUMNS = {
    "chat": Columns("messages", turns=True),
    "dpo": Columns(together=TOGETHER),
    "sequence-classification": Columns(label="label"),
}


def row(number: int) -> dict:
    draw = random.Random(number)
    text = " ".join(draw.choices(["one", "two", "three", "fünf"], k=draw.randint(1, 9)))
    answer = {"role": "assistant", "content": f"answer {text}"}
    talk = [{"role": "user", "content": f"{number}? {text}"}, answer]
    return {
        "messages": talk,
        "prompt": text,
        "chosen": "yes",
        "rejected": "no",
        "text": text,
        "label": "ab"[number % 2],
    }


@pytest.fixture(scope="module")
def words():
    made = tokenizer.load("bpe:300", ["one two three four answer yes no user assistant"])
    chat.furnish(made, Arguments(task="chat"))
    return made


def found(folder: Path, task: str, count: int = 60) -> documents.Documents:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row(number), ensure_ascii=False) + "\n" for number in range(count)))
    return documents.load([str(file)], COLUMNS[task], {})


def made(task: str, documents, words, folder: str = "none", size: int = 40, index: tuple = ("a", "b")):
    if task == "chat":
        return chat.samples(documents, words, size, True, -1, folder)[0]
    if task == "dpo":
        return _pairs(documents, words, size, -1, folder)[0]
    return labelled(documents, words, size, {name: number for number, name in enumerate(index)}, folder)


def items(samples) -> list:
    flat = []
    for index in [*range(len(samples)), -1]:
        item = samples[index]
        flat += [[name, value.tolist()] for part in item.get("rows", [item]) for name, value in part.items()]
    return flat


class Counting:
    """A tokenizer that counts the calls."""

    def __init__(self, words) -> None:
        self.words, self.seen = words, 0

    def __getattr__(self, name: str):
        return getattr(self.words, name)

    def __call__(self, *args, **options):
        self.seen += 1
        return self.words(*args, **options)

    def apply_chat_template(self, *args, **options):
        self.seen += 1
        return self.words.apply_chat_template(*args, **options)


@pytest.mark.parametrize("task", COLUMNS)
def test_rows_are_tokenized_once_and_are_those_in_memory(tmp_path: Path, words, monkeypatch, task: str):
    monkeypatch.setattr(token_rows, "PIECE", 1000)  # several pieces
    rows = found(tmp_path, task)
    expected = made(task, rows, words)
    assert 50 < len(expected) <= 60
    first, second = Counting(words), Counting(words)
    kept = made(task, rows, first, str(tmp_path / "cache"))
    again = made(task, found(tmp_path, task), second, str(tmp_path / "cache"))
    assert first.seen > 0 and second.seen == 0
    assert isinstance(again.rows.tokens, np.memmap) and again.rows.place == kept.rows.place
    assert items(again) == items(kept) == items(expected)
    assert again.fingerprint() == kept.fingerprint() == expected.fingerprint()


def test_labels_are_those_of_the_conversation(tmp_path: Path, words):
    rows = found(tmp_path, "chat", 20)
    samples = made("chat", rows, words, str(tmp_path / "cache"), size=200)
    for number, document in enumerate(rows):
        ids, labels = chat.encoded(words, chat.conversation(document), True)
        assert samples[number]["input_ids"].tolist() == ids and samples[number]["labels"].tolist() == labels
        assert samples[number]["input_ids"].dtype == samples[number]["labels"].dtype == torch.int64
    learned = sum(int((samples[number]["labels"] != IGNORED).sum()) for number in range(20))
    assert samples.rows.learned() == learned


@pytest.mark.parametrize("change", ["text", "label", "label's number", "size", "template", "answers", "order"])
def test_other_rows_have_tokens_of_their_own(tmp_path: Path, words, change: str):
    task = "sequence-classification" if "label" in change else "chat"
    rows, folder = found(tmp_path, task, 6), str(tmp_path / "cache")
    first = made(task, rows, words, folder).rows.place
    if change in ("text", "label"):
        file, old = tmp_path / "rows.jsonl", {"text": "answer", "label": '"label": "a"'}[change]
        file.write_text(file.read_text().replace(old, {"text": "ANSWER", "label": '"label": "b"'}[change], 1))
        rows = documents.load([str(file)], COLUMNS[task], {})
    elif change == "order":
        rows = documents.Documents(rows.table, rows.order[::-1])
    elif change == "template":
        words = tokenizer.load("bpe:300", ["one two three four answer yes no user assistant"])
        chat.furnish(words, Arguments(task="chat"))
        words.chat_template = words.chat_template.replace("\\n", " ")
    index = ("b", "a") if change == "label's number" else ("a", "b")
    if change == "answers":
        other = chat.samples(rows, words, 40, False, -1, folder)[0]
        expected = chat.samples(rows, words, 40, False, -1)[0]
    else:
        size = 39 if change == "size" else 40
        other = made(task, rows, words, folder, size, index)
        expected = made(task, rows, words, size=size, index=index)
    assert other.rows.place != first and items(other) == items(expected)


@pytest.mark.parametrize("file", ["tokens.bin", "shapes.bin"])
@pytest.mark.parametrize("damage", ["cut", "a byte", "gone"])
def test_damaged_rows_are_made_again(tmp_path: Path, words, file: str, damage: str):
    rows = found(tmp_path, "chat", 9)
    samples = made("chat", rows, words, str(tmp_path / "cache"))
    expected, path = items(samples), Path(samples.rows.place, file)
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-8] if damage == "cut" else content[:4] + bytes([content[4] ^ 1]) + content[5:])
    counting = Counting(words)
    assert items(made("chat", rows, counting, str(tmp_path / "cache"))) == expected and counting.seen > 0
    assert path.read_bytes() == content


def test_truncation_of_an_earlier_call_changes_no_digest(tmp_path: Path, words):
    rows = found(tmp_path, "sequence-classification", 6)
    first = made("sequence-classification", rows, words, str(tmp_path / "cache"))
    words(["one two three"], truncation=True, max_length=2, padding="max_length")
    counting = Counting(words)
    again = made("sequence-classification", rows, counting, str(tmp_path / "cache"))
    assert again.rows.place == first.rows.place and counting.seen == 0


def test_a_bar_is_shown_and_small_rows_stay_in_memory(tmp_path: Path, words, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    rows = found(tmp_path, "chat")
    assert made("chat", rows, words, "").rows.place == "" and not (tmp_path / "user").exists()
    monkeypatch.setattr(token_cache, "SMALLEST", 1000)
    monkeypatch.setattr(token_rows, "PIECE", 2000)
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    assert made("chat", rows, words, "").rows.place.startswith(str(tmp_path / "user" / "cloudtrain" / "tokens"))
    shares = [int(share) for share in re.findall(r"^tokenizing \[#*-*\] +(\d+)%", capsys.readouterr().out, re.M)]
    assert shares == sorted(shares) and shares[-1] == 100 and len(set(shares)) > 3


def test_a_wrong_conversation_is_refused_where_tokens_are_kept(tmp_path: Path, words):
    found(tmp_path, "chat", 5)
    with open(tmp_path / "rows.jsonl", "a") as stream:
        stream.write('\n{"messages": "hello"}\n')
    rows = documents.load([str(tmp_path / "rows.jsonl")], COLUMNS["chat"], {})
    with pytest.raises(Unsupported, match=r"rows.jsonl:7: it is not a list of messages"):
        made("chat", rows, words, str(tmp_path / "cache"))


WORK = """
import os, sys, time
from pathlib import Path
from tests.entrypoints.trainer.data import test_token_rows as here
here.token_rows.PIECE = 500
folder, me = Path(sys.argv[1]), os.environ["RANK"]
words = here.tokenizer.load("bpe:300", ["one two three four answer yes no user assistant"])
here.chat.furnish(words, here.Arguments(task="chat"))

class Slow(here.Counting):
    def apply_chat_template(self, *args, **options):
        if not self.seen:  # until both have begun: one must not do it all before the other is there
            (folder / f"begun-{me}").touch()
            deadline = time.monotonic() + 100
            while len(list(folder.glob("begun-*"))) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
        return super().apply_chat_template(*args, **options)

slow = Slow(words)
rows = here.documents.load([str(folder / "rows.jsonl")], here.COLUMNS["chat"], {})
kept = here.made("chat", rows, slow, str(folder / "cache"))
print(slow.seen, here.items(kept) == here.items(here.made("chat", rows, words)))
"""


def test_processes_of_a_machine_tokenize_rows_together(tmp_path: Path):
    """Two processes: each conversation is tokenized once in all, each process has some, both read the same rows."""
    found(tmp_path, "chat")
    results = [output.splitlines()[-1].split() for output in ranks(WORK, tmp_path, 2)]
    assert [result[1] for result in results] == ["True"] * 2
    seen = [int(result[0]) for result in results]
    assert sum(seen) == 60 and min(seen) > 0, seen


@pytest.mark.train
def test_a_later_attempt_resumes_with_the_kept_rows(tmp_path: Path):
    """Two ranks are the plain run to the bit of their losses; a resumed attempt tokenizes nothing and resumes exactly."""
    found(tmp_path, "chat")
    args = [
        *TINY,
        "--task",
        "chat",
        "--dataset",
        str(tmp_path / "rows.jsonl"),
        "--block_size",
        "64",
        "--max_steps",
        "6",
    ]
    cached = [*args, "--token_cache", str(tmp_path / "cache")]
    env = {"CLOUDTRAIN_CHECKPOINT_EVERY_STEPS": "3", "CLOUDTRAIN_CHECKPOINT_KEEP": "9"}
    plain = train(tmp_path / "plain", [*args, "--token_cache", "none"], 2)
    first = train(tmp_path / "first", cached, 2, **env)
    assert first.losses() == plain.losses() and len(first.losses()) == 6
    files = sorted((tmp_path / "cache").glob("*/tokens.bin"))
    written = [file.stat().st_mtime_ns for file in files]
    assert len(files) == 2 and f"tokens are cached in {tmp_path}/cache/" in first.output()
    (tmp_path / "first" / "checkpoints" / "step-00000006.a1" / "COMPLETE").unlink()
    resumed = train(tmp_path / "first", cached, 2, attempt=2, **env)
    assert resumed.losses() == {step: loss for step, loss in first.losses().items() if step > 3}
    assert [file.stat().st_mtime_ns for file in sorted((tmp_path / "cache").glob("*/tokens.bin"))] == written
