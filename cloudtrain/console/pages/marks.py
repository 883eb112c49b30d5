"""What a person writes to a run, on its page: title, tags, note, star, archived."""

from __future__ import annotations

from typing import Any

from cloudtrain.console import history, shell, text, widgets
from cloudtrain.errors import CloudtrainError
from cloudtrain.history import marks


class Headline:
    """What a person wrote to a run, below the heading of its page."""

    def __init__(self) -> None:
        from nicegui import ui

        self._area = ui.element("div").classes("ct-row")

    def draw(self, stored: marks.Marks) -> None:
        """Draw the title, with a star where the run has one, the tags and the note."""
        from nicegui import ui

        self._area.clear()
        title = ("★ " if stored.starred else "") + text.clean(stored.title, 200)
        with self._area:
            if title:
                ui.label(title)
            for tag in stored.tags:
                ui.label(text.clean(tag, 60)).classes("ct-tag")
            if stored.note:
                ui.label(text.clean(stored.note, 300)).classes("ct-dim")
        self._area.set_visibility(bool(title or stored.tags or stored.note))


async def show(run_id: str, headline: Headline) -> None:
    """Draw the fields; a change is stored with Save, the star and the archive at once."""
    from nicegui import ui

    stored = await history.current().query_run(run_id, lambda run: marks.read(run.store, run.run_id))
    shown = [stored]
    headline.draw(stored)

    async def change(**changes: Any) -> None:
        try:
            shown[0] = await history.current().query_run(run_id, lambda run: run.mark(**changes))
        except CloudtrainError as error:
            shell.notify_error(error)
        else:
            headline.draw(shown[0])
            ui.notify("saved")

    async def save() -> None:
        tags = list(dict.fromkeys(each.strip() for each in (tags_field.value or "").split(",") if each.strip()))
        removed = [each for each in shown[0].tags if each not in tags]
        await change(title=title.value or "", note=note.value or "", tag=tags, untag=removed)

    with widgets.card("Notes"), ui.element("div").classes("ct-stack"):
        with ui.element("div").classes("ct-row"):
            title = ui.input(label="Title", value=stored.title).props("outlined dense").classes("ct-grow")
            tags_field = ui.input(label="Tags, separated by commas", value=", ".join(stored.tags))
            tags_field.props("outlined dense").classes("ct-grow")
            ui.checkbox("Star", value=stored.starred, on_change=lambda e: change(star=e.value))
            ui.checkbox("Archived", value=stored.archived, on_change=lambda e: change(archive=e.value))
        note = ui.textarea(label="Note", value=stored.note).props("outlined dense autogrow rows=1").classes("ct-note")
        with ui.element("div"):
            widgets.button("Save", save)
