"""Memory and time of a rank's training data: the first start tokenizes, the second one reads what is kept.

    python benchmarks/data.py 16 64       # MB of text; each in a process of its own

Memory is the peak of RssAnon above that after imports: pages of files that are mapped are not part of it.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ENTRYPOINTS = Path(__file__).parents[1] / "entrypoints"


def write_texts(folder: Path, megabytes: int) -> None:
    """Write text files of a MB each, alike everywhere."""
    draw = random.Random(7)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(5000)]
    for number in range(megabytes):
        chosen = draw.choices(words, k=200_000)
        (folder / f"{number:05d}.txt").write_text(" ".join(chosen)[:1_000_000])


def train_tokenizer(file: Path, base: str) -> None:
    """Write a tokenizer, trained on one file, to `tokenizer` below a folder."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bare = ByteLevelBPETokenizer()
    bare.train([str(file)], vocab_size=1024, special_tokens=["<end>"], show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=bare._tokenizer, eos_token="<end>").save_pretrained(
        Path(base, "tokenizer")
    )


def anonymous() -> int:
    """Return this process's RssAnon in KiB."""
    with open("/proc/self/status") as stream:
        return next(int(line.split()[1]) for line in stream if line.startswith("RssAnon"))


def measure(texts: str, tokenizer: str, cache: str) -> dict[str, float]:
    """Return what the data of one rank takes."""
    sys.path[0] = str(ENTRYPOINTS)  # not this folder, whose names are those of packages
    import transformers  # noqa: F401
    from trainer.arguments import parse
    from trainer.data import tasks

    arguments = ["--dataset", texts, "--tokenizer", tokenizer, "--token_cache", cache]
    arguments = parse([*arguments, "--validation_split_percentage", "1"])
    before, peak, done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, anonymous() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    begun, used = time.monotonic(), time.process_time()
    task = tasks.prepare(arguments, {})
    spent = {"seconds": time.monotonic() - begun, "cpu_s": time.process_time() - used}
    done.set()
    thread.join()
    return {"tokens": len(task.train.tokens), "peak_mib": peak / 1024, **spent}


def main(sizes: list[str]) -> None:
    sys.path.pop(0)  # this folder, whose names are those of packages
    for size in sizes:
        with tempfile.TemporaryDirectory() as base:
            texts = Path(base, "texts")
            texts.mkdir()
            write_texts(texts, int(size))
            train_tokenizer(texts / "00000.txt", base)
            for start in ("first", "second"):
                command = [
                    sys.executable,
                    __file__,
                    "measure",
                    str(texts),
                    str(Path(base, "tokenizer")),
                    str(Path(base, "cache")),
                ]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                row = json.loads(done.stdout.splitlines()[-1])  # before it, progress
                print(
                    f"{size} MB, {start} start: {row['tokens']:,} tokens, peak {row['peak_mib']:,.0f} MiB, "
                    f"{row['cpu_s']:.1f} CPU s, {row['seconds']:.1f} s",
                    flush=True,
                )


if __name__ == "__main__":
    if sys.argv[1] == "measure":
        print(json.dumps(measure(*sys.argv[2:5])))
    else:
        main(sys.argv[1:])
