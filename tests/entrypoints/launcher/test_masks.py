"""Masks: a secret in the forms in which programs print it, and no more of a log than that."""

from __future__ import annotations

import ast
import base64
import json
import re
import string
from urllib.parse import quote, quote_plus

from hypothesis import given, settings
from hypothesis import strategies as st
from launcher.masks import Masks, forms

VALUES = st.text(string.ascii_letters + string.digits + "+/&=% \"'\\é☃", min_size=6, max_size=60).filter(
    lambda text: text == text.strip() and len(set(text)) > 3
)
WORD = re.compile(rb"[A-Za-z0-9+/_-]{4,}")


def decoded(data: bytes) -> list[bytes]:
    """Return what the base64 words of a text say, read from each of their first four characters on."""
    words = [word.translate(bytes.maketrans(b"-_", b"+/")) for word in WORD.findall(data)]
    starts = [word[at:] for word in words for at in range(4)]
    return [base64.b64decode(word + b"A" * (-len(word) % 4)) for word in starts]


@settings(max_examples=200, deadline=None)
@given(value=VALUES, before=st.binary(max_size=7), after=st.binary(max_size=7), others=st.integers(0, 3))
def test_no_form_of_a_secret_is_left(value: str, before: bytes, after: bytes, others: int):
    masks = Masks()
    masks.hide(value, *(f"{number}-{'x' * 30}" for number in range(others)))
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        data = b"Authorization: Basic " + encode(before + value.encode() + after)
        assert [text for text in decoded(data) if value.encode() in text]
        assert not [text for text in decoded(masks.apply(data)) if value.encode() in text]
    for safe in ("", "/", "!*'()"):
        for text in (quote(value, safe), quote_plus(value, safe)):
            for written in (text, re.sub("%..", lambda code: code[0].lower(), text)):
                shown = masks.apply(f"https://user:{written}@host/".encode()).decode()
                assert shown == "https://user:***@host/"
    assert json.loads(masks.apply(json.dumps(value).encode())) == "***"
    assert json.loads(masks.apply(json.dumps(value, ensure_ascii=False).encode())) == "***"
    answer = {"text": json.dumps({"key": value})}  # what a server said, in an event
    assert json.loads(json.loads(masks.apply(json.dumps(answer).encode()))["text"]) == {"key": "***"}
    assert ast.literal_eval(masks.apply(repr(value).encode()).decode()) == "***"


def test_base64_of_a_long_secret_is_masked_in_lines_too():
    key = json.dumps(
        {"type": "service_account", "private_key": "\n".join(["-----BEGIN", *[string.printable[:64]] * 20])}
    )
    masks = Masks()
    masks.hide(key)
    for data in (base64.encodebytes(key.encode()), base64.b64encode(key.encode())):
        assert len(masks.apply(data)) < 200, masks.apply(data)


def test_a_line_of_the_usual_length_for_base64_of_anything_else_stays():
    masks = Masks()
    masks.hide("hf_" + "abcdefghij" * 4, "another-secret-with/slashes+and more", "third")
    picture = base64.encodebytes(bytes(range(256)) * 40)
    assert masks.apply(picture) == picture


def test_a_short_secret_masks_what_holds_it_and_nothing_else():
    masks = Masks()
    masks.hide("1234", "true", "a b%", "no \n}\n  ],\nlong enough")
    log = [f"step {step} loss {step / 7:.6f} of /data/part-{step:05d} [{{ 'ok': False }}, ]," for step in range(10_000)]
    shown = masks.apply("\n".join(log).encode()).decode().split("\n")
    assert [line for line, kept in zip(log, shown, strict=True) if line != kept] == [
        line for line in log if "1234" in line
    ]
    assert all(len(form) > 3 for form in forms("true")) and b"dHJ1Z" in forms("true")
    assert masks.apply(b"is it true? a+b%25 long enough") == b"is it ***? *** ***"


def test_a_log_without_long_words_is_searched_for_short_forms_only():
    """The speed of masking: a hundred forms cost no more than a few where none of them can stand."""
    masks = Masks()
    masks.hide(*(f"{number}/{'s3cret' * 20}" for number in range(10)))

    class Data(bytes):
        searched = 0

        def replace(self, *words: bytes) -> Data:
            Data.searched += 1
            return Data(bytes.replace(self, *words))

    assert len(masks._forms) > 50
    assert masks.apply(Data(b"step 1 loss 3.14159, as scripts print them\n" * 100)) and Data.searched <= 10
    held = f"words and 3/{'s3cret' * 20}".encode()
    assert masks.apply(Data(held)) == b"words and ***" and Data.searched > 50
