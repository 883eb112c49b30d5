"""Hyperparameters to arguments, read back by the real parsers."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import field, make_dataclass
from decimal import Decimal
from pathlib import Path

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudtrain.job.arguments import STYLES, Number, argv, check_key, flat, normalised, text_of

CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
HOSTILE = st.text(st.sampled_from("ab1.,:;=-_+~#%&|<>*?!@^/\\'\"`${}()[] \t\r\ntrufalsné😀\u2028"), max_size=12)
TEXT = (
    HOSTILE
    | st.text(CHARACTERS, max_size=12)
    | st.sampled_from(["", "-", "-x", "--k", "--k=1", "-1", "-1e-5", "true", "null", "@f"])
)
TEXT = TEXT.filter(lambda text: text != "--" or sys.version_info >= (3, 13))  # which argparse itself loses before
KEYS = st.sampled_from(["lr", "learning-rate", "a.b", "x_1", "é", "L"])


def arguments(value, style="argparse", key="k"):
    return argv({key: normalised(value, style)}, style)


@pytest.mark.parametrize(
    ("style", "value", "expected"),
    [
        ("argparse", Number("3.0e-4"), ["--k", "3.0e-4"]),
        ("argparse", [Number("2"), Number("4")], ["--k", "2", "4"]),
        ("argparse", True, ["--k"]),
        ("argparse", False, []),
        ("argparse", None, []),
        ("argparse", "-x", ["--k=-x"]),
        ("argparse", Number("-1"), ["--k=-1"]),
        ("argparse", "a b", ["--k", "a b"]),
        ("argparse", "", ["--k", ""]),
        ("argparse", [], ["--k"]),
        ("argparse", ["-x"], ["--k=-x"]),
        ("argparse", ["-1", "-.5", "-"], ["--k", "-1", "-.5", "-"]),
        ("argparse", [True, False], ["--k", "true", "false"]),
        ("hf", True, ["--k", "true"]),
        ("hf", False, ["--k", "false"]),
        ("hf", None, []),
        ("hf", [2, 4], ["--k", "2", "4"]),
        ("hf", "-x", ["--k=-x"]),
        ("hf", {"a": Number("1e-5"), "b": [True, None], "c": "1"}, ["--k", '{"a": 1e-5, "b": [true, null], "c": "1"}']),
        ("hf", {}, ["--k", "{}"]),
        ("hydra", True, ["k=true"]),
        ("hydra", False, ["k=false"]),
        ("hydra", None, ["k=null"]),
        ("hydra", Number("3.0e-4"), ["k=3.0e-4"]),
        ("hydra", ["a", 1, None, [True]], ["k=[a,1,null,[true]]"]),
        ("hydra", [{"a": 1, "b-c": "d e"}], ["k=[{a:1,b-c:'d e'}]"]),
        ("hydra", "adamw", ["k=adamw"]),
        ("hydra", "configs/a.b", ["k=configs/a.b"]),
        ("hydra", "True", ["k='True'"]),
        ("hydra", "", ["k=''"]),
        ("hydra", "a,b", ["k='a,b'"]),
        ("hydra", "it's", [r"k='it\'s'"]),
        ("hydra", "c:\\", [r"k='c:\\'"]),
        ("hydra", "${x}", [r"k='\${x}'"]),
        ("hydra", "\\${x}", [r"k='\\\${x}'"]),
        ("hydra", "\\\\'\\${", [r"k='\\\\\'\\\${'"]),
        ("hydra", "\\\n", ["k='\\\n'"]),
        ("hydra", "0123", ["k='0123'"]),
    ],
)
def test_forms(style, value, expected):
    assert arguments(value, style) == expected


def test_order_is_kept_and_keys_are_written_as_they_are():
    assert argv({"b": "1", "a": True, "c-d": "2", "e.f": "3"}, "argparse") == [
        "--b",
        "1",
        "--a",
        "--c-d",
        "2",
        "--e.f",
        "3",
    ]
    assert argv({"+b": "1", "db@x": "y"}, "hydra") == ["+b=1", "db@x=y"]


@settings(max_examples=400, deadline=None)
@given(KEYS, TEXT)
def test_argparse_reads_any_text(key, text):
    for style in ("argparse", "hf"):
        parser = argparse.ArgumentParser(allow_abbrev=False)
        parser.add_argument(f"--{key}", dest="value")
        parser.add_argument("--after", action="store_true")
        found = parser.parse_args([*arguments(text, style, key), "--after"])
        assert found.value == text and found.after


@settings(max_examples=400, deadline=None)
@given(st.lists(TEXT, max_size=4))
def test_argparse_reads_any_list_that_has_a_form(texts):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--k", nargs="*")
    parser.add_argument("--after", action="store_true")
    try:
        written = arguments(texts)
    except ValueError as error:
        assert "pass the list through args" in str(error)
        assert len(texts) > 1 and any(re.match(r"-[\s\S]", text) for text in texts)
        return
    found = parser.parse_args([*written, "--after"])
    assert found.k == texts and found.after


@pytest.mark.parametrize(
    "texts", [["-x", "a"], ["a", "--b"], ["-1e-5", "1"], ["--", "a"], ["-a b", "c"], ["1", "-inf"]]
)
def test_lists_that_argparse_would_misread_are_refused(texts):
    for style in ("argparse", "hf"):
        with pytest.raises(ValueError, match="through args"):
            normalised(texts, style)
    assert normalised(texts, "hydra") == texts


@settings(max_examples=300, deadline=None)
@given(TEXT, st.integers(), st.floats(allow_nan=False), st.booleans())
def test_click_reads_any_text(text, whole, number, flag):
    @click.command()
    @click.option("--text")
    @click.option("--whole", type=int)
    @click.option("--number", type=float)
    @click.option("--flag", is_flag=True)
    def script(**found):
        return found

    given_ = {
        key: normalised(value, "argparse")
        for key, value in {"text": text, "whole": whole, "number": number, "flag": flag}.items()
    }
    found = script.main(argv(given_, "argparse"), standalone_mode=False)
    assert found == {"text": text, "whole": whole, "number": number, "flag": flag}


@pytest.fixture(scope="module")
def hf_parser():
    """The real HfArgumentParser, over fields of every kind that it knows."""
    from transformers import HfArgumentParser

    fields = [
        ("text", str),
        ("whole", int),
        ("number", float),
        ("on", bool, True),
        ("off", bool, False),
        ("many", list[str], field(default_factory=list)),
    ]
    return HfArgumentParser(make_dataclass("Arguments", fields))


@settings(max_examples=200, deadline=None)
@given(TEXT, st.integers(), st.floats(allow_nan=False), st.booleans(), st.booleans(), st.lists(TEXT, max_size=3))
def test_hf_argument_parser_reads_any_value(hf_parser, text, whole, number, on, off, many):
    values = {"text": text, "whole": whole, "number": number, "on": on, "off": off, "many": many}
    try:
        arguments_ = argv({key: normalised(value, "hf") for key, value in values.items()}, "hf")
    except ValueError as error:
        assert "through args" in str(error)
        return
    if not many:
        arguments_.remove("--many")  # whose nargs is "+" there
    (found,) = hf_parser.parse_args_into_dataclasses(arguments_)
    assert vars(found) == values


def hydra_value(argument: str):
    """Read an override as hydra itself and OmegaConf do."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    override = OverridesParser.create().parse_override(argument)
    config = OmegaConf.create({override.key_or_group: override.value()})
    return OmegaConf.to_container(config, resolve=True)[override.key_or_group]


def alike(expected: object, seen: object) -> bool:
    """Return whether a value is what was written; for hydra a number stands for the text that it was made of."""
    if isinstance(seen, list):
        return isinstance(expected, list) and len(expected) == len(seen) and all(map(alike, expected, seen))
    if isinstance(seen, int | float) and not isinstance(seen, bool):
        return isinstance(expected, str) and repr(type(seen)(expected)) == repr(seen)
    return type(seen) is type(expected) and seen == expected


@settings(max_examples=600, deadline=None)
@given(st.recursive(TEXT | st.booleans() | st.none(), lambda inner: st.lists(inner, max_size=3), max_leaves=5))
def test_hydra_quoting(value):
    (argument,) = arguments(value, "hydra")
    assert alike(value, hydra_value(argument))


@pytest.mark.parametrize("key", ["", "-x", "--lr", "a b", "a=b", "a\nb", "-"])
def test_keys_that_are_no_option(key):
    for style in ("argparse", "hf"):
        with pytest.raises(ValueError, match="name"):
            check_key(key, style)


@pytest.mark.parametrize("key", ["lr", "a.b", "+a.b", "++a", "~a", "db@src:dst", "group/sub", "a-b"])
def test_keys_of_hydra(key):
    check_key(key, "hydra")


@pytest.mark.parametrize("key", ["", "a b", "a=b", "-a", "a'b", "é"])
def test_keys_that_are_none_of_hydra(key):
    with pytest.raises(ValueError, match="not a valid key"):
        check_key(key, "hydra")


def test_nested_mappings_become_dotted_keys():
    nested = {"optim": normalised({"lr": Number("1.10"), "adam": {"beta": [1, 2]}}, "argparse"), "x": "1"}
    assert flat(nested) == {"optim.lr": "1.10", "optim.adam.beta": ["1", "2"], "x": "1"}
    with pytest.raises(ValueError, match=r"a\.b is given twice"):
        flat({"a": {"b": "1"}, "a.b": "2"})
    for style in STYLES[::2]:
        with pytest.raises(ValueError, match="name|key"):
            normalised({"b c": 1}, style)


@pytest.mark.parametrize("key", ["b c", "a:b", "", "it's"])
def test_mappings_in_hydras_lists_have_plain_keys(key):
    with pytest.raises(ValueError, match="letters, digits"):
        normalised([{key: 1}], "hydra")


@pytest.mark.parametrize("value", [[None], [[1]], [{"a": 1}], [1, None]])
def test_lists_of_more_than_scalars_have_no_form(value):
    for style in ("argparse", "hf"):
        with pytest.raises(ValueError, match="cannot be written on a command line"):
            normalised(value, style)
    normalised(value, "hydra")


def test_values_of_python():
    import numpy as np

    values = [
        1,
        0.1,
        1e-05,
        float("inf"),
        Decimal("1.10"),
        Path("/a b"),
        np.float32(0.1),
        np.float64(0.1),
        np.int64(3),
        True,
        None,
        "x",
    ]
    assert [text_of(value) for value in values] == [
        "1",
        "0.1",
        "1e-05",
        "inf",
        "1.10",
        "/a b",
        "0.1",
        "0.1",
        "3",
        True,
        None,
        "x",
    ]
    assert type(text_of(Number("1"))) is str
    for value in (object(), b"x", {1}, ...):
        with pytest.raises(ValueError, match="cannot be written as an argument"):
            text_of(value)


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        HOSTILE | st.integers() | st.booleans() | st.none(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(HOSTILE, inner, max_size=3),
        max_leaves=6,
    )
)
def test_mappings_are_json_for_hf(value):
    (_, text) = arguments({"v": value}, "hf")
    assert json.loads(text) == {"v": value}


@pytest.mark.parametrize(
    ("text", "number"),
    [("1e-5", 1e-5), ("0x1F", 31), ("0123", 123), ("1.", 1.0), (".5", 0.5), ("1.10", 1.1), ("0o17", 15)],
)
def test_numbers_in_json_are_numbers(text, number):
    assert json.loads(arguments({"v": Number(text)}, "hf")[1]) == {"v": number}
    assert json.loads(arguments({"v": text}, "hf")[1]) == {"v": text}


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(STYLES),
    st.recursive(
        TEXT | st.integers() | st.floats() | st.booleans(), lambda inner: st.lists(inner, max_size=3), max_leaves=4
    ),
)
def test_what_is_normalised_stays_as_it_is(style, value):
    try:
        once = normalised(value, style)
    except ValueError:
        return
    assert normalised(json.loads(json.dumps(once)), style) == once
