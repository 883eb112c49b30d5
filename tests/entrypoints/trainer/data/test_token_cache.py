"""Tokens on disk: written once, found again by their digest, checked, and the same as in memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.entrypoints.training import ENTRYPOINTS, TINY, ranks, texts, train

from trainer.data import progress, token_cache, token_rows  # isort: skip
from trainer.data.language import packed  # isort: skip
from trainer.data.row_files import Document  # isort: skip
from trainer.data.samples import Blocks  # isort: skip

TEXTS = [f"text {number} of {'many' * (number % 4)} words" for number in range(600)]


class Tokenizer:
    """One token for each byte; counts the texts that it sees."""

    eos_token_id, backend_tokenizer = 256, None

    def __init__(self, name: str = "bytes") -> None:
        self.seen, self.backend_tokenizer = 0, self
        self.name = name

    def to_str(self) -> str:
        return self.name

    def no_truncation(self) -> None: ...

    def no_padding(self) -> None: ...

    def __call__(self, group: list[str], **options: object) -> dict[str, list[list[int]]]:
        self.seen += len(group)
        return {"input_ids": [list(text.encode()) for text in group]}


def packed_tokens(texts, tokenizer, folder: str = "") -> tuple:
    rows = packed([Document(str(number), text.__str__) for number, text in enumerate(texts())], tokenizer, folder)
    return rows.tokens, rows.place


def in_memory(texts, tokenizer):
    return packed_tokens(lambda: texts, tokenizer, "none")[0]


def test_a_text_is_tokenized_once(tmp_path: Path):
    expected = in_memory(TEXTS, Tokenizer())
    assert expected.tolist()[:8] == [*b"text 0 o"] and expected[-1] == 256
    first, second = Tokenizer(), Tokenizer()
    tokens, place = packed_tokens(lambda: TEXTS, first, str(tmp_path))
    assert first.seen == 600 and isinstance(tokens, np.memmap) and np.array_equal(tokens, expected)
    again, same = packed_tokens(lambda: iter(TEXTS), second, str(tmp_path))
    assert second.seen == 0 and same == place and np.array_equal(again, expected)
    assert Blocks(again, 32).fingerprint() == Blocks(expected, 32).fingerprint()
    assert Blocks(again, 32)[3]["input_ids"].tolist() == expected[96:128].tolist()


@pytest.mark.parametrize("change", ["texts", "where a text ends", "tokenizer"])
def test_another_text_or_tokenizer_has_tokens_of_its_own(tmp_path: Path, change: str):
    packed_tokens(lambda: ["ab", "c"], Tokenizer(), str(tmp_path))
    other = {"texts": ["ab", "d"], "where a text ends": ["a", "bc"], "tokenizer": ["ab", "c"]}[change]
    tokenizer = Tokenizer("another" if change == "tokenizer" else "bytes")
    tokens, _ = packed_tokens(lambda: other, tokenizer, str(tmp_path))
    assert tokenizer.seen == 2 and np.array_equal(tokens, in_memory(other, Tokenizer()))


@pytest.mark.parametrize("damage", ["a byte", "cut", "no index", "an index that is none"])
def test_damaged_tokens_are_made_again(tmp_path: Path, damage: str):
    _, place = packed_tokens(lambda: TEXTS, Tokenizer(), str(tmp_path))
    file, index = Path(place, "tokens.bin"), Path(place, "index.json")
    content = file.read_bytes()
    if damage == "a byte":
        file.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    elif damage == "cut":
        file.write_bytes(content[:-4])
    elif damage == "no index":
        index.unlink()
    else:
        index.write_text("[1")
    tokenizer = Tokenizer()
    tokens, _ = packed_tokens(lambda: TEXTS, tokenizer, str(tmp_path))
    assert tokenizer.seen == 600 and np.array_equal(tokens, in_memory(TEXTS, Tokenizer()))


def test_a_start_that_is_interrupted_leaves_nothing_that_counts_and_its_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(token_rows, "PIECE", 1000)

    class Interrupted(Tokenizer):
        def __call__(self, group: list[str], **options: object) -> dict[str, list[list[int]]]:
            if self.seen >= 256:
                raise KeyboardInterrupt
            return super().__call__(group)

    with pytest.raises(KeyboardInterrupt):
        packed_tokens(lambda: TEXTS, first := Interrupted(), str(tmp_path))
    assert [path.suffix for path in tmp_path.iterdir()] == [".pieces"]
    tokens, _ = packed_tokens(lambda: TEXTS, second := Tokenizer(), str(tmp_path))
    assert np.array_equal(tokens, in_memory(TEXTS, Tokenizer()))
    assert first.seen + second.seen == 600 and first.seen >= 256, "what was tokenized is not tokenized again"
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".lock"]


WORK = """
import os, sys, time
from pathlib import Path
from tests.entrypoints.trainer.data.test_token_cache import TEXTS, Tokenizer, in_memory, packed_tokens, token_rows
token_rows.PIECE = 500
folder, me = Path(sys.argv[1]), os.environ["RANK"]

class Slow(Tokenizer):
    def __call__(self, group, **options):
        if not self.seen:  # until all have begun: one must not do it all before the others are there
            (folder / f"begun-{me}").touch()
            deadline = time.monotonic() + 100
            while len(list(folder.glob("begun-*"))) < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
        return super().__call__(group)

slow = Slow()
tokens, _ = packed_tokens(lambda: TEXTS, slow, str(folder / "cache"))
print(slow.seen, bool((tokens == in_memory(TEXTS, Tokenizer())).all()))
"""


def test_processes_of_a_machine_tokenize_together(tmp_path: Path):
    """Three processes: each text is tokenized once in all, each process has some of them, all read the same tokens."""
    found = [output.splitlines()[-1].split() for output in ranks(WORK, tmp_path, 3)]
    assert [row[1] for row in found] == ["True"] * 3
    seen = [int(row[0]) for row in found]
    assert sum(seen) == 600 and min(seen) > 0, seen


def test_a_long_tokenization_has_a_progress_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    packed_tokens(lambda: TEXTS, Tokenizer(), str(tmp_path / "quick"))
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(token_rows, "PIECE", 5000)
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    packed_tokens(lambda: TEXTS, Tokenizer(), str(tmp_path / "long"))
    lines = capsys.readouterr().out.splitlines()
    shares = [
        int(re.fullmatch(r"tokenizing \[#*-*\] +(\d+)%, 0 of 0 MB, (about )?\d+ s( left)?", line)[1]) for line in lines
    ]
    assert shares == sorted(shares) and shares[-1] == 100 and len(set(shares)) > 2
    assert lines[-1].startswith("tokenizing [####################] 100%")


def test_small_texts_stay_in_memory_and_what_cannot_be_kept_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokens, place = packed_tokens(lambda: TEXTS, Tokenizer())
    assert place == "" and not (tmp_path / "cache").exists()
    monkeypatch.setattr(token_cache, "SMALLEST", 1000)
    _, place = packed_tokens(lambda: TEXTS, Tokenizer())
    assert place.startswith(str(tmp_path / "cache" / "cloudtrain" / "tokens"))
    (tmp_path / "file").touch()
    kept, place = packed_tokens(lambda: TEXTS, Tokenizer(), str(tmp_path / "file" / "below"))
    assert place.startswith("memory only: ") and np.array_equal(kept, tokens)


@pytest.mark.train
def test_later_runs_read_the_tokens_of_the_first(tmp_path: Path):
    args = [*TINY, "--dataset", str(texts(tmp_path / "texts")), "--max_steps", "4", "--sample_tokens", "0"]
    plain = train(tmp_path / "plain", args)
    cached = [*args, "--token_cache", str(tmp_path / "cache")]
    first = train(tmp_path / "first", cached, 2)
    files = sorted((tmp_path / "cache").glob("*/tokens.bin"))
    assert len(files) == 2, "training and held-out data, each once for both ranks"
    written = [file.stat().st_mtime_ns for file in files]
    second = train(tmp_path / "second", [*cached, "--per_device_train_batch_size", "4"], 2)
    assert [file.stat().st_mtime_ns for file in files] == written
    assert second.losses() == pytest.approx(plain.losses(), abs=1e-5)
    assert f"tokens are cached in {tmp_path}/cache/" in first.output()


MEASURE = """
import sys
sys.path.insert(0, sys.argv[1])
from trainer.data.language import packed
from trainer.data.row_files import Document
from transformers import PreTrainedTokenizerFast
from tokenizers import Tokenizer, models, pre_tokenizers
bare = Tokenizer(models.BPE({chr(c): c for c in range(32, 127)}, [])); bare.add_special_tokens(["<end>"])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<end>")
text = "the same words again and again " * 300
def anon():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
document = Document("", text.__str__)
packed([document] * 300, tokenizer, sys.argv[2])
before = anon()
tokens = packed([document] * int(sys.argv[3]), tokenizer, sys.argv[2]).tokens
print(len(tokens), anon() - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tmp_path: Path):
    command = [sys.executable, "-c", MEASURE, str(ENTRYPOINTS), str(tmp_path), "3600"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True
    )
    tokens, grown_kib = map(int, done.stdout.splitlines()[-1].split())
    assert tokens == 3600 * (9300 + 1)  # one group of texts in work takes up to 30 MB, whatever the number of texts
    assert grown_kib * 1024 < tokens * 4 / 2, "half of what the tokens alone would take"
    assert json.loads(next(tmp_path.glob("*/index.json")).read_text())["tokens"] > 0
