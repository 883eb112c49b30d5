"""Memory and time of a rank's training data: the first start tokenizes, the second one reads what is kept.

    python benchmarks/data.py 16 64                 # MB of text; each in a process of its own
    python benchmarks/data.py --task chat 16 64     # MB of conversations, in one jsonl file
    python benchmarks/data.py --task chat --format parquet 16 64    # or json, csv; parquet has one row group

Memory is the peak of RssAnon above that after imports: pages of files that are mapped are not part of it.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)
ENTRYPOINTS = Path(__file__).parents[1] / "entrypoints"


def write_texts(folder: Path, megabytes: int) -> None:
    """Write text files of a MB each, alike everywhere."""
    draw = random.Random(7)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(5000)]
    for number in range(megabytes):
        chosen = draw.choices(words, k=200_000)
        (folder / f"{number:05d}.txt").write_text(" ".join(chosen)[:1_000_000])


def conversations(megabytes: int) -> Iterator[dict[str, Any]]:
    """Yield rows of conversations of about a KB each, alike everywhere."""
    draw = random.Random(7)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(5000)]
    left = megabytes * 1_000_000
    while left > 0:
        turns = [(role, " ".join(draw.choices(words, k=draw.randint(20, 60)))) for role in ("user", "assistant") * 2]
        row = {"messages": [{"role": role, "content": text} for role, text in turns]}
        left -= len(json.dumps(row)) + 1
        yield row


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows in the format that the file's ending names."""
    if file.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)
        return
    with open(file, "w", newline="") as stream:
        if file.suffix == ".csv":
            table = csv.writer(stream)
            table.writerow(["messages"])
            table.writerows([json.dumps(row["messages"])] for row in rows)
        elif file.suffix == ".json":
            json.dump(list(rows), stream, indent=1)
        else:
            stream.writelines(json.dumps(row) + "\n" for row in rows)


def train_tokenizer(file: Path, base: str) -> None:
    """Write a tokenizer, trained on one file, to `tokenizer` below a folder."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bare = ByteLevelBPETokenizer()
    bare.train([str(file)], vocab_size=1024, special_tokens=["<end>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare._tokenizer, eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(Path(base, "tokenizer"))


def anonymous() -> int:
    """Return this process's RssAnon in KiB."""
    with open("/proc/self/status") as stream:
        return next(int(line.split()[1]) for line in stream if line.startswith("RssAnon"))


def measure(task: str, texts: str, tokenizer: str, cache: str) -> dict[str, float]:
    """Return what the data of one rank takes."""
    sys.path[0] = str(ENTRYPOINTS)  # not this folder, whose names are those of packages
    import transformers  # noqa: F401
    from trainer.arguments import parse
    from trainer.data import tasks

    arguments = ["--task", task, "--dataset", texts, "--tokenizer", tokenizer, "--token_cache", cache]
    arguments = parse([*arguments, "--validation_split_percentage", "1"])
    before, peak, done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, anonymous() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    begun, used = time.monotonic(), time.process_time()
    prepared = tasks.prepare(arguments, {})
    spent = {"seconds": time.monotonic() - begun, "cpu_s": time.process_time() - used}
    done.set()
    thread.join()
    tokens = getattr(prepared.train, "rows", prepared.train).tokens
    return {"tokens": len(tokens), "peak_mib": peak / 1024, **spent}


def main(task: str, kind: str, sizes: list[str]) -> None:
    sys.path.pop(0)  # this folder, whose names are those of packages
    for size in sizes:
        with tempfile.TemporaryDirectory() as base:
            texts = Path(base, "texts")
            texts.mkdir()
            words = Path(base, "words.txt")
            if task == "chat":
                write_rows(texts / f"00000.{kind}", conversations(int(size)))
                words.write_text("".join(json.dumps(row) + "\n" for row in conversations(1))[:1_000_000])
            else:
                write_texts(texts, int(size))
                words.write_text(sorted(texts.iterdir())[0].read_text())
            train_tokenizer(words, base)
            for start in ("first", "second"):
                arguments = [task, str(texts), str(Path(base, "tokenizer")), str(Path(base, "cache"))]
                command = [sys.executable, __file__, "measure", *arguments]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                row = json.loads(done.stdout.splitlines()[-1])  # before it, progress
                print(
                    f"{task}, {kind}, {size} MB, {start} start: {row['tokens']:,} tokens, peak {row['peak_mib']:,.0f} MiB, "
                    f"{row['cpu_s']:.1f} CPU s, {row['seconds']:.1f} s",
                    flush=True,
                )


if __name__ == "__main__":
    if sys.argv[1] == "measure":
        print(json.dumps(measure(*sys.argv[2:6])))
    else:
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        parser.add_argument("--task", default="causal-lm", choices=("causal-lm", "chat"), help="task of the trainer")
        formats = ("jsonl", "parquet", "json", "csv")
        parser.add_argument("--format", choices=formats, help="of the rows of chat; jsonl unless it is given")
        parser.add_argument("sizes", nargs="+", help="MB of text")
        given = parser.parse_args()
        if given.format and given.task != "chat":
            parser.error("--format is for --task chat: the texts of causal-lm are txt files")
        main(given.task, given.format or ("jsonl" if given.task == "chat" else "txt"), given.sizes)
