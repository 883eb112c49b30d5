"""The controls of a form's fields: each edits one value of the draft's form, and says what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from cloudtrain.console import shell, text
from cloudtrain.console.fields import Field
from cloudtrain.console.form import Form
from cloudtrain.errors import Problem

if TYPE_CHECKING:
    from nicegui.element import Element

_LONG = ("words", "yaml")  # kinds whose values are written as code
_ROWS = {  # what a row and its two parts are called, and an example
    "hyperparameters": ("hyperparameter", "Name", "Value", "learning_rate", "3.0e-4"),
    "env": ("variable", "Variable", "Value", "TOKENIZERS_PARALLELISM", '"false"'),
    "secrets": ("secret", "Variable", "Where it is found", "HF_TOKEN", "env:HF_TOKEN"),
    "labels": ("label", "Label", "Value", "team", "nlp"),
    "metrics": ("metric", "Metric", "Regular expression", "loss", "loss=([0-9.e+-]+)"),
    "inputs": ("input", "Name", "Where it lies", "train", "s3://bucket/train/"),
}


class Controls:
    """The controls of a page over one form; `first` is the form as it was opened, against which changes are marked."""

    def __init__(self, form: Form, first: Form, edited: Callable[[], None], *, marked: bool) -> None:
        self.form = form
        self.first = first
        self.edited = edited  # called after every edit
        self.marked = marked
        self._shown: dict[str, Element] = {}  # by the name of the field, or of a row of it
        self._said: dict[str, Element] = {}  # where the problems of a mapping are said
        self._names: dict[str, list[tuple[str, str]]] = {}  # the rows of mappings, as they are drawn
        self._was: dict[str, Callable[[], None]] = {}
        self.problems: Sequence[Problem] = ()

    def groups(self, found: Sequence[Field]) -> None:
        """Draw fields group by group, each in a card."""
        for name, members in groupby(found, key=lambda field: field.group):
            self.card(name, list(members))

    def card(self, name: str, members: Sequence[Field], above: Callable[[], None] | None = None) -> None:
        """Draw a group of fields in a card; those that are seldom needed behind a bar."""
        from nicegui import ui

        with ui.element("section").classes("ct-card"):
            shell.heading(name, 2)
            if above:
                above()
            self.draw([field for field in members if field.main])
            more = [field for field in members if not field.main]
            if more:
                used = any(self.form.get(field.path) is not None for field in more)
                words = [_inner(field.label) for field in more[:5]]
                said = f"More: {', '.join(words)}" + (", …" if len(more) > 5 else "")
                bar = ui.expansion(said, value=used).classes("ct-more").props("dense dense-toggle")
                with bar:
                    self.draw(more)

    def draw(self, members: Sequence[Field]) -> None:
        """Draw fields one beside the other, as many as there is room for; mappings below them."""
        from nicegui import ui

        short = [field for field in members if field.kind not in ("rows", "lines", "words")]
        if short:
            with ui.element("div").classes("ct-fields"):
                for field in short:
                    self.one(field)
        for field in members:
            if field.kind == "rows":
                self.rows(field)
            elif field.kind in ("lines", "words"):
                self.one(field)

    def one(self, field: Field) -> Element:
        """Draw the control of a field with one value."""
        from nicegui import ui

        value = self.form.shown(field)
        with ui.element("div").classes("ct-field") as around:
            if field.kind in ("choice", "flag", "several"):
                control = self._choice(field, value)
            elif field.kind == "lines":
                control = ui.textarea(field.label, value=value, on_change=lambda e: self.put(field, e.value or ""))
                control.props("autogrow rows=2")
            else:
                control = ui.input(field.label, value=value, on_change=lambda e: self.put(field, e.value or ""))
                control.props["placeholder"] = text.clean(field.default, 80)
            self._mark(field, around)
        return self.dress(control, field)

    def dress(self, control: Element, field: Field) -> Element:
        """Give a control its looks and its help, and have the field's problems said at it."""
        control.props("outlined dense stack-label hide-bottom-space spellcheck=false autocomplete=off")
        control.props["hint"] = text.clean(field.help)
        control.props["data-field"] = field.name
        if field.kind in _LONG:
            control.props["input-class"] = "ct-mono"
        self._shown[field.name] = control
        return control

    def rows(self, field: Field, without: Collection[str] = (), names: Sequence[str] = ()) -> None:
        """Draw the names and values of a mapping, but for those that have controls of their own."""
        from nicegui import ui

        one, *words = _ROWS[field.name]
        found = self.form.rows(field.path, without) or [("", "")]

        def keep() -> None:
            self.form.put_rows(field.path, found, without)
            self._changed(field)

        def edit(at: int, *, name: str | None = None, value: str | None = None) -> None:
            before = found[at]
            found[at] = (before[0] if name is None else name, before[1] if value is None else value)
            keep()

        def remove(at: int) -> None:
            del found[at]
            keep()
            if not found:
                found.append(("", ""))
            draw()

        def add() -> None:
            found.append(("", ""))
            draw()
            ui.run_javascript(f"document.querySelector('#c{body.id} .ct-pair:last-child input')?.focus()")

        def draw() -> None:
            for known in [known for known in self._shown if known.startswith(f"{field.name}#")]:
                del self._shown[known]
            body.clear()
            with body:
                for at, (name, value) in enumerate(found):
                    with ui.element("div").classes("ct-pair"):
                        left = ui.input(words[0], value=name, placeholder=words[2], autocomplete=list(names) or None,
                                        on_change=lambda e, at=at: edit(at, name=e.value or ""))  # fmt: skip
                        right = ui.input(words[1], value=value, placeholder=words[3],
                                         on_change=lambda e, at=at: edit(at, value=e.value or ""))  # fmt: skip
                        for control in (left, right):
                            control.props(
                                "outlined dense stack-label hide-bottom-space spellcheck=false input-class=ct-mono"
                            )
                        left.props["data-name"] = field.name
                        right.props["data-value"] = field.name
                        out = ui.button(icon="close", on_click=lambda at=at: remove(at), color=None)
                        out.props(f'flat round dense aria-label="Remove {one} {at + 1}"')
                        self._shown[f"{field.name}#{at}"] = right
            self._names[field.name] = found
            self.say(self.problems)

        with ui.element("div").classes("ct-field ct-rows") as around:
            if field.label != field.group:
                shell.heading(field.label, 3)
            ui.label(text.clean(field.help)).classes("ct-dim ct-small")
            body = ui.element("div").classes("ct-pairs-edited")
            self._said[field.name] = ui.label("").classes("ct-wrong").props('role="alert"')
            draw()
            ui.button(f"Add {one}", icon="add", on_click=add, color=None).props("flat dense").classes("ct-add")
            self._mark(field, around)

    def say(self, problems: Sequence[Problem]) -> None:
        """Say every problem at the control that it belongs to; those of no control are said elsewhere."""
        self.problems = problems
        told: dict[str, list[str]] = {}
        for problem in problems:
            if at := self.place(problem.path):
                told.setdefault(at, []).append(sentence(problem, bare=True))
        for name, control in self._shown.items():
            words = "; ".join(told.get(name, ()))
            if control.props.get("error-message", "") != words:
                control.props["error"] = bool(words)
                control.props["error-message"] = words
                control.update()
        for name, said in self._said.items():
            said.set_text("; ".join(told.get(name, ())))  # type: ignore[attr-defined]

    def place(self, path: str) -> str:
        """Return the control of a problem's path, "" where none is drawn."""
        for name, rows in self._names.items():
            if path.startswith((f"{name}.", f"{name}[")):
                for at in reversed(range(len(rows))):
                    if _is_in(path, f"{name}.{rows[at][0]}") and f"{name}#{at}" in self._shown:
                        return f"{name}#{at}"
        known = [name for name in (*self._shown, *self._said) if _is_in(path, name)]
        return max(known, key=len, default="")

    def forget(self, names: Collection[str]) -> None:
        """Forget controls that are no longer drawn."""
        for name in list(names):
            self._shown.pop(name, None)
            self._said.pop(name, None)
            self._names.pop(name, None)

    def _choice(self, field: Field, value: str) -> Any:
        from nicegui import ui

        said = {"false": "off", "true": "on"}.get(field.default, field.default)
        left_out = f"left out: {said}" if said else "left out"
        if field.kind == "several":
            node = self.form.get(field.path)
            chosen = [str(item) for item in node if item in field.choices] if isinstance(node, list) else []
            return ui.select(
                list(field.choices), label=field.label, value=chosen, multiple=True,
                on_change=lambda e: self.put(field, "[" + ", ".join(e.value) + "]" if e.value else ""),
            )  # fmt: skip
        choices = field.choices or ("true", "false")
        options = {"": left_out, **{choice: choice for choice in choices}}
        if field.kind == "flag":
            options.update({"true": "on", "false": "off"})
        options.setdefault(value, text.clean(value, 80))  # what is written is shown, be it a choice or not
        return ui.select(options, label=field.label, value=value, on_change=lambda e: self.put(field, e.value or ""))

    def put(self, field: Field, value: str) -> None:
        """Set a field to what was typed."""
        self.form.put(field, value)
        self._changed(field)

    def _changed(self, field: Field) -> None:
        if field.name in self._was:
            self._was[field.name]()
        self.edited()

    def _mark(self, field: Field, around: Element) -> None:
        """Mark a field whose value is not the one that the form was opened with, and say that one."""
        from nicegui import ui

        if not self.marked:
            return
        with around:
            said = ui.label("").classes("ct-was ct-small")

        def mark() -> None:
            differs = self.form.changed(self.first, field.path)
            around.classes(add="ct-changed" if differs else "", remove="" if differs else "ct-changed")
            before = "; ".join(f"{n}: {v}" for n, v in self.first.rows(field.path)) if field.kind == "rows" else ""
            words = before or self.first.shown(field) or "left out"
            said.set_text(f"was {text.clean(words, 200)}" if differs else "")

        self._was[field.name] = mark
        mark()


def sentence(problem: Problem, *, bare: bool = False) -> str:
    """Return a problem as a page says it; `bare` where its field is beside it."""
    name = f"{problem.path}: " if problem.path and not bare else ""
    return text.clean(f"{name}{problem.message}" + (f" ({problem.hint})" if problem.hint else ""), 1000)


def _is_in(path: str, name: str) -> bool:
    return path == name or path.startswith((f"{name}.", f"{name}["))


def _inner(label: str) -> str:
    """Return a label as it stands inside a sentence."""
    return label if label[1:2].isupper() else label[:1].lower() + label[1:]
