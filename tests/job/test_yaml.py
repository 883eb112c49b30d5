"""YAML 1.2: what was written is what is meant."""

from __future__ import annotations

import json
import math

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudtrain.errors import BadJob
from cloudtrain.job.document import MAX_CHARACTERS, MAX_DEPTH, read_yaml, scalar

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


@pytest.fixture(params=["libyaml", "python"], autouse=True)
def parser(request, monkeypatch):
    """Both of PyYAML's parsers: the package need not have been built with libyaml."""
    if request.param == "python":
        monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    else:
        assert hasattr(yaml, "CSafeLoader")


def value(text: str):
    document = read_yaml(text)
    assert document.problems == []
    return document.value


def refused(text: str | bytes) -> str:
    """Return all that is said about a text that is wrong."""
    try:
        problems = read_yaml(text, "job.yaml").problems
    except BadJob as error:
        problems = error.problems
    assert problems
    return "\n".join(map(str, problems))


@pytest.mark.parametrize("word", ["on", "off", "yes", "no", "y", "n", "On", "OFF", "Yes", "NO", "Y", "N"])
def test_words_of_yaml_11_are_text(word):
    assert value(f"a: {word}") == {"a": word}
    assert value(f"{word}: a") == {word: "a"}


@pytest.mark.parametrize(
    "text",
    [
        "1:30",
        "12:30:45",
        "2026-11-20",
        "2026-11-20T10:00:00Z",
        "1_000",
        "0b101",
        "0o8",
        "0xG",
        "1e",
        "e5",
        ".",
        "-",
        "+",
        "1.2.3",
        "tRUE",
        "nULL",
        "=",
        "1,000",
        "+.nan",
        "0X1F",
        "0O17",
        "none",
        "TrUe",
    ],
)
def test_what_only_looks_like_more_is_text(text):
    if text in ("-", "="):
        text = f"{text}x"
    assert value(f"a: {text}") == {"a": text}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("12", 12),
        ("-7", -7),
        ("+3", 3),
        ("0123", 123),
        ("-0123", -123),
        ("0o17", 15),
        ("0x1F", 31),
        ("0xff", 255),
    ],
)
def test_integers(text, number):
    document = read_yaml(f"a: {text}")
    assert document.value == {"a": number} and type(document.value["a"]) is int
    assert document.mark(("a",)).text == text


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1.10", 1.1),
        ("3.0e-4", 3e-4),
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        (".5", 0.5),
        ("-.5", -0.5),
        ("1.", 1.0),
        ("+1.5e+3", 1500.0),
        ("012.50", 12.5),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("+.Inf", math.inf),
    ],
)
def test_floats(text, number):
    document = read_yaml(f"a: {text}")
    assert document.value == {"a": number} and type(document.value["a"]) is float
    assert document.mark(("a",)).text == text


def test_not_a_number():
    assert math.isnan(value("a: .nan")["a"]) and math.isnan(value("a: .NaN")["a"])


@pytest.mark.parametrize(
    ("text", "meant"), [("true", True), ("True", True), ("FALSE", False), ("~", None), ("", None), ("Null", None)]
)
def test_constants(text, meant):
    document = read_yaml(f"a: {text}")
    assert document.value == {"a": meant}
    assert document.mark(("a",)).text == text


@pytest.mark.parametrize("text", ["true", "1", "1.10", "null", "~", "", "no", "[1]", "{a: 1}", "# x", "a: b"])
def test_quotes_make_text(text):
    for quote in "'\"":
        assert value(f"a: {quote}{text}{quote}") == {"a": text}
        assert value(f"{quote}{text}{quote}: a") == {text: "a"}


def test_keys_are_always_text():
    assert value("1: a\n0x1F: b\ntrue: c\n~: d\n1.10: e") == {"1": "a", "0x1F": "b", "true": "c", "~": "d", "1.10": "e"}


def test_explicit_tags():
    assert value("a: !!str 0123\nb: !!int '12'\nc: !!float 1\nd: !!bool 'true'\ne: !!null ''\nf: ! 12") == {
        "a": "0123",
        "b": 12,
        "c": 1.0,
        "d": True,
        "e": None,
        "f": "12",
    }
    assert value("a: !!map {b: 1}\nc: !!seq [1]") == {"a": {"b": 1}, "c": [1]}


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system [id]",
        "!!binary aGk=",
        "!!timestamp 2026-01-01",
        "!mine x",
        "!!set {a}",
        "!!seq {a: 1}",
        "!!map [1]",
        "!!int x",
        "!!bool yes",
        "!!map x",
        "!!python/name:os.system ''",
    ],
)
def test_other_tags_are_refused(text):
    said = refused(f"a: 1\nb: {text}")
    assert "job.yaml:2:" in said and "is not supported" in said


def test_lines_are_those_of_the_keys():
    document = read_yaml("a:\n  b: 1\n  c:\n    - x\n    - y: 2\n\n\nd: |\n  text\n", "job.yaml")
    lines = {path: mark.line for path, mark in document.marks.items()}
    assert lines == {
        (): 1,
        ("a",): 1,
        ("a", "b"): 2,
        ("a", "c"): 3,
        ("a", "c", 0): 4,
        ("a", "c", 1): 5,
        ("a", "c", 1, "y"): 5,
        ("d",): 8,
    }
    assert document.mark(("a", "c", 1, "z", 4)).line == 5
    assert document.mark(("q",)).line == 1
    assert {mark.file for mark in document.marks.values()} == {"job.yaml"}


def test_every_doubled_key_is_told_and_the_rest_is_read():
    document = read_yaml("a: 1\nb: 2\na: 3\nc: {d: 1, 'd': 2}\n1: x\n'1': y", "job.yaml")
    assert [(problem.line, problem.hint) for problem in document.problems] == [
        (3, "the first is in line 1 already"),
        (4, "the first is in line 4 already"),
        (6, "the first is in line 5 already"),
    ]
    assert document.value == {"a": 1, "b": 2, "c": {"d": 1}, "1": "x"}


def test_anchors_and_merges():
    text = "base: &b {x: 1, y: 2}\nmore: &m {y: 3, z: 0x1F}\nuse: {<<: [*b, *m], x: 9}\nlist: [*b, *b]\nq: {'<<': 1}"
    document = read_yaml(text)
    assert document.value["use"] == {"x": 9, "y": 2, "z": 31}
    assert document.value["list"] == [{"x": 1, "y": 2}] * 2
    assert document.value["q"] == {"<<": 1}
    assert document.mark(("use", "z")).text == "0x1F"
    assert value("a: &a {x: 1}\nb: &b {<<: *a, y: 2}\nc: {<<: *b}")["c"] == {"x": 1, "y": 2}
    assert value("a: &x 1\nb: &x 2\nc: *x")["c"] == 2


def test_a_merge_of_something_else_is_refused():
    assert "<< takes a mapping" in refused("a: &a 1\nb: {<<: *a}")
    assert "job.yaml:1:" in refused("b: {<<: [1]}")


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: *a}", "&a {<<: *a}"])
def test_an_anchor_within_itself_is_refused(text):
    assert "contains itself" in refused(text)


def test_a_billion_laughs_end_soon():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    assert "over 100,000 values" in refused("\n".join(lines))
    merges = ["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}, *a{i - 1}]}}" for i in range(1, 40))]
    assert "over 100,000 values" in refused("\n".join(merges))


@pytest.mark.parametrize("text", ["[" * 200_000, "{a: " * 50_000, "- " * 5_000 + "x", "&a [" * 5_000])
def test_deep_nesting_is_refused_before_it_hurts(text):
    assert f"deeper than {MAX_DEPTH} levels" in refused(text)


def test_a_huge_file_is_refused():
    assert "are allowed" in refused("a" * (MAX_CHARACTERS + 1))


def test_a_number_of_ten_thousand_digits_is_refused():
    assert "too long" in refused("a: " + "1" * 10_000)


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        ("a: b: c", 1, "quote a value that contains ': '"),
        ("a: 1\nb:\n\t- x", 3, "indent with spaces"),
        ("a: 1\nb: @x", 2, "quote a value that begins with @"),
        ("a: 1\nb: [1, 2", 2, ""),
        ("a: *x", 1, "quote a value that begins with *"),
        ("a: 1\n---\nb: 2", 3, "keep one document and remove the line ---"),
        ('a: "\\q"', 1, "a backslash is written \\\\"),
        ("a: 'x", 1, "close the quote"),
        ("a: 1\n b: 2", 2, ""),
        ("a: 1\nb: \x07", 2, "double quotes"),
        ("a: 1\n? [x]\n: 2", 2, "quote a key"),
    ],
)
def test_broken_texts_say_where_and_what(text, line, hint):
    said = refused(text)
    assert f"job.yaml:{line}:" in said
    assert hint in said


def test_bytes_that_are_no_text():
    assert "not UTF-8 text (byte 3)" in refused(b"a: \xff\xfe")
    assert read_yaml(b"\xef\xbb\xbfa: 1").value == {"a": 1}
    assert refused(bytes(range(256)))


def test_half_a_surrogate_pair_is_refused():
    assert "surrogate" in refused("a: 1\nb: \ud800")
    assert refused('{"a": "\\ud800"}')


def test_nothing_is_nothing():
    assert read_yaml("").value is None
    assert read_yaml("# only a comment\n").value is None
    assert read_yaml("---\n...\n").value is None


def test_characters_that_libyaml_takes_for_breaks_are_kept():
    text = "a\x85b\u2028c\u2029d\ufeffe\x7ff\x9fg"
    assert value(f"k: '{text}'") == {"k": text}
    assert value(f"k: {text}\nl: 1") == {"k": text, "l": 1}
    assert read_yaml(f"k: {text}\nl: 1").mark(("l",)).line == 2


@settings(max_examples=300, deadline=None)
@given(
    st.recursive(
        TEXT | st.integers() | st.booleans() | st.none(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
        max_leaves=12,
    )
)
def test_json_is_read_as_json(meant):
    for ascii_only in (False, True):
        assert value(json.dumps({"k": meant}, ensure_ascii=ascii_only)) == {"k": meant}
        assert value(json.dumps({"k": meant}, ensure_ascii=ascii_only, indent=2)) == {"k": meant}


def as_written(document, path=()):
    """Return the document's values with every scalar as its text (PyYAML quotes no `1e5`, a number only in YAML 1.2)."""
    at = document.value
    for key in path:
        at = at[key]
    if isinstance(at, dict):
        return {key: as_written(document, (*path, key)) for key in at}
    if isinstance(at, list):
        return [as_written(document, (*path, number)) for number in range(len(at))]
    return document.mark(path).text


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(TEXT.filter(lambda t: len(t) < 50), TEXT | st.lists(TEXT, max_size=3), max_size=4))
def test_what_pyyaml_writes_is_read_as_it_was(meant):
    assert as_written(read_yaml(yaml.safe_dump(meant, width=30))) == meant
    if not set("\x85\u2028\u2029") & set(json.dumps(meant, ensure_ascii=False)):  # raw, line breaks for YAML 1.1 alone
        assert as_written(read_yaml(yaml.safe_dump(meant, allow_unicode=True))) == meant


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("1", 1),
        ("0123", 123),
        ("true", True),
        ("", None),
        ("a b", "a b"),
        ("a: b", "a: b"),
        ("- x", "- x"),
        ("x #y", "x #y"),
        ("*x", "*x"),
        ("!x", "!x"),
        ("[1, b]", [1, "b"]),
        ("{a: 1}", {"a": 1}),
        ('"1"', "1"),
        ("'a''b'", "a'b"),
        ("a\nb", "a\nb"),
        (" 1", " 1"),
        ('"\\ud83d\\ude00"', "😀"),
    ],
)
def test_a_value_on_the_command_line(text, meant):
    document = scalar(text, "--set")
    assert document.value == meant and type(document.value) is type(meant)
    assert document.mark(()).line is None and document.mark(()).file == "--set"


@pytest.mark.parametrize("text", ["[1", "[0-9]+", '"a', "{a: 1, a: 2}"])
def test_a_broken_value_on_the_command_line(text):
    with pytest.raises(BadJob):
        scalar(text, "--set")


@settings(max_examples=300, deadline=None)
@given(TEXT)
def test_any_text_can_be_given_on_the_command_line(text):
    assert scalar(json.dumps(text), "--set").value == text
    if text[:1] not in tuple("[{'\""):
        assert scalar(text, "--set").mark(()).text == text
