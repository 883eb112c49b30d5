"""Form controls of the job's fields: each edits one value of the form and shows its problems."""

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

_LONG = ("words", "yaml")  # kinds with a monospace input
_ROWS = {  # field -> singular, labels of name and value, examples of both
    "hyperparameters": ("hyperparameter", "Name", "Value", "learning_rate", "3.0e-4"),
    "env": ("variable", "Variable", "Value", "TOKENIZERS_PARALLELISM", '"false"'),
    "secrets": ("secret", "Variable", "Where it is", "HF_TOKEN", "env:HF_TOKEN"),
    "labels": ("label", "Label", "Value", "team", "nlp"),
    "metrics": ("metric", "Metric", "Regular expression", "loss", "loss=([0-9.e+-]+)"),
    "inputs": ("input", "Name", "Location", "train", "s3://bucket/train/"),
}


class Controls:
    """The controls of a page over one form. Changes are marked against `original`, the form as it was opened."""

    def __init__(self, form: Form, original: Form, edited: Callable[[], None], *, marked: bool) -> None:
        self.form = form
        self.original = original
        self.edited = edited  # called after every edit
        self.marked = marked
        self._controls: dict[str, Element] = {}  # field name, or field#row -> its control
        self._error_labels: dict[str, Element] = {}  # name of a mapping -> the label of its problems
        self._rows: dict[str, list[tuple[str, str]]] = {}  # name of a mapping -> its rows as drawn
        self._update_mark: dict[str, Callable[[], None]] = {}
        self.problems: Sequence[Problem] = ()

    def draw_groups(self, fields: Sequence[Field]) -> None:
        """Draw fields group by group, each group in a card."""
        for name, members in groupby(fields, key=lambda field: field.group):
            self.draw_card(name, list(members))

    def draw_card(self, name: str, members: Sequence[Field], above: Callable[[], None] | None = None) -> None:
        """Draw a group of fields in a card; those that are rarely needed in an expansion."""
        from nicegui import ui

        with ui.element("section").classes("ct-card"):
            shell.heading(name, 2)
            if above:
                above()
            self.draw_fields([field for field in members if field.main])
            rare_fields = [field for field in members if not field.main]
            if rare_fields:
                used = any(self.form.get(field.path) is not None for field in rare_fields)
                labels = [_lower_first(field.label) for field in rare_fields[:5]]
                summary = f"More: {', '.join(labels)}" + (", …" if len(rare_fields) > 5 else "")
                bar = ui.expansion(summary, value=used).classes("ct-more").props("dense dense-toggle")
                with bar:
                    self.draw_fields(rare_fields)

    def draw_fields(self, members: Sequence[Field]) -> None:
        """Draw fields side by side, and mappings below them."""
        from nicegui import ui

        short = [field for field in members if field.kind not in ("rows", "lines", "words")]
        if short:
            with ui.element("div").classes("ct-fields"):
                for field in short:
                    self.draw_field(field)
        for field in members:
            if field.kind == "rows":
                self.draw_rows(field)
            elif field.kind in ("lines", "words"):
                self.draw_field(field)

    def draw_field(self, field: Field) -> Element:
        """Draw the control of a field with one value."""
        from nicegui import ui

        value = self.form.field_text(field)
        with ui.element("div").classes("ct-field") as around:
            if field.kind in ("choice", "flag", "several"):
                control = self._choice(field, value)
            elif field.kind == "lines":
                control = ui.textarea(
                    field.label, value=value, on_change=lambda e: self.set_value(field, e.value or "")
                )
                control.props("autogrow rows=2")
            else:
                control = ui.input(field.label, value=value, on_change=lambda e: self.set_value(field, e.value or ""))
                control.props["placeholder"] = text.clean(field.default, 80)
        self.mark(field, around)
        return self.style(control, field)

    def style(self, control: Element, field: Field) -> Element:
        """Style a control, add its help text, and register it for problems."""
        control.props("outlined dense stack-label hide-bottom-space spellcheck=false autocomplete=off")
        control.props["hint"] = text.clean(field.help)
        control.props["data-field"] = field.name
        if field.kind in _LONG:
            control.props["input-class"] = "ct-mono"
        self._controls[field.name] = control
        return control

    def draw_rows(self, field: Field, without: Collection[str] = ()) -> None:
        """Draw the names and values of a mapping, except `without`, which have their own controls."""
        from nicegui import ui

        singular, *labels = _ROWS[field.name]
        pairs = self.form.rows(field.path, without) or [("", "")]
        was: list[Any] = []  # of each row the label with its original value

        def keep() -> None:
            self.form.set_rows(field.path, pairs, without)
            self._changed(field)

        def edit(index: int, *, name: str | None = None, value: str | None = None) -> None:
            old = pairs[index]
            pairs[index] = (old[0] if name is None else name, old[1] if value is None else value)
            keep()

        def remove(index: int) -> None:
            del pairs[index]
            keep()
            if not pairs:
                pairs.append(("", ""))
            draw()

        def add() -> None:
            pairs.append(("", ""))
            draw()
            ui.run_javascript(f"document.querySelector('#c{body.id} .ct-pair:last-child input')?.focus()")

        def mark() -> None:
            """Mark each row that differs from the original, and name those that are missing."""
            old = dict(self.original.rows(field.path, without))
            for (name, value), label in zip(pairs, was, strict=False):  # `remove` draws them afterwards
                differs = self.marked and bool(name) and old.get(name) != value
                label.text = (f"was {text.clean(f'{name}: {old[name]}', 200)}" if name in old else "new") * differs
                label.parent_slot.parent.classes(add="ct-changed" * differs, remove="" if differs else "ct-changed")
            left = [f"{name}: {old[name]}" for name in old if name not in dict(pairs)] if self.marked else []
            removed.text = f"removed: {text.clean('; '.join(left), 200)}" if left else ""

        def draw() -> None:
            for control_name in [
                control_name for control_name in self._controls if control_name.startswith(f"{field.name}#")
            ]:
                del self._controls[control_name]
            body.clear()
            was.clear()
            with body:
                for index, (name, value) in enumerate(pairs):
                    with ui.element("div").classes("ct-pair"):
                        left = ui.input(labels[0], value=name, placeholder=labels[2],
                                        on_change=lambda e, index=index: edit(index, name=e.value or ""))  # fmt: skip
                        right = ui.input(labels[1], value=value, placeholder=labels[3],
                                         on_change=lambda e, index=index: edit(index, value=e.value or ""))  # fmt: skip
                        for control in (left, right):
                            control.props(
                                "outlined dense stack-label hide-bottom-space spellcheck=false input-class=ct-mono"
                            )
                        left.props["data-name"] = field.name
                        right.props["data-value"] = field.name
                        out = ui.button(icon="close", on_click=lambda index=index: remove(index), color=None)
                        out.props(f'flat round dense aria-label="Remove {singular} {index + 1}"')
                        was.append(ui.label("").classes("ct-was ct-small"))
                        self._controls[f"{field.name}#{index}"] = right
            mark()
            self._rows[field.name] = pairs
            self.show_problems(self.problems)

        with ui.element("div").classes("ct-field ct-rows"):
            if field.label != field.group:
                shell.heading(field.label, 3)
            ui.label(text.clean(field.help)).classes("ct-dim ct-small")
            body = ui.element("div").classes("ct-pairs-edited")
            self._error_labels[field.name] = ui.label("").classes("ct-wrong").props('role="alert"')
            removed = ui.label("").classes("ct-was ct-small")
            self._update_mark[field.name] = mark
            draw()
            ui.button(f"Add {singular}", icon="add", on_click=add, color=None).props("flat dense").classes("ct-add")

    def show_problems(self, problems: Sequence[Problem]) -> None:
        """Show every problem at its control; problems without a control are shown elsewhere."""
        self.problems = problems
        messages: dict[str, list[str]] = {}
        for problem in problems:
            if control_name := self.find_control(problem.path):
                messages.setdefault(control_name, []).append(format_problem(problem, bare=True))
        for name, control in self._controls.items():
            message = "; ".join(messages.get(name, ()))
            if control.props.get("error-message", "") != message:
                control.props["error"] = bool(message)
                control.props["error-message"] = message
                control.update()
        for name, label in self._error_labels.items():
            label.set_text("; ".join(messages.get(name, ())))  # type: ignore[attr-defined]

    def find_control(self, path: str) -> str:
        """Return the name of the control for a problem's path, "" where none is drawn."""
        for name, rows in self._rows.items():
            if path.startswith((f"{name}.", f"{name}[")):
                for index in reversed(range(len(rows))):
                    if _is_below(path, f"{name}.{rows[index][0]}") and f"{name}#{index}" in self._controls:
                        return f"{name}#{index}"
        candidates = [name for name in (*self._controls, *self._error_labels) if _is_below(path, name)]
        return max(candidates, key=len, default="")

    def forget(self, names: Collection[str]) -> None:
        """Remove controls that are no longer drawn."""
        for name in list(names):
            self._controls.pop(name, None)
            self._error_labels.pop(name, None)
            self._rows.pop(name, None)

    def _choice(self, field: Field, value: str) -> Any:
        from nicegui import ui

        default_text = {"false": "off", "true": "on"}.get(field.default, field.default)
        left_out = f"not included: {default_text}" if default_text else "left out"
        if field.kind == "several":
            node = self.form.get(field.path)
            chosen = [str(item) for item in node if item in field.choices] if isinstance(node, list) else []
            return ui.select(
                list(field.choices), label=field.label, value=chosen, multiple=True,
                on_change=lambda e: self.set_value(field, "[" + ", ".join(e.value) + "]" if e.value else ""),
            )  # fmt: skip
        choices = field.choices or ("true", "false")
        options = {"": left_out, **{choice: choice for choice in choices}}
        if field.kind == "flag":
            options.update({"true": "on", "false": "off"})
        options.setdefault(value, text.clean(value, 80))  # show the written value even if it is not a choice
        return ui.select(
            options, label=field.label, value=value, on_change=lambda e: self.set_value(field, e.value or "")
        )

    def set_value(self, field: Field, value: str) -> None:
        """Set a field to the typed text."""
        self.form.set_field(field, value)
        self._changed(field)

    def _changed(self, field: Field) -> None:
        if field.name in self._update_mark:
            self._update_mark[field.name]()
        self.edited()

    def mark(self, field: Field, around: Element) -> None:
        """Mark a field that differs from the original form, and show the original value."""
        from nicegui import ui

        if not self.marked:
            return
        with around:
            label = ui.label("").classes("ct-was ct-small")

        def mark() -> None:
            differs = self.form.differs(self.original, field.path)
            around.classes(add="ct-changed" if differs else "", remove="" if differs else "ct-changed")
            original_text = self.original.field_text(field) or "left out"
            label.set_text(f"was {text.clean(original_text, 200)}" if differs else "")

        self._update_mark[field.name] = mark
        mark()


def format_problem(problem: Problem, *, bare: bool = False) -> str:
    """Return a problem as one line; `bare` leaves out the field name."""
    name = f"{problem.path}: " if problem.path and not bare else ""
    return text.clean(f"{name}{problem.message}" + (f" ({problem.hint})" if problem.hint else ""), 1000)


def _is_below(path: str, name: str) -> bool:
    return path == name or path.startswith((f"{name}.", f"{name}["))


def _lower_first(label: str) -> str:
    """Return a label for the middle of a sentence."""
    return label if label[1:2].isupper() else label[:1].lower() + label[1:]
