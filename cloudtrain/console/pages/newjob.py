"""The page New job: a form in four steps, blank, from a job file or from a run."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.console import fields, history, shell, text, trainer, widgets
from cloudtrain.console.controls import Controls, format_problem
from cloudtrain.console.draft import Draft
from cloudtrain.console.fields import Field, Step
from cloudtrain.console.pages import newplace, newreview, newsource
from cloudtrain.errors import Problem

if TYPE_CHECKING:
    from nicegui.element import Element

MAX_DRAFTS = 50  # kept in this process for a reload
CHECK_S = 0.4  # between two checks for edits
_drafts: OrderedDict[str, Draft] = OrderedDict()
_OWN = {"entrypoint", "run", "setup", "resume_args", "keep", "compat"}  # keys of a script of one's own
_TRAINER, _SCRIPT = "The shared trainer", "My own script"


async def show(job: str = "", run: str = "", draft: str = "") -> None:
    """Show the form: of a job file below this folder, of a run, of a kept draft, or blank."""
    from nicegui import ui

    form_draft = _drafts.get(draft)
    if form_draft is None:
        form_draft = await asyncio.to_thread(_open_draft, job, run)
        name = secrets.token_urlsafe(9)
        _drafts[name] = form_draft
        while len(_drafts) > MAX_DRAFTS:
            _drafts.popitem(last=False)
        ui.navigate.history.replace(f"/new?draft={name}")
    NewJob(form_draft).draw()


def _open_draft(job: str, run: str) -> Draft:
    home, root = history.current().home, Path.cwd()
    if run:
        return Draft.of_run(run, home, root)
    return Draft.of_file(job, home, root) if job else Draft.for_folder(home, root)


class NewJob:
    """The page of one draft."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.controls = Controls(draft.form, draft.original, self._edited, marked=bool(draft.parent))
        self.fields = {field.name: field for field in fields.job_fields()}
        self.problems: list[Problem] = []
        self._stale = True
        self._badges: dict[Step, Element] = {}

    def draw(self) -> None:
        """Draw the form."""
        from nicegui import ui

        self._draw_heading()
        with (
            ui.tabs(on_change=self._step_changed)
            .classes("ct-steps")
            .props("no-caps align=left inline-label") as self.tabs
        ):
            for number, step in enumerate(Step, 1):
                with ui.tab(step, label=f"{number}  {step}").props(f"data-step={step.lower()}"):
                    self._badges[step] = ui.label("").classes("ct-count")
        with ui.tab_panels(self.tabs, value=Step.GENERAL, animated=False, keep_alive=True).classes("ct-panels"):
            with self._draw_panel(Step.GENERAL):
                self._draw_general()
            with self._draw_panel(Step.INFRASTRUCTURE):
                self.target_step = newplace.TargetStep(self.draft, self.controls)
                self.target_step.draw()
            with self._draw_panel(Step.SOURCE):
                self.source_step = newsource.SourceStep(
                    self.draft, self.controls, lambda: self.tabs.value == Step.SOURCE
                )
                self.source_step.draw()
            with self._draw_panel(Step.REVIEW):
                self.review_step = newreview.ReviewStep(self.draft, self.go, lambda: self.problems, self._submitted)
                self.review_step.draw()
        ui.timer(CHECK_S, self._check)

    def go(self, step: Step) -> None:
        """Open a step."""
        self.tabs.set_value(step)

    def _draw_heading(self) -> None:
        from nicegui import ui

        draft = self.draft
        shell.heading("New job" if not draft.parent else "Rerun with changes")
        with ui.element("p").classes("ct-dim ct-small"):
            if draft.parent:
                ui.label(f"A new run with {text.clean(draft.parent)} as its parent; differences from it are marked.")
            else:
                ui.label(
                    f"The folder of the job file is {text.clean(str(draft.form.folder))}. "
                    "Nothing is saved or submitted before the last step."
                )
        self.status_label = ui.label("").classes("ct-small ct-hidden").props('role="status"')

    def _draw_panel(self, step: Step) -> Element:
        from nicegui import ui

        panel = ui.tab_panel(step).props(f"data-panel={step.lower()}")
        steps = list(Step)
        index = steps.index(step)

        def around() -> None:
            with ui.element("div").classes("ct-row ct-turn"):
                if index > 0:
                    back_button = ui.button("Back", on_click=lambda: self.go(steps[index - 1]), color=None)
                    back_button.classes("ct-plain").props("no-caps")
                next_button = ui.button(
                    f"Next: {steps[index + 1]}", on_click=lambda: self.go(steps[index + 1]), color=None
                )
                next_button.classes("ct-first").props("no-caps")

        with panel:
            inner = ui.element("div").classes("ct-stack")
            if step is not Step.REVIEW:  # which has its own buttons
                around()
        return inner

    # -- the first step -----------------------------------------------------------------------------------------------

    def _draw_general(self) -> None:
        from nicegui import ui

        general_fields = [field for field in self.fields.values() if field.step is Step.GENERAL]
        self.controls.draw_card("Job", [field for field in general_fields if field.group == "Job"])
        if rows := self.draft.roles():
            with widgets.card("Roles"):
                widgets.element("p", "The run ends with the main role. Change the others in Roles, above, as YAML.")
                widgets.table(("role", "nodes", "runs"), rows, caption="Roles of the job")
        if self.draft.is_call:
            with widgets.card("Function"):
                widgets.element("p", "This run is the call of a Python function. Both are in the packaged source.")
                widgets.element(
                    "p", "Change where it runs here. For other arguments, call the function in Python again."
                )
        script = ui.element("div").classes("ct-stack")
        other_fields = [field for field in general_fields if field.group in ("Parallelism", "Checkpoints")]

        def draw(own_script: bool) -> None:
            self.controls.forget(
                {
                    "entrypoint",
                    "run",
                    "setup",
                    "resume_args",
                    "compat",
                    "trainer",
                    "args",
                    "arg_style",
                    "metrics",
                    "hyperparameters",
                }
            )
            self.controls.forget({f"hyperparameters.{name}" for name in trainer.arguments()})
            script.clear()
            with script:
                members = [field for field in general_fields if field.group == "Script" and field.name != "trainer"]
                if not own_script:
                    members = [replace(field, main=False) for field in members if field.name not in _OWN]
                self.controls.draw_card("Script", members, above=lambda: choice(own_script))
                with ui.element("section").classes("ct-card"):
                    shell.heading("Hyperparameters", 2)
                    if own_script:
                        self.controls.draw_rows(replace(self.fields["hyperparameters"], label="Hyperparameters"))
                    else:
                        self._draw_trainer()
            self.controls.show_problems(self.problems)

        def choice(own_script: bool) -> None:
            with ui.element("div") as around:
                chosen = ui.radio([_TRAINER, _SCRIPT], value=_SCRIPT if own_script else _TRAINER).props(
                    'inline aria-label="What runs"'
                )
            self.controls.mark(self.fields["trainer"], around)

            def turn() -> None:
                trained = chosen.value == _TRAINER
                self.draft.form.set_field(self.fields["trainer"], "true" if trained else "")
                if trained:
                    self.draft.form.set_field(self.fields["entrypoint"], "")
                self._edited()
                draw(not trained)

            chosen.on_value_change(turn)

        if not self.draft.is_call:
            draw(self.draft.form.field_text(self.fields["trainer"]) != "true")
        self.controls.draw_groups(other_fields)

    def _draw_trainer(self) -> None:
        """Draw the main arguments of the shared trainer and those that are set; the others can be added one by one."""
        from nicegui import ui

        arguments = trainer.arguments()
        set_names = {name for name, _ in self.draft.form.rows(("hyperparameters",))} & set(arguments)
        drawn_names = [
            *trainer.MAIN_ARGUMENTS,
            *(name for name in arguments if name in set_names - {*trainer.MAIN_ARGUMENTS}),
        ]
        body = ui.element("div").classes("ct-fields")

        def draw(name: str) -> Element:
            with body:
                return self.controls.draw_field(_argument(arguments[name]))

        for name in drawn_names:
            draw(name)

        def add() -> None:
            if selector.value:
                name = str(selector.value)
                drawn_names.append(name)
                control = draw(name)
                selector.set_options(remaining(), value=None)
                control.run_method("focus")

        def remaining() -> dict[str, str]:
            return {name: f"{name}: {item.help}" for name, item in arguments.items() if name not in drawn_names}

        selector = ui.select(remaining(), label="Add an argument", with_input=True, on_change=add).classes(
            "ct-more-arguments"
        )
        selector.props("outlined dense stack-label hide-bottom-space data-field=more-arguments")
        field = self.fields["hyperparameters"]
        if any(name not in arguments for name, _ in self.draft.form.rows(field.path)):
            self.controls.draw_rows(replace(field, label="Others", help="No arguments set."), without=arguments)

    # -- problems -----------------------------------------------------------------------------------------------------

    def _edited(self) -> None:
        self._stale = True

    async def _check(self) -> None:
        """Check the draft after an edit."""
        if not self._stale:
            return
        self._stale = False
        await self.target_step.update_options()
        self.problems = await asyncio.to_thread(self.draft.snapshot().problems)
        self.controls.show_problems(self.problems)
        self._update_counts()

    def _update_counts(self) -> None:
        problems_by_step = fields.by_step(self.problems)
        for step, badge in self._badges.items():
            count = len(problems_by_step.get(step, ()))
            badge.set_text(str(count) if count else "")  # type: ignore[attr-defined]
            badge.set_visibility(bool(count))
        summary = f"{len(self.problems)} problem{'s' * (len(self.problems) != 1)}" if self.problems else "no problems"
        self.status_label.set_text(
            f"{summary}: {'; '.join(map(format_problem, self.problems))}" if self.problems else summary
        )

    async def _step_changed(self) -> None:
        step = self.tabs.value
        if step == Step.REVIEW:
            await self.review_step.shown()
        elif step == Step.SOURCE:
            await self.source_step.shown()
        elif step == Step.INFRASTRUCTURE:
            await self.target_step.shown()

    def _submitted(self) -> None:
        """Remove the submitted draft."""
        for name in [name for name, draft in _drafts.items() if draft is self.draft]:
            del _drafts[name]


def _argument(argument: trainer.Argument) -> Field:
    """Return the field of an argument of the shared trainer."""
    kind, choices, default = argument.kind, argument.choices, argument.default
    if kind == "flag" and default == "on":  # a flag cannot be set to false
        kind, choices = "choice", ("true", "false")
    return Field(
        ("hyperparameters", argument.name), Step.GENERAL, "Hyperparameters", "choice" if choices else kind, argument.name,
        argument.help, default, choices,
    )  # fmt: skip
