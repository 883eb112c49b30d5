"""Tells names of metrics from names of settings, by their words."""

from __future__ import annotations

import re
from enum import Enum
from functools import lru_cache


class Kind(Enum):
    """What a printed name stands for."""

    METRIC = "a loss or a score: marks a line as metrics"
    WEAK = "a metric only on a line with a step or an epoch"
    COMPANION = "read only from lines that have a metric"
    OTHER = "not known"
    SETTING = "a setting, a time or an amount of memory"


_METRIC = """
    loss losses acc accuracy accuracies ppl perplexity nll logloss reward rewards rew return returns f1 auc auroc
    auprc bleu sacrebleu rouge rouge1 rouge2 rougel wer cer iou miou psnr ssim lpips fid mse rmse mae mape mrr ndcg
    dice elbo bpb bpc bpd xent acc1 acc5 top1 top5 chrf meteor
"""
_WEAK = """
    l1 l2 learn error err score precision recall map ap entropy cost objective fitness metric r2 corr spearman pearson
    matthews hits ret kl exact
"""
_COMPANION = """
    lr gnorm norm kl entropy score precision recall tps tflops mfu wps tok tokens rate margins throughput
"""
_SETTING = """
    weight weights scale scaler coef coefs coeff threshold eps epsilon max min fn function type target alpha beta
    smoothing factor interval patience freq lambda decay size dim margin mode epochs warmup momentum seed batch_size
    dropout dir path version workers layers heads hidden vocab optimizer clip betas schedule scheduler temperature
    config code bias ignore reduction shape time eta data mem memory elapsed sec secs second seconds ms wall remaining
    duration speed runtime num number nan skipped iterations iteration iter step steps epoch batch gpu device rank
    port host v bsz wpb ups world index total image images node nodes job id samples examples params parameters
    eval_steps max_mem
"""
_QUALIFIERS = """
    train training val valid validation test eval evaluation dev avg average mean best running smoothed batch per lm
    mlm nsp ce kl token total learning value policy critic actor generator discriminator box cls obj dfl mask grad
    gradient macro micro weighted top final sec second tokens s
"""

_NO_NAMES = """
    the a an is was are of with at for to after by in on so far has had and or from over using than when while
    epoch epochs step steps iter iters iteration iterations episode episodes update updates done finished finish
    completed complete end ended start started begin took saved saving loaded loading resume resumed improved
    decreased increased reached got new model checkpoint results result metrics summary stats set this that now log
    info root
"""  # words that a name does not begin with, whatever stands before them
_METRICS, _WEAKS, _COMPANIONS, _SETTINGS, _QUALIFYING, _CUT = (
    frozenset(text.split()) for text in (_METRIC, _WEAK, _COMPANION, _SETTING, _QUALIFIERS, _NO_NAMES)
)
# Words that name nothing: what stands before them is no part of a name.
_OF_SETTINGS = frozenset(("target", "threshold", "num", "number", "ignore", "type", "n", "patience"))  # target_return
_WORD = re.compile(r"[a-z]+\d*|\d+")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")


@lru_cache(4096)
def kind(name: str) -> Kind:
    """Return what a name stands for."""
    words = _words(name)
    strong = any(map(_is_metric, words))
    settings = [word for word in words if word in _SETTINGS]
    if strong and all(
        word in ("total", "batch", "step", "epoch", "max", "min", "id", "iter", "time") for word in settings
    ):
        return Kind.METRIC
    if strong and _is_metric(words[-1]) and not _OF_SETTINGS.intersection(settings):
        return Kind.METRIC  # the last word is what it is: a value_function loss, a duration loss
    if settings and not (set(words) & {"per", "sec"} and set(words) & {"tokens", "samples", "steps"}):
        return Kind.SETTING
    if any(word in _WEAKS for word in words):
        return Kind.WEAK
    return Kind.COMPANION if any(word in _COMPANIONS for word in words) else Kind.OTHER


def _is_metric(word: str) -> bool:
    return word in _METRICS or word.endswith(("loss", "acc", "accuracy", "ppl"))


@lru_cache(4096)
def clean_name(text: str) -> str:
    """Return a name as it is stored: of several words those that belong to it, in lower case, joined by underscores."""
    words = text.split()
    first = len(words) - 1
    if kind(words[-1]) is Kind.OTHER and not _belongs(words[-1]):
        words, first = words[-1:], 0
    while first > 0 and _belongs(words[first - 1]):
        first -= 1
    return "_".join(words[first:]).lower().replace("._", "_").strip("._-'")


@lru_cache(4096)
def read_name(text: str) -> tuple[Kind, str, str]:
    """Return what printed words name: its kind, the name as it is stored, and the name where a sentence stands before it.

    The name is the whole phrase, in lower case, joined by underscores: value_function_loss.
    """
    short = clean_name(text)
    words = text.lower().split()
    while len(words) > 1 and words[-1] in ("is", "was", "are"):
        words.pop()
    first = next((at for at in range(len(words) - 1, 0, -1) if _is_no_name(words[at - 1])), 0)
    name = "_".join(words[first:]).replace("._", "_").strip("._-'")
    return kind(short), short if name == short else name, short


def _is_no_name(word: str) -> bool:
    return word in _CUT or "." in word.rstrip(".")


def _belongs(word: str) -> bool:
    words = _words(word)
    return bool(words) and (words[0] in _QUALIFYING or kind(word) is Kind.METRIC)


def _words(name: str) -> list[str]:
    return _WORD.findall(_CAMEL.sub("_", name).lower())


def is_environment(names: list[str]) -> bool:
    """Return whether these are the names of environment variables: RANK, MASTER_PORT."""
    return any(len(name) > 3 and name.isupper() and kind(name) is not Kind.METRIC for name in names)
