"""Makes what the recipes load: a few models with random weights, their tokenizers, and rows for each task.

made.py FOLDER
"""

import json
import random
import sys
from pathlib import Path

import numpy
import torch
import transformers

WORDS = [f"w{number}" for number in range(56)]
MARKS = ["<pad>", "<eos>", "<unk>", "<mask>", "<s>", "<user>", "<assistant>"]
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
CHAT = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<assistant> {% generation %}"
    "{{ message.content }} <eos>{% endgeneration %} {% else %}<user> {{ message.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: number for number, word in enumerate([*MARKS, *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ids = [("<s>", vocabulary["<s>"]), ("<eos>", vocabulary["<eos>"])]
    made.post_processor = processors.TemplateProcessing(
        single="$A", pair="<s> $A:0 <eos>:0 $B:1 <eos>:1", special_tokens=ids
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", mask_token="<mask>",
        cls_token="<s>", sep_token="<eos>", chat_template=CHAT, additional_special_tokens=MARKS[5:],
        model_max_length=64, model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


def models():
    vocabulary = {"vocab_size": len(MARKS) + len(WORDS), "pad_token_id": 0, "eos_token_id": 1}
    llama = transformers.LlamaConfig(**SMALL, **vocabulary, num_key_value_heads=2, bos_token_id=None)
    t5 = transformers.T5Config(
        **vocabulary, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    vit = transformers.ViTConfig(**SMALL, image_size=8, patch_size=4, num_labels=3)
    wave = transformers.Wav2Vec2Config(
        **SMALL, conv_dim=(8, 8), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2, num_labels=3,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, classifier_proj_size=8, mask_time_prob=0.0,
    )  # fmt: skip
    yield "llama", transformers.LlamaForCausalLM(llama)
    yield (
        "reward",
        transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**llama.to_dict() | {"num_labels": 1})),
    )
    yield "bert", transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **vocabulary))
    yield "t5", transformers.T5ForConditionalGeneration(t5)
    yield "vit", transformers.ViTForImageClassification(vit)
    yield "wav2vec2", transformers.Wav2Vec2ForSequenceClassification(wave)


def rows():
    draw = random.Random(1)

    def words(least, most):
        return " ".join(draw.choices(WORDS, weights=range(len(WORDS), 0, -1), k=draw.randint(least, most)))

    def told(role, text):
        return {"role": role, "content": text}

    count = range(22)  # no multiple of the samples of a step
    yield "texts", [{"text": words(6, 14)} for _ in count]
    yield "chats", [{"messages": [told("user", words(2, 5)), told("assistant", words(3, 8))]} for _ in count]
    yield "answers", [{"prompt": words(2, 4), "completion": " " + words(3, 6)} for _ in count]
    yield (
        "preferences",
        [{"prompt": words(2, 4), "chosen": " " + words(3, 6), "rejected": " " + words(3, 6)} for _ in count],
    )
    yield "judged", [{"prompt": words(2, 4), "completion": " " + words(3, 6), "label": n % 2 == 0} for n in count]
    yield "prompts", [{"prompt": words(2, 4)} for _ in count]
    yield "labelled", [{"text": words(4, 9), "label": n % 3} for n in count]
    yield "tagged", [{"tokens": (text := words(4, 9).split()), "tags": [len(word) % 3 for word in text]} for _ in count]
    yield (
        "questions",
        [{"question": words(3, 5), "context": words(8, 8), "start": n % 5, "end": n % 5 + 2} for n in count],
    )
    yield "pairs", [{"source": (text := words(3, 8)), "target": " ".join(reversed(text.split()))} for _ in count]
    yield "choices", [{"start": words(3, 5), "ends": [words(2, 4) for _ in range(4)], "label": n % 4} for n in count]


def main(folder):
    torch.manual_seed(1)
    for name, model in models():
        model.save_pretrained(folder / name)
        if name not in ("vit", "wav2vec2"):
            tokenizer().save_pretrained(folder / name)
    transformers.Wav2Vec2FeatureExtractor().save_pretrained(folder / "wav2vec2")
    for name, lines in rows():
        (folder / name).mkdir()
        (folder / name / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    draw = numpy.random.default_rng(1)
    numpy.savez(folder / "images.npz", pixels=draw.random((22, 3, 8, 8), "float32"), labels=numpy.arange(22) % 3)
    numpy.savez(folder / "sounds.npz", waves=draw.random((22, 400), "float32"), labels=numpy.arange(22) % 3)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
