"""Which charts of a project are shown, in what order, and what of it the home keeps."""

from cloudtrain.console import layout, looks
from cloudtrain.console.curvestyle import CurveStyle, subtract
from cloudtrain.console.layout import PINNED, Layout
from cloudtrain.console.pages.sweep import Trial, sort_trials
from cloudtrain.history.store import Store

NAMES = ["train/loss", "train/acc", "train/lr", "eval/loss", "other/x"]


def titles(of: Layout) -> dict[str, list[str]]:
    return {section.prefix: [chart.title for chart in section.charts] for section in of.arrange(NAMES, ())}


def test_charts_are_pinned_hidden_and_moved():
    of = Layout()
    of.toggle("pinned", "other/x")
    of.toggle("hidden", "eval/loss")
    of.move("train/lr", "train/loss", ["train/loss", "train/acc", "train/lr"])
    assert titles(of) == {PINNED: ["other/x"], "train": ["train/lr", "train/loss", "train/acc"]}
    of.toggle("pinned", "train/acc")
    of.move("train/acc", "other/x", ["other/x", "train/acc"])
    assert titles(of) == {PINNED: ["train/acc", "other/x"], "train": ["train/lr", "train/loss"]}
    of.toggle("pinned", "other/x")
    assert titles(of)["other"] == ["other/x"]


def test_sections_beyond_the_first_charts_are_closed_until_a_person_opens_them():
    of = Layout()
    sections = of.arrange(NAMES, ())
    assert [len(charts) for charts in of.drawn(sections, 2).values()] == [2, 0, 0]
    of.set_open("other", True)
    of.set_open("train", False)
    assert [len(charts) for charts in of.drawn(sections, 2).values()] == [0, 1, 1]
    of.set_open("train", True)
    assert of.closed == [] and of.opened == ["other", "train"]


def test_a_layout_is_kept_and_one_that_is_damaged_is_empty(tmp_path):
    store = Store(tmp_path)
    layout.write(store, "lm", Layout(pinned=["a"]))
    assert layout.read(store, "lm") == Layout(pinned=["a"]) and layout.read(store, "other") == Layout()
    assert layout.of_json('{"pinned": 3, "hidden": ["b", 7], "new": []}') == Layout(hidden=["b"])
    assert layout.of_json("[") == Layout()
    assert layout.of_json('{"heights": {"a": 300, "b": 9000000, "c": "x"}}') == Layout(heights={"a": 300, "b": 1200})


def test_a_chart_has_another_size_and_its_layout_is_shared():
    of = Layout()
    of.resize("a", 10, True)
    of.resize("b", 420.4, False)
    assert of.heights == {"a": layout.LEAST_PX, "b": 420} and of.wide == ["a"]
    of.resize("a", 300, False)
    assert of.wide == [] and layout.of_json(layout.to_json(of)) == of


def test_curves_become_differences_from_those_of_one_run():
    base = {"meta": "a", "name": "A", "legendgroup": "A", "x": [0, 10, 20], "y": [1.0, 3.0, 5.0]}
    other = {"meta": "b", "name": "B", "legendgroup": "B", "x": [0, 5, 20, 30], "y": [2.0, 2.0, None, 9.0]}
    band = {"x": [0], "y": [1.0]}
    subtract([base, other, band], "a")
    assert base["y"] == [0.0, 0.0, 0.0] and other["y"] == [1.0, 0.0, None, None]
    assert band["visible"] is False


def test_an_address_keeps_the_looks_of_runs_and_leaves_out_what_it_cannot_know():
    style, ids = CurveStyle(), ["a", "b", "c"]
    for what, given in (("hide", "b"), ("baseline", "c"), ("colour", ["a", "#ff00aa"])):
        looks.change(style, ids, what, given)
    style.some = {"train/loss, smooth: 1": frozenset("ac"), "x": frozenset()}
    kept = looks.address(style, ids)
    assert kept["some"] == "0-2:train%2Floss%2C%20smooth%3A%201"
    again = CurveStyle()
    looks.of_address(again, ids, **kept)
    assert (again.hidden, again.baseline, again.colours) == ({"b"}, "c", {"a": "#ff00aa"})
    assert again.some == {"train/loss, smooth: 1": {"a", "c"}}
    looks.of_address(again, ids, "0,1,2", "9", "x-1", "7:y,,:")
    assert again.hidden == set() and again.baseline == "" and not any(again.some.get(name) for name in "y")


def test_trials_are_sorted_by_any_column():
    given = ((1, (0.5,), (8, "a")), (2, (), (16, "c")), (3, (0.1,), (4, "b")))
    trials = [Trial(number, None, values, params, f"r{number}", "") for number, values, params in given]

    def order(at: int, *, descending: bool = False) -> list[int]:
        return [trial.number for trial in sort_trials(trials, at, 1, descending=descending)]

    assert order(2) == [3, 1, 2] and order(2, descending=True) == [1, 3, 2]  # one without a result is last
    assert order(3) == [3, 1, 2] and order(4, descending=True) == [2, 3, 1]
