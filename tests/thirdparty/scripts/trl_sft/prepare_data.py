"""Write a small model with its tokenizer and a data set of sentences into a folder."""

import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

folder = Path(sys.argv[1])
(folder / "data").mkdir(parents=True, exist_ok=True)
draw = random.Random(7)
words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(60)]
texts = [" ".join(draw.choice(words) for _ in range(10)) for _ in range(400)]
(folder / "data" / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["<unk>", "<eos>", "<pad>"]))
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>")
set_seed(1)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(fast), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        eos_token_id=fast.eos_token_id, pad_token_id=fast.pad_token_id, bos_token_id=None,
    )
)  # fmt: skip
model.save_pretrained(folder / "model")
fast.save_pretrained(folder / "model")
