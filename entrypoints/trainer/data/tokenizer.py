"""Load a pretrained tokenizer, or train byte-level BPE on the run's own text; the same on every rank."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from typing import Any

from .. import collectives
from ..errors import Unsupported, describe_missing

END = "<|endoftext|>"
BPE = "bpe:"


def load(name: str, texts: Iterable[str]) -> Any:
    """Return the tokenizer of that name; collective. `texts` is what bpe:SIZE is trained on, read on rank 0 alone."""
    # Said outright, so that workers forked after the tokenizer ran do not warn about it; they never tokenize.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    tokenizer = _trained(name, texts) if name.startswith(BPE) else _pretrained(name)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    collectives.check_same("tokenizer", fingerprint(tokenizer))
    return tokenizer


def fingerprint(tokenizer: Any) -> str:
    """Return a hash of what the tokenizer makes of text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # what the last call has set, and each call sets anew
        backend.no_truncation()
        backend.no_padding()
    content = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _trained(name: str, texts: Iterable[str]) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    fast: Any = PreTrainedTokenizerFast
    size = name.removeprefix(BPE)
    if not size.isdecimal() or int(size) < 257:
        raise Unsupported(f"--tokenizer {name}: the size is a whole number from 257 on (256 bytes and the end of text)")
    # Trained once and handed on, rather than on every rank: nothing then rests on threads that count alike.
    text = collectives.from_rank_0(lambda: _train_bpe(texts, int(size)).to_str())
    return fast(tokenizer_object=Tokenizer.from_str(text), eos_token=END, bos_token=END)


def _train_bpe(texts: Iterable[str], size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _pretrained(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise Unsupported(f"the tokenizer {name} cannot be loaded: {describe_missing(name, error)}") from None
