from __future__ import annotations

import io
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudtrain import events
from cloudtrain.backends import registry
from cloudtrain.events import State
from cloudtrain.metrics import dicts
from cloudtrain.metrics.parser import MetricParser
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching.watch_all import watch_run
from cloudtrain.testing.memory import MemoryBackend

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.sampled_from(sorted(events.KINDS)),
    st.dictionaries(st.text(max_size=10).filter(lambda k: k != "kind"), plain, max_size=5),
)
def test_parse_is_the_inverse_of_format(kind, data):
    line = events.format(kind, data)
    assert "\n" not in line
    assert events.parse(line) == (kind, data)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "hello",
        "::cloudtrain::",
        "::cloudtrain::{",
        "::cloudtrain::[]",
        '::cloudtrain::{"kind":"other"}',
        " ::cloudtrain::{}",
        '::cloudtrain::{"kind":1}',
        events.format("metric", {"text": "x" * events.MAX_BYTES}),
    ],
)
def test_other_lines_are_ordinary_text(line):
    assert events.parse(line) is None


def metrics(*lines, **patterns):
    parser = MetricParser(patterns)
    found = [point for line in lines for point in parser.metrics(line)]
    return [point[:3] for point in found + [point for _, points in parser.flush() for point in points]]


def test_trainer_dictionaries_are_heard():
    assert metrics("{'loss': 2.5, 'learning_rate': 1e-05, 'epoch': 0.1}", "{'loss': '2.25', 'epoch': '0.2'}") == [
        (1, "loss", 2.5),
        (1, "learning_rate", 1e-05),
        (2, "loss", 2.25),
    ]


@pytest.mark.parametrize(
    "line",
    ["{'loss': ", "{'loss': __import__('os')}", "x {'loss': 1}", "{'a': [1]}", "{" + "'" * 9 + "}", "{'b': True}"],
)
def test_what_is_no_such_dictionary_is_not(line):
    assert metrics(line) == []


def test_the_users_own_expressions():
    found = metrics("step 3 loss=2.5 acc=1e-1", "loss=nan", "loss=oops", loss=r"loss=(\S+)", acc=r"acc=([0-9.e+-]+)")
    assert found[:2] == [(3, "loss", 2.5), (3, "acc", 0.1)], "the step of the line is the script's"
    assert found[2][:2] == (4, "loss") and math.isnan(found[2][2])
    assert len(found) == 3


def test_steps_that_are_said_are_the_steps():
    assert metrics("{'loss': 2.0, 'step': 50}", "{'loss': 1.0}") == [(50, "loss", 2.0), (51, "loss", 1.0)]
    found = metrics("step=60 loss=1.5", "loss=1.0", loss=r"(?:step=(?P<step>\d+) )?loss=(?P<value>[0-9.]+)")
    assert found == [(60, "loss", 1.5), (61, "loss", 1.0)]
    assert metrics("5: 0.25", acc=r"(?P<step>\d+): ([0-9.]+)") == [(5, "acc", 0.25)]


def test_each_rank_counts_for_itself():
    parser = MetricParser({})
    bar = " 50%|###  | {}/10 [00:00<00:00, 9.90it/s, acc=0.5]"
    lines = [
        (0, "{'loss': 3.0}"),
        (1, "{'loss': 4.0}"),
        (1, "{'other': 1.0}"),
        (0, "{'loss': 2.0}"),
        (1, "{'loss': 5.0}"),
        (0, bar.format(5)),
        (1, bar.format(4)),
    ]
    found = [(rank, *point[:3]) for rank, line in lines for point in parser.metrics(line, rank)]
    assert found == [
        (0, 1, "loss", 3.0),
        (1, 1, "loss", 4.0),
        (1, 1, "other", 1.0),
        (0, 2, "loss", 2.0),
        (1, 2, "loss", 5.0),
        (0, 5, "acc", 0.5),
        (1, 4, "acc", 0.5),
    ]


def test_a_count_continues_where_another_parser_was_and_after_a_resume():
    parser = MetricParser({}, {(0, "loss"): 7}, {(0, "loss"): 3, (0, "lr"): 9, (1, "loss"): 5})
    lines = [(0, "{'loss': 1.0, 'lr': 0.1}"), (1, "{'loss': 1.0}"), (2, "{'loss': 1.0}")]
    found = [(point.step, point.name) for rank, line in lines for point in parser.metrics(line, rank)]
    assert found == [(8, "loss"), (10, "lr"), (6, "loss"), (1, "loss")]


def test_the_epoch_is_a_second_axis():
    (point,) = MetricParser({}).metrics("{'loss': '2.25', 'epoch': '0.2'}")
    assert point == (1, "loss", 2.25, 0.2)
    (point,) = MetricParser({"acc": r"epoch (?P<epoch>\d+): acc (?P<value>\S+)"}).metrics("epoch 3: acc 0.5")
    assert point == (3, "acc", 0.5, 3.0)


def test_an_evaluation_without_a_step_has_that_of_the_training():
    lines = ["{'loss': 3.0, 'step': 10}", "{'loss': 2.0, 'step': 20}", "{'eval_loss': 2.5}", "{'loss': 1.0}"]
    assert metrics(*lines)[2:] == [(20, "eval_loss", 2.5), (21, "loss", 1.0)]
    assert metrics("{'eval_loss': 2.5}", "{'eval_loss': 2.0}") == [(1, "eval_loss", 2.5), (2, "eval_loss", 2.0)]
    after = MetricParser({}, {(0, "loss"): 40, (0, "eval_loss"): 50}).metrics("{'val/loss': 1.0}")
    assert [point.step for point in after] == [40], "another parser has read the training's lines"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("eval_loss", True), ("val/acc", True), ("top1.Validation", True), ("test_f1", True), ("epoch_val_loss", True)]
    + [("loss", False), ("latest_loss", False), ("value", False), ("device_s", False), ("contest", False)],
)
def test_an_evaluation_is_known_by_its_name(name, expected):
    assert events.is_evaluation(name) is expected


def test_an_event_behind_a_progress_bar_is_heard():
    bar = " 99%|#########8| 296/300 [00:16<00:00, 19.52it/s]"
    assert events.parse(bar + events.format("metric", {"step": 1, "loss": 2.0})) == ("metric", {"step": 1, "loss": 2.0})
    assert events.parse(bar) is None and events.parse("]" + events.MARK) is None
    assert events.parse("say " + events.format("metric", {"step": 1})) is None


@pytest.mark.parametrize("moves", ["", "\x1b[0m"])
def test_of_an_event_behind_a_progress_bar_the_bar_is_shown(moves: str):
    bar, event = " 99%|#########8| 296/300 [00:16<00:00, 19.52it/s]", events.format("metric", {"step": 1, "loss": 2.0})
    assert events.without_event(f"{bar}{moves}{event}") == bar + moves
    assert events.without_event(f"{moves}{event}") is None
    for text in (bar, "", f"say {event}", f"{events.MARK}no event"):
        assert events.without_event(text) == text


def test_a_progress_bar_tells_values_and_counts_on_over_epochs():
    parser = MetricParser({})
    lines = [
        "  0%|          | 0/2 [00:00<?, ?it/s]",
        " 50%|#####     | 1/2 [00:00<00:00, 9.90it/s, loss=1.5, lr=1e-3]",
        " 50%|#####     | 1/2 [00:00<00:00, 9.90it/s, loss=1.5, lr=1e-3]",
        "epoch 0: 100%|##########| 2/2 [00:00<00:00,  9.90it/s, loss=1.25, name=x]",
        "  0%|          | 0/2 [00:00<?, ?it/s]",
        " 50%|#####     | 1/2 [00:00<00:00, 1.20s/it, loss=nan]",
    ]
    found = [(step, name, repr(value)) for line in lines for step, name, value, _ in parser.metrics(line)]
    assert found == [(1, "loss", "1.5"), (1, "lr", "0.001"), (2, "loss", "1.25"), (3, "loss", "nan")]


UP = "\x1b[A"


@pytest.mark.parametrize(
    ("line", "step"),
    [
        (
            UP + "{'eval_loss': '0.738', 'eval_runtime': '0.0052', 'epoch': '1'}",
            1,
        ),  # transformers 5.23, two bars at once
        (f"{UP}\r          \r{UP}  " + "{'eval_loss': '0.738', 'eval_runtime': '0.0052', 'epoch': '1'}\r", 1),
        (f"100%|###| 2/2 [00:00<00:00, 1266.97it/s]{UP}\r     \r" + "{'eval_loss': 0.738, 'eval_runtime': 0.0052}", 2),
        ("  0%|          | 0/8 [00:00<?, ?it/s]{'eval_loss': 0.738, 'eval_runtime': 0.0052}", 0),
        ("\x1b[1;32m{'eval_loss': 0.738, 'eval_runtime': 0.0052}\x1b[0m", 1),
    ],
)
def test_a_dictionary_beside_a_progress_bar_is_heard(line, step):
    assert metrics(line) == [(step, "eval_loss", 0.738), (step, "eval_runtime", 0.0052)]


def test_what_moves_the_cursor_hides_neither_bar_nor_event_nor_the_users_expression():
    bar = f"{UP} 50%|\x1b[32m#####     \x1b[0m| 1/2 [00:00<00:00, 9.90it/s, loss=1.5]{UP}"
    assert metrics(bar) == [(1, "loss", 1.5)]
    said = events.format("metric", {"step": 1, "loss": 2.0})
    assert events.parse(UP + said) == events.parse(bar + said) == ("metric", {"step": 1, "loss": 2.0})
    assert metrics("\x1b[33mloss 2.5\x1b[0m", loss=r"^loss (\S+)$") == [(1, "loss", 2.5)]
    assert metrics("\x1b", "\x1b[", "\x1b]0;title", f"see [1, a/b] {UP}" + "{'loss': 1}") == []


def test_what_python_prints_and_does_not_read_is_heard():
    found = metrics(
        "{'loss': nan, 'grad_norm': -inf, 'epoch': 0.5, 'step': 3}", "{'loss': np.float64(2.5), 'note': 'a: nan,'}"
    )
    assert [(step, name, str(value)) for step, name, value in found] == [
        (3, "loss", "nan"), (3, "grad_norm", "-inf"), (4, "loss", "2.5")
    ]  # fmt: skip


@pytest.mark.parametrize(
    "value",
    ["tensor(1.25)", "tensor(1.25, device='cuda:0', grad_fn=<NllLossBackward0>)", "'tensor(1.25)'", "np.float32(1.25)"]
    + [
        "tensor(1.2500e+00, dtype=torch.bfloat16)",
        "Array(1.25, dtype=float32, weak_type=True)",
        "torch.tensor( 1.25 )",
    ],
)
def test_the_number_of_a_tensor_is_heard(value):
    line = "{'loss': " + value + ", 'lr': 0.5, 'step': 7}"
    assert metrics(line) == [(7, "loss", 1.25), (7, "lr", 0.5)]


@pytest.mark.parametrize(
    "value",
    ["<Accuracy object at 0x7f>", "tensor([1., 2.])", "(1, <x>)", "{'lr': <x>, 'b': 2}", "lambda: 0", "datetime(20, 1)"]
    + [
        "'it said: , \\'lr\\': 3', 'object': <x>",
        "\"it's, 'lr': 3\", 'x': <x>",
        "1" * 400 + "j, 'x': <x>",
        "True, 'y': <y>",
    ],
)
def test_one_value_that_cannot_be_read_does_not_hide_the_others(value):
    line = "{'loss': 1.25, 'other': " + value + ", 'lr': 0.5}"
    assert metrics(line) == [(1, "loss", 1.25), (1, "lr", 0.5)]


@pytest.mark.parametrize(
    "text", ["(", "'\\", "\\", "'", '"', "{'", "a,", "tensor(", "'a': 1, b", "1" * 99 + "e", "\x1b["]
)
def test_what_a_hostile_dictionary_costs_is_bounded(text, monkeypatch):
    taken = []
    findall = dicts._PIECE.findall
    monkeypatch.setattr(dicts, "_PIECE", type("", (), {"findall": lambda text: taken.append(text) or findall(text)}))
    assert len(metrics("{'loss': 1.25, 'x': <" + text * (60_000 // len(text)) + "}")) <= 2
    assert all(len(text) <= dicts.MAX_ROW for text in taken)
    assert len(findall("{" + text * 10)) <= 10 * len(text) + 1  # every character once


def drawn(*, steps=3, by=1, told="loss=1.25, lr=1e-5", **options):
    """What a parser hears of the lines that tqdm itself draws."""
    tqdm = pytest.importorskip("tqdm").tqdm
    out = io.StringIO()
    with tqdm(file=out, mininterval=0, miniters=0, **options) as bar:
        for _ in range(steps):
            bar.set_postfix_str(told, refresh=False)
            bar.update(by)
    return metrics(*out.getvalue().replace("\r", "\n").split("\n"))


@pytest.mark.parametrize("unit", ["it", "batch", " ex", "B", "Epoch", "kimg", "images/gpu", "sample(s)", "s"])
@pytest.mark.parametrize(
    "more", [{"total": 4}, {}, {"total": 4, "desc": "epoch 1"}, {"desc": "epoch 1: 2/9"}, {"total": 2}]
)
def test_bars_of_every_unit_with_and_without_a_size(unit, more):
    found = drawn(unit=unit, **more)
    assert found == [(step, name, value) for step in (1, 2, 3) for name, value in (("loss", 1.25), ("lr", 1e-5))]


@pytest.mark.parametrize("more", [{"total": 2_000_000}, {}, {"total": 2_000_000, "ascii": True, "ncols": 0}])
@pytest.mark.parametrize("unit", ["it", "tok", " tokens", "B"])
def test_bars_that_are_scaled(unit, more):
    assert [step for step, name, _ in drawn(unit=unit, unit_scale=True, by=700, told="loss=1", **more)] == [
        700,
        1400,
        2100,
    ]
    steps = [step for step, *_ in drawn(unit=unit, unit_scale=True, by=123_456, told="loss=1", **more)]
    assert steps == [123_000, 247_000, 370_000]
    assert drawn(unit=unit, unit_scale=True, by=1_500_000, steps=1, told="loss=1", **more) == [(1_500_000, "loss", 1.0)]


def test_slow_bars_tensors_in_bars_and_the_next_epoch_of_a_bar_without_a_size():
    lines = [
        "12batch [00:30,  2.50s/batch, loss=tensor(1.5, device='cuda:0'), seen=tensor([1., 2.]), lr=0.1]",
        "1batch [00:02, 2.50s/batch, loss=tensor(1.25), why=no idea, epoch two, lr=0.1]",
        "Epoch 0: |          | 2/? [00:05<?,  0.40batch/s, loss=1.0]",
    ]
    assert metrics(*lines) == [
        (12, "loss", 1.5),
        (12, "lr", 0.1),
        (13, "loss", 1.25),
        (13, "lr", 0.1),
        (14, "loss", 1.0),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "[00:03, 4.0it/s, loss=1.2]",
        "it [00:03, 4.0it/s, loss=1.2]",
        "12it [00:03, 4.0ex/s, loss=1.2]",
        "12it [00:03, 4.0it/s]",
    ]
    + [
        "12it [00:03, 4.0it/s, loss=1.2",
        "1.2.3/4 [00:03, 4.0it/s, loss=1.2]",
        "3 [12:03, a/b, x=1]",
        "12it [00:03, /s, loss=1]",
    ],
)
def test_what_only_looks_like_a_bar_tells_nothing(line):
    assert metrics(line) == []


HOSTILE = [
    "{'loss': 1, []: 2}",
    "{'tmpl': {{}}}",
    "{'loss': 1, 'step': 1e300}",
    "99999999999999999999/99999999999999999999 [00:01<00:01, 9.90it/s, loss=1]",
    "9Y/9Y [00:01<00:01, 9.90it/s, loss=1]",
    "{'\\ud800': 1}",
    "metric 1e400, step 1e300",
    events.MARK + '{"kind":"metric","a":' + "[" * 4000,
    events.MARK + '{"kind":"state","a":' + "[" * 900 + "]" * 900 + "}",
    events.MARK + '{"kind":"metric","\\ud800":1}',
    events.MARK + '{"kind":"metric","loss":1,"step":1e300}',
    events.MARK + '{"kind":"state","state":"\\udce9 \\ud83d\\ude00"}',
    events.MARK + '{"kind":[]}',
]


@pytest.mark.parametrize("line", HOSTILE)
def test_no_line_ends_the_watcher(line, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "BUILT_IN", dict(registry.BUILT_IN))
    MemoryBackend.install()
    (tmp_path / "train.py").write_text("print(1)\n")
    job = {"name": "x", "source": str(tmp_path), "entrypoint": "train.py"}
    job["metrics"] = {"mine": r"metric (?P<value>\S+), step (?P<step>\S+)"}
    run = Submitter("memory", watch=False).submit(job)
    (attempt,) = run.attempts
    MemoryBackend.say(attempt.handle, line, events.format("metric", {"step": 7, "told": 1.5}))
    MemoryBackend.finish(attempt.handle, State.SUCCEEDED, 0)
    status = watch_run(run.store, run.run_id)
    assert status is not None and status.state is State.SUCCEEDED
    assert [(row.step, row.value) for row in run.metrics("told")] == [(7, 1.5)], "what stands behind it is heard"
    assert all(row.step in (0, 1, 7) for row in run.metrics())
    said = [*(event.data for event in run.store.events(run.run_id)), *(row.name for row in run.metrics())]
    assert json.dumps(said, ensure_ascii=False).encode(), "what is kept can be written down"


def test_half_a_character_in_an_event_is_replaced_and_a_whole_one_stays():
    assert events.parse(events.MARK + '{"kind":"state","a":["\\ud800","\\ud83d\\ude00"]}') == (
        "state",
        {"a": ["?", "😀"]},
    )
    assert events.parse(events.MARK + '{"kind":"state","caf\udce9":"\u00e9"}') == ("state", {"caf?": "é"})


def test_a_count_that_is_no_step_does_not_spoil_those_behind_it():
    huge = "9Y/9Y [00:01<00:01, 9.90it/s, loss=1]"
    assert metrics("{'lr': 2, 'step': 1e300}", "{'lr': 3}", huge, "1/2 [00:01<00:01, 9.90it/s, loss=1]") == [
        (1, "lr", 2.0),
        (2, "lr", 3.0),
        (1, "loss", 1.0),
    ]


def test_a_name_with_an_expression_is_heard_by_that_alone():
    bar = "1/9 [00:01<00:01, 9.90batch/s, loss=9.0, avg_loss=1.5]"
    row = "{'loss': 9.0, 'lr': 0.5, 'note': 'avg_loss=2.5'}"
    assert sorted(metrics(bar, row, loss=r"avg_loss=([\d.]+)")) == [
        (1, "avg_loss", 1.5),
        (1, "loss", 1.5),
        (1, "lr", 0.5),
        (2, "loss", 2.5),
    ]


@pytest.mark.parametrize("shown", ["console", "page", "notebook", "terminal"])
def test_direction_marks_and_zero_width_characters_are_seen_wherever_a_text_is_shown(shown):
    from cloudtrain.cli.view import terminal
    from cloudtrain.console import text
    from cloudtrain.report import notebook, page

    show = {"console": text.clean, "page": page.escape_text, "terminal": terminal.clean}
    show["notebook"] = lambda value: notebook.html_table((), [(value,)])
    assert "a\\u202eb\\u200bc\\ufeff\\u2066d" in show[shown]("a\u202eb\u200bc\ufeff\u2066d")
    assert "\u0645\u06cc\u200c\u062e" in show[shown]("\u0645\u06cc\u200c\u062e") or shown == "page"  # joins letters
