"""Write a small text, a tokenizer made of it, and the configuration of a small model into a folder."""

import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

folder = Path(sys.argv[1])
folder.mkdir(exist_ok=True)
draw = random.Random(7)
words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(60)]
for name, lines in (("train", 1200), ("valid", 60)):
    text = (" ".join(draw.choice(words) for _ in range(12)) for _ in range(lines))
    (folder / f"{name}.txt").write_text("".join(f"{line}.\n" for line in text))
tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.train([str(folder / "train.txt")], trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<eos>"]))
tokenizer.save(str(folder / "tokenizer.json"))
kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "<eos>"}
(folder / "tokenizer_config.json").write_text(json.dumps(kind))
sizes = {"vocab_size": tokenizer.get_vocab_size(), "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
(folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "bos_token_id": 1, "eos_token_id": 1, **sizes}))
