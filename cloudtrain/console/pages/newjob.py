"""The page of a new job: a form in four steps, blank, from a job file or from a run."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.console import fields, history, shell, text, trainer
from cloudtrain.console.controls import Controls, format_problem
from cloudtrain.console.draft import Draft
from cloudtrain.console.fields import Field, Step
from cloudtrain.console.pages import newplace, newreview, newsource
from cloudtrain.errors import Problem

if TYPE_CHECKING:
    from nicegui.element import Element

KEPT = 50  # forms of this process that a reload finds again
LOOK_S = 0.4  # between two looks at whether something was edited
_kept: OrderedDict[str, Draft] = OrderedDict()
_TRAINER, _SCRIPT = "The shared trainer", "A script of mine"


async def show(job: str = "", run: str = "", draft: str = "") -> None:
    """Show the form: of a job file below this folder, of a run, of one that was begun here before, or blank."""
    from nicegui import ui

    found = _kept.get(draft)
    if found is None:
        found = await asyncio.to_thread(_opened, job, run)
        name = secrets.token_urlsafe(9)
        _kept[name] = found
        while len(_kept) > KEPT:
            _kept.popitem(last=False)
        ui.navigate.history.replace(f"/new?draft={name}")
    NewJob(found).draw()


def _opened(job: str, run: str) -> Draft:
    home, root = history.current().home, Path.cwd()
    if run:
        return Draft.of_run(run, home, root)
    return Draft.of_file(job, home, root) if job else Draft.for_folder(home, root)


class NewJob:
    """The page over one draft."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.controls = Controls(draft.form, draft.original, self._edited, marked=bool(draft.parent))
        self.known = {field.name: field for field in fields.job_fields()}
        self.problems: list[Problem] = []
        self._stale = True
        self._badges: dict[Step, Element] = {}

    def draw(self) -> None:
        """Draw the form."""
        from nicegui import ui

        self._head()
        with ui.tabs(on_change=self._turned).classes("ct-steps").props("no-caps align=left inline-label") as self.tabs:
            for number, step in enumerate(Step, 1):
                with ui.tab(step, label=f"{number}  {step}").props(f"data-step={step.lower()}"):
                    self._badges[step] = ui.label("").classes("ct-count")
        with ui.tab_panels(self.tabs, value=Step.GENERAL, animated=False, keep_alive=True).classes("ct-panels"):
            with self._panel(Step.GENERAL):
                self._general()
            with self._panel(Step.INFRASTRUCTURE):
                self.place = newplace.Place(self.draft, self.controls)
                self.place.draw()
            with self._panel(Step.SOURCE):
                self.source = newsource.Sources(self.draft, self.controls)
                self.source.draw()
            with self._panel(Step.REVIEW):
                self.review = newreview.Review(self.draft, self.go, lambda: self.problems, self._submitted)
                self.review.draw()
        ui.timer(LOOK_S, self._look)

    def go(self, step: Step) -> None:
        """Turn to a step."""
        self.tabs.set_value(step)

    def _head(self) -> None:
        from nicegui import ui

        draft = self.draft
        shell.heading("New job" if not draft.parent else "Rerun with changes")
        with ui.element("p").classes("ct-dim ct-small"):
            if draft.parent:
                ui.label(f"A new run with {text.clean(draft.parent)} as its parent; what differs from it is marked.")
            else:
                ui.label(
                    f"A job file of {text.clean(str(draft.form.folder))}; nothing is written or sent before the last step."
                )
        self.said = ui.label("").classes("ct-small ct-hidden").props('role="status"')

    def _panel(self, step: Step) -> Element:
        from nicegui import ui

        panel = ui.tab_panel(step).props(f"data-panel={step.lower()}")
        steps = list(Step)
        at = steps.index(step)

        def around() -> None:
            with ui.element("div").classes("ct-row ct-turn"):
                if at > 0:
                    back = ui.button("Back", on_click=lambda: self.go(steps[at - 1]), color=None)
                    back.classes("ct-plain").props("no-caps")
                on = ui.button(f"Next: {steps[at + 1]}", on_click=lambda: self.go(steps[at + 1]), color=None)
                on.classes("ct-first").props("no-caps")

        with panel:
            inner = ui.element("div").classes("ct-stack")
            if step is not Step.REVIEW:  # which has its own
                around()
        return inner

    # -- the first step -----------------------------------------------------------------------------------------------

    def _general(self) -> None:
        from nicegui import ui

        mine = [field for field in self.known.values() if field.step is Step.GENERAL]
        self.controls.draw_card("Job", [field for field in mine if field.group == "Job"])
        script = ui.element("div").classes("ct-stack")
        rest = [field for field in mine if field.group in ("Parallelism", "Checkpoints")]

        def draw(own: bool) -> None:
            self.controls.forget({"entrypoint", "args", "arg_style", "metrics", "hyperparameters"})
            self.controls.forget({f"hyperparameters.{name}" for name in trainer.arguments()})
            script.clear()
            with script:
                members = [field for field in mine if field.group == "Script"]
                if not own:
                    members = [replace(field, main=False) for field in members if field.name != "entrypoint"]
                self.controls.draw_card("Script", members, above=lambda: choice(own))
                with ui.element("section").classes("ct-card"):
                    shell.heading("Hyperparameters", 2)
                    if own:
                        self.controls.draw_rows(replace(self.known["hyperparameters"], label="Hyperparameters"))
                    else:
                        self._trainer()
            self.controls.show_problems(self.problems)

        def choice(own: bool) -> None:
            chosen = ui.radio([_TRAINER, _SCRIPT], value=_SCRIPT if own else _TRAINER).props(
                'inline aria-label="What runs"'
            )

            def turn() -> None:
                if chosen.value == _TRAINER:
                    self.draft.form.set_field(self.known["entrypoint"], "")
                    self._edited()
                draw(chosen.value == _SCRIPT)

            chosen.on_value_change(turn)

        draw(self.draft.form.get(("entrypoint",)) is not None)
        self.controls.draw_groups(rest)

    def _trainer(self) -> None:
        """Draw the arguments of the shared trainer that most name, and those that are set; the others one by one."""
        from nicegui import ui

        known = trainer.arguments()
        there = {name for name, _ in self.draft.form.rows(("hyperparameters",))} & set(known)
        drawn = [*trainer.MAIN_ARGUMENTS, *(name for name in known if name in there - {*trainer.MAIN_ARGUMENTS})]
        body = ui.element("div").classes("ct-fields")

        def draw(name: str) -> Element:
            with body:
                return self.controls.draw_field(_argument(known[name]))

        for name in drawn:
            draw(name)

        def add() -> None:
            if more.value:
                name = str(more.value)
                drawn.append(name)
                made = draw(name)
                more.set_options(left(), value=None)
                made.run_method("focus")

        def left() -> dict[str, str]:
            return {name: f"{name}: {item.help}" for name, item in known.items() if name not in drawn}

        more = ui.select(left(), label="Add an argument", with_input=True, on_change=add).classes("ct-more-arguments")
        more.props("outlined dense stack-label hide-bottom-space data-field=more-arguments")
        field = self.known["hyperparameters"]
        if any(name not in known for name, _ in self.draft.form.rows(field.path)):
            self.controls.draw_rows(
                replace(field, label="Others", help="No arguments of the shared trainer."), without=known
            )

    # -- what is wrong ------------------------------------------------------------------------------------------------

    def _edited(self) -> None:
        self._stale = True

    async def _look(self) -> None:
        """Ask what is wrong, after something was edited."""
        if not self._stale:
            return
        self._stale = False
        await self.place.follow()
        self.problems = await asyncio.to_thread(self.draft.snapshot().problems)
        self.controls.show_problems(self.problems)
        self._count()

    def _count(self) -> None:
        found = fields.by_step(self.problems)
        for step, badge in self._badges.items():
            count = len(found.get(step, ()))
            badge.set_text(str(count) if count else "")  # type: ignore[attr-defined]
            badge.set_visibility(bool(count))
        words = f"{len(self.problems)} problem{'s' * (len(self.problems) != 1)}" if self.problems else "no problems"
        self.said.set_text(f"{words}: {'; '.join(map(format_problem, self.problems))}" if self.problems else words)

    async def _turned(self) -> None:
        step = self.tabs.value
        if step == Step.REVIEW:
            await self.review.look()
        elif step == Step.SOURCE:
            await self.source.look()
        elif step == Step.INFRASTRUCTURE:
            await self.place.look()

    def _submitted(self) -> None:
        """Forget the draft: what is begun from now on is another job."""
        for name in [name for name, draft in _kept.items() if draft is self.draft]:
            del _kept[name]


def _argument(found: trainer.Argument) -> Field:
    """Return the field of an argument of the shared trainer."""
    kind, choices, default = found.kind, found.choices, found.default
    if kind == "flag" and default == "on":  # false alone would be left out, as a bare flag is
        kind, choices = "choice", ("true", "false")
    return Field(
        ("hyperparameters", found.name), Step.GENERAL, "Hyperparameters", "choice" if choices else kind, found.name,
        found.help, default, choices,
    )  # fmt: skip
