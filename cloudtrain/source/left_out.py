"""Files that a source's text mentions, that are there, and that are not sent: git ignores them, say."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from cloudtrain.errors import CloudtrainError
from cloudtrain.source.files import IGNORE_FILE, why
from cloudtrain.source.texts import Texts

MOST = 3  # sentences
_QUOTED = re.compile(r"""["'](?:\./)?([\w.][\w./ -]{1,199})["']""")


def mentions(texts: Texts, words: Iterable[str] = ()) -> list[str]:
    """Return sentences on files that the source's text or `words` name, and that are not among the packaged ones.

    `words` are arguments and the like that may name files too.
    """
    sentences: list[str] = []
    for path in dict.fromkeys([*words, *_quoted(texts)]):
        if len(sentences) < MOST and (sentence := explain(texts.root, texts.names, path)):
            sentences.append(sentence)
    return sentences


def explain(root: Path, sent: Collection[str], path: str) -> str:
    """Return why a path below the source is not sent, and what would send it; "" where it is sent, or not there."""
    plain = os.path.normpath(path) if path else ""
    outside = plain in ("", ".") or plain.startswith((".", "/", "~")) or "/." in plain
    if outside or plain in sent:
        return ""
    try:
        here = root / plain
        if not here.exists() or (here.is_dir() and not any(here.iterdir())):
            return ""
        if here.is_dir() and any(name.startswith(f"{plain}/") for name in sent):
            return ""
        inner = next((at for at in here.rglob("*") if at.is_file()), here) if here.is_dir() else here
        reason = why(root, str(inner.relative_to(root))).sentence.partition(" is out: ")[2]
    except (OSError, ValueError, CloudtrainError):
        return ""
    take_in = f"!{plain}/**" if here.is_dir() else f"!{plain}"
    return f"{plain} is not sent: {reason}; a line {take_in} in {IGNORE_FILE} sends it" if reason else ""


def _quoted(texts: Texts) -> Iterator[str]:
    """Yield what stands in quotes in the source's text and could be a file's name."""
    for text in texts.files.values():
        for match in _QUOTED.finditer(text):
            if "/" in match[1] or "." in match[1][1:]:
                yield match[1]
