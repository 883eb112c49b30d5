"""Conversations: the assistant's words and nothing else are learned, whatever the template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.entrypoints.training import ENTRYPOINTS

from trainer.data import chat  # isort: skip
from trainer.data import documents as data  # isort: skip
from trainer.data import tokenizer as tokenizers  # isort: skip
from trainer.arguments import Arguments  # isort: skip
from trainer.errors import Unsupported  # isort: skip
from trainer.data.samples import EMPTY, padded  # isort: skip
from trainer.labels import IGNORED  # isort: skip

assert ENTRYPOINTS
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And one?"},
    {"role": "assistant", "content": "Five, I think."},
]
PLAIN = chat.TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# As some reasoning models do: what was thought in earlier answers is left out once others follow.
FORGETS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] if loop.last or message['role'] != 'assistant' else '...' }}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def words():
    made = tokenizers.load("bpe:300", [message["content"] for message in TALK])
    chat.furnish(made, Arguments(task="chat"))
    return made


def learned(words, messages, answers_only: bool = True) -> str:
    ids, labels = chat.encoded(words, messages, answers_only)
    assert len(ids) == len(labels) and all(label in (token, IGNORED) for token, label in zip(ids, labels, strict=True))
    return words.decode([label for label in labels if label != IGNORED])


@pytest.mark.parametrize("template", [chat.TEMPLATE, PLAIN], ids=["marked", "unmarked"])
def test_answers_alone_are_learned(words, template: str):
    words.chat_template = template
    assert learned(words, TALK).replace("\n", "") == "Four.<|im_end|>Five, I think.<|im_end|>"
    whole = learned(words, TALK, answers_only=False)
    assert whole.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user") and "And one?" in whole


def test_a_template_that_rewrites_earlier_turns_is_refused(words):
    words.chat_template = FORGETS
    assert learned(words, TALK[:3]).strip() == "Four.<|im_end|>"
    with pytest.raises(Unsupported, match=r"mark the answers in it with \{% generation %\}"):
        chat.encoded(words, TALK, answers_only=True)


def test_a_template_of_ones_own(words, tmp_path: Path):
    file = tmp_path / "chat.jinja"
    file.write_text(
        "{% for message in messages %}{% if message['role'] == 'assistant' %}"
        "{% generation %}A:{{ message['content'] }}{% endgeneration %}"
        "{% else %}Q:{{ message['content'] }}{% endif %}{% endfor %}"
    )
    chat.furnish(words, Arguments(task="chat", chat_template_path=str(file)))
    assert learned(words, TALK) == "A:Four.A:Five, I think."
    with pytest.raises(Unsupported, match="No such file"):
        chat.furnish(words, Arguments(task="chat", chat_template_path=str(tmp_path / "none")))
    words.chat_template = None
    with pytest.raises(Unsupported, match="has no chat template"):
        chat.furnish(words, Arguments(task="chat", model="some/model"))


def test_samples_are_cut_and_those_without_an_answer_left_out(words, tmp_path: Path):
    long = [{"role": "user", "content": "why? " * 40}, {"role": "assistant", "content": "because"}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"messages": talk}) for talk in (TALK, long)))
    documents = data.load([str(tmp_path / "a.jsonl")], data.Columns("messages", turns=True), {})
    turns, idle = chat.samples(documents, words, 60, True, -1)
    assert (len(turns), idle) == (1, 1) and len(turns[0]["input_ids"]) <= 60
    assert (turns[EMPTY]["labels"] == IGNORED).all()
    both, none = chat.samples(documents, words, 400, True, -1)
    batch = padded([both[0], both[1]], pad=7)
    assert none == 0 and batch["labels"].shape == batch["input_ids"].shape == batch["attention_mask"].shape
    short = int(batch["attention_mask"].sum(1).argmin())
    length = int(batch["attention_mask"][short].sum())
    assert (batch["labels"][short, length:] == IGNORED).all() and (batch["input_ids"][short, length:] == 7).all()
    assert torch.equal(batch["labels"][short, :length], (both[short])["labels"])
    assert len(chat.samples(documents, words, 400, True, 1)[0]) == 1


def test_prompt_and_completion_are_a_conversation(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "hi", "completion": "hello"}))
    [document] = data.load([str(tmp_path / "a.jsonl")], data.Columns("messages", turns=True), {})
    said = chat.conversation(document)
    assert said == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    assert list(chat.words([document])) == ["hi", "hello"]
    with pytest.raises(Unsupported, match="has no 'messages'; it has: prompt, completion"):
        data.load([str(tmp_path / "a.jsonl")], data.Columns("messages"), {})


@pytest.mark.parametrize(
    "text, problem",
    [
        ("words", "it is not a list of messages with role and content"),
        ("{}", "it is not a list of messages with role and content"),
        ('[{"role": "user"}]', "it is not a list of messages with role and content"),
        ("[]", "no message by the assistant"),
        ('[{"role": "user", "content": "alone"}]', "no message by the assistant"),
        ('[{"role": "assistant", "content": " "}]', "the assistant's answer is empty: there is nothing to learn"),
    ],
)
def test_what_is_no_conversation_is_refused(text: str, problem: str):
    with pytest.raises(Unsupported, match=f"^a.txt: {problem}"):
        chat.conversation(data.Document("a.txt", lambda: text))


def test_the_only_conversation_of_all_is_not_cut():
    alone = [data.Document("a", lambda: json.dumps(TALK, indent=1))]
    assert data.hold_out(alone, 20, whole=True) == (alone, [])
