"""The job of `cloudtrain eval`: its numbers against those of plain transformers code, and what it refuses."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.entrypoints.training import Warm

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "entrypoints" / "evaluate_model.py"
TEXTS = [f"{number} plus {number + 1} is {2 * number + 1}, says the brown fox number {number}." for number in range(9)]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
BLOCK = 24

pytestmark = [pytest.mark.train, pytest.mark.timeout(600)]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer, bare.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|pad|>"]
    bare.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<|end|>", pad_token="<|pad|>")


def language_model(folder: Path, dropout: float = 0.5) -> Any:
    """Write a GPT-2 whose dropout would change its loss outside of eval mode."""
    from transformers import GPT2Config, GPT2LMHeadModel

    words, rate = tokenizer(), dropout
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=len(words), n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0,
        resid_pdrop=rate, embd_pdrop=rate, attn_pdrop=rate,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    for parameter in model.parameters():  # far from the uniform guess, so that each token has its own loss
        parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return model.eval()


def run(*words: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the script in a process that has imported transformers; both outputs are one text."""
    log = folder / "evaluation.log"
    code = Warm([str(SCRIPT), *map(str, words)], dict(os.environ), log, folder).wait(500)
    return subprocess.CompletedProcess(words, code, log.read_text(), log.read_text())


def run_cold(*words: object, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500)


def results(done: subprocess.CompletedProcess[str]) -> dict[int, dict[str, float]]:
    """Return step -> results of what a job has printed."""
    assert done.returncode == 0, done.stderr
    found: dict[int, dict[str, float]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("::cloudtrain::") and (event := json.loads(line[14:]))["kind"] == "evaluation":
            found.setdefault(event["step"], {}).update(event["values"])
    return found


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def loss_of_blocks(model: Any, words: Any) -> float:
    """Return the mean loss of a token, by transformers' own loss over one block at a time, without any padding."""
    order = sorted(
        range(len(TEXTS)), key=lambda at: __import__("hashlib").sha256(f"test.jsonl#{at}".encode()).hexdigest()
    )
    stream = [token for at in order for token in [*words(TEXTS[at])["input_ids"], words.eos_token_id]]
    total, count = 0.0, 0
    with torch.no_grad():
        for at in range(0, len(stream), BLOCK):
            ids = torch.tensor([stream[at : at + BLOCK]])
            if ids.shape[1] > 1:
                total += model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
                count += ids.shape[1] - 1
    assert len(stream) % BLOCK, "the last block is filled up"
    return total / count


def test_loss_and_perplexity_are_those_of_transformers(tmp_path):
    model = language_model(tmp_path / "model")
    data = write(tmp_path / "test.jsonl", [{"text": text} for text in TEXTS])
    done = run("--model", "model", "--data", data, "--block_size", BLOCK, "--batch_size", 4, "--step", 7,
               "--prompt", "1 plus", folder=tmp_path)  # fmt: skip
    found = results(done)[7]
    expected = loss_of_blocks(model, tokenizer())
    assert found["eval/test/loss"] == pytest.approx(expected, rel=1e-5)
    assert found["eval/test/perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)
    assert set(found) == {"eval/test/loss", "eval/test/perplexity"}
    assert "sample:\n    1 plus" in done.stdout


def test_a_classifier_has_loss_accuracy_and_f1(tmp_path):
    from sklearn.metrics import accuracy_score, f1_score
    from transformers import BertConfig, BertForSequenceClassification

    words, names = tokenizer(), ["late", "early", "never"]
    torch.manual_seed(2)
    config = BertConfig(vocab_size=len(words), max_position_embeddings=64, pad_token_id=words.pad_token_id, **SIZES,
                        id2label=dict(enumerate(names)), label2id={name: at for at, name in enumerate(names)})  # fmt: skip
    model = BertForSequenceClassification(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "model")
    given = [names[at % 2] for at in range(len(TEXTS))]  # one class is not in the data, and the order is not the data's
    texts = [text[: 10 + 5 * at] for at, text in enumerate(TEXTS)]
    rows = [{"text": text, "label": name} for text, name in zip(texts, given, strict=True)]
    data = write(tmp_path / "test.jsonl", rows)
    found = results(run("--model", "model", "--data", data, "--batch_size", 4, folder=tmp_path))[0]
    with torch.no_grad():
        encoded = [words(text, return_tensors="pt") for text in texts]
        logits = torch.cat(
            [model(input_ids=each["input_ids"], attention_mask=each["attention_mask"]).logits for each in encoded]
        )
    goal = torch.tensor([names.index(name) for name in given])
    guess = logits.argmax(-1)
    assert found["eval/test/loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, goal).item(), rel=1e-5)
    assert found["eval/test/accuracy"] == pytest.approx(accuracy_score(goal, guess))
    assert found["eval/test/f1"] == pytest.approx(f1_score(goal, guess, average="macro", zero_division=0))
    strange = run(
        "--model", "model", "--data", write(tmp_path / "x.jsonl", [{"text": "a", "label": "soon"}]), folder=tmp_path
    )
    assert (strange.returncode, strange.stderr.strip().splitlines()[-1]) == (
        78, "evaluate_model.py: the label 'soon' of the data is not one of the model's labels: late, early, never",
    )  # fmt: skip


def test_an_adapter_is_evaluated_over_its_model(tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    base = language_model(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.5
    adapted.save_pretrained(tmp_path / "model")  # without a tokenizer, as peft's examples do
    data = write(tmp_path / "test.jsonl", [{"text": text} for text in TEXTS])
    words = ("--model", "model", "--data", data, "--block_size", BLOCK)
    found = results(run(*words, "--base", "base", folder=tmp_path))[0]["eval/test/loss"]
    plain = language_model(tmp_path / "again")
    with_adapter = PeftModel.from_pretrained(plain, str(tmp_path / "model")).eval()
    assert found == pytest.approx(loss_of_blocks(with_adapter, tokenizer()), rel=1e-5)
    described = json.loads((tmp_path / "model" / "adapter_config.json").read_text())
    described["base_model_name_or_path"] = "/not/on/this/machine"
    (tmp_path / "model" / "adapter_config.json").write_text(json.dumps(described))
    refused = run(*words, folder=tmp_path)
    assert refused.returncode == 78 and "/not/on/this/machine, is not on this machine" in refused.stderr


def test_a_prompt_of_a_chat_model_is_a_message():
    from trainer.generate import sample

    class Repeats:
        """Writes again what it has read."""

        config = type("Config", (), {"max_position_embeddings": 200})

        def parameters(self):
            return iter([torch.zeros(1)])

        def eval(self):
            pass

        def generate(self, ids, **_):
            return torch.cat([ids, ids], 1)

    words = tokenizer()
    words.chat_template = "{% for m in messages %}({{ m.role }}: {{ m.content }}){% endfor %}"
    words.chat_template += "{% if add_generation_prompt %}bot: {% endif %}"
    assert sample(Repeats(), words, "1 plus", 9, 1, chat=True) == "1 plus\n(user: 1 plus)bot: "
    assert sample(Repeats(), words, "1 plus", 9, 1) == "1 plus1 plus"


def test_a_folder_that_is_missing_is_not_taken_for_a_network_that_is(tmp_path, monkeypatch):
    from cloudtrain.diagnosis.judge import judge
    from cloudtrain.diagnosis.verdict import End
    from cloudtrain.events import LogLine, State

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    data = write(tmp_path / "test.jsonl", [{"text": text} for text in TEXTS])
    write(tmp_path / "adapter_config.json", [{"base_model_name_or_path": "tiny", "task_type": "CAUSAL_LM"}])
    line = refusal(run("--model", ".", "--data", data, folder=tmp_path))
    assert "the model tiny cannot be loaded: there is no folder tiny in the job's working directory" in line
    verdict = judge(End(State.FAILED, 78, "", "script", 0), [LogLine("", 0, 0, 0, line, "")])
    assert (verdict.label, verdict.deciding) == ("refused", line)


def test_checkpoints_of_transformers_are_evaluated_at_their_steps(tmp_path):
    last = language_model(tmp_path / "model")
    first = language_model(tmp_path / "checkpoints" / "checkpoint-5")
    first.lm_head.weight.data *= 1.5
    first.save_pretrained(tmp_path / "checkpoints" / "checkpoint-5")
    (tmp_path / "checkpoints" / "step-00000003.a1").mkdir()  # torn
    data = write(tmp_path / "test.jsonl", [{"text": text} for text in TEXTS])
    done = run("--model", "model", "--checkpoints", "checkpoints", "--data", data, "--block_size", BLOCK, "--step", 9,
               folder=tmp_path)  # fmt: skip
    found = {step: values["eval/test/loss"] for step, values in results(done).items()}
    words = tokenizer()
    expected = {5: loss_of_blocks(first, words), 9: loss_of_blocks(last, words)}
    assert found == pytest.approx(expected, rel=1e-5) and abs(expected[5] - expected[9]) > 0.01
    assert "checkpoint step-00000003.a1 is left out: it is incomplete: COMPLETE is missing" in done.stdout


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 78, (done.returncode, done.stderr)
    return done.stderr.strip().splitlines()[-1]


def test_what_cannot_be_evaluated_is_refused_in_one_sentence(tmp_path):
    from safetensors.torch import load_file, save_file

    data = write(tmp_path / "test.jsonl", [{"text": text} for text in TEXTS])
    (tmp_path / "model").mkdir()
    assert "model is no model of transformers" in refusal(run("--model", "model", "--data", data, folder=tmp_path))
    language_model(tmp_path / "model")
    other = write(tmp_path / "other.jsonl", [{"body": "x"}])
    assert "other.jsonl:1: the row has no 'text'; it has: body" in refusal(
        run("--model", "model", "--data", other, folder=tmp_path)
    )
    weights = load_file(tmp_path / "model" / "model.safetensors")
    whole = dict(weights)
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    lacking = refusal(run("--model", "model", "--data", data, folder=tmp_path))
    assert (
        "does not contain the weights of 1 parameters of the model, such as transformer.h.1.mlp.c_fc.weight" in lacking
    )
    save_file(whole, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    for file in (tmp_path / "model").glob("tokenizer*"):
        file.unlink()
    assert "model has no tokenizer" in refusal(run("--model", "model", "--data", data, folder=tmp_path))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["architectures"] = ["GPT2ForTokenClassification"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert "is a GPT2ForTokenClassification" in refusal(run("--model", "model", "--data", data, folder=tmp_path))


TASK = """
task: products
dataset_path: json
dataset_kwargs: {data_files: tasks/products.jsonl}
test_split: train
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def test_a_local_task_of_the_harness_runs_without_network(tmp_path, monkeypatch):
    model = language_model(tmp_path / "model")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "products.yaml").write_text(TASK)
    rows = [
        {"question": f"{at} times 2 is", "choices": [f"{2 * at}.", f"{at}, no."], "answer": at % 2} for at in range(8)
    ]
    write(tmp_path / "tasks" / "products.jsonl", rows)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    words = ("--model", "model", "--include_path", "tasks")
    found = results(run_cold(*words, "--tasks", "products", folder=tmp_path))[0]
    # As plain transformers code: the choice whose tokens have the higher probability behind the question.
    made, right = tokenizer(), 0
    for row in rows:
        scores = []
        for choice in row["choices"]:
            before, whole = made(row["question"])["input_ids"], made(f"{row['question']} {choice}")["input_ids"]
            with torch.no_grad():
                logs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
            scores.append(sum(logs[at - 1, whole[at]].item() for at in range(len(before), len(whole))))
        right += scores[1] > scores[0] if row["answer"] else scores[0] > scores[1]
    assert found == {"eval/products/acc": pytest.approx(right / len(rows))}
    assert 0 < right < len(rows)
    assert "there is no task nothing" in refusal(run_cold(*words, "--tasks", "nothing", folder=tmp_path))


def test_no_file_of_the_entrypoints_hides_a_package_of_the_harness():
    """The folder of the script is the first in sys.path: lm-eval imports `evaluate` of Hugging Face."""
    names = {path.stem for path in (ROOT / "entrypoints").iterdir()}
    assert not names & {"evaluate", "datasets", "lm_eval", "tabulate", "nltk"}
