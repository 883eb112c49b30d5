"""What people write to runs: a title, a note, tags, a star, archived; and the queries of lists that they keep as views."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cloudtrain.errors import BadRequest

if TYPE_CHECKING:
    from cloudtrain.history.store import Store

LONGEST = {"title": 200, "note": 10_000, "tag": 60, "view": 60}  # characters


@dataclass(frozen=True)
class Marks:
    """The marks of a run."""

    title: str = ""
    note: str = ""
    tags: tuple[str, ...] = ()
    starred: bool = False
    archived: bool = False


def read(store: Store, run_id: str) -> Marks:
    """Return the marks of a run."""
    rows = store.select("SELECT title, note, tags, starred, archived FROM marks WHERE run_id = ?", (run_id,))
    return next((Marks(row[0], row[1], tuple(json.loads(row[2])), bool(row[3]), bool(row[4])) for row in rows), Marks())


def write(
    store: Store,
    run_id: str,
    *,
    title: str | None = None,
    note: str | None = None,
    tag: Iterable[str] = (),
    untag: Iterable[str] = (),
    star: bool | None = None,
    archive: bool | None = None,
) -> Marks:
    """Change the marks of a run, as `Run.mark` says; returns all of them. Raises BadRequest for a text that is too long."""
    added, removed = [_checked("tag", each) for each in tag], set(untag)
    if any("," in each or '"' in each for each in added):
        raise BadRequest("a tag must not contain commas or quotes", "for two tags write `--tag a --tag b`")
    texts = {name: _checked(name, text) for name, text in (("title", title), ("note", note)) if text is not None}
    flags = {name: int(flag) for name, flag in (("starred", star), ("archived", archive)) if flag is not None}
    with store.database.translated_errors(), store.database.write() as db:
        db.execute("INSERT OR IGNORE INTO marks (run_id) SELECT run_id FROM runs WHERE run_id = ?", (run_id,))
        before = json.loads(db.execute("SELECT tags FROM marks WHERE run_id = ?", (run_id,)).fetchone()[0])
        tags = [each for each in dict.fromkeys([*before, *added]) if each not in removed]
        columns = {**texts, **flags, "tags": json.dumps(tags, ensure_ascii=False)}
        changes = ", ".join(f"{name} = ?" for name in columns)
        db.execute(f"UPDATE marks SET {changes} WHERE run_id = ?", (*columns.values(), run_id))
    return read(store, run_id)


def views(store: Store) -> dict[str, str]:
    """Return the views by name: each is the query of an address, `filter=...&sort=...`."""
    return {row[0]: row[1] for row in store.select("SELECT name, query FROM views ORDER BY name")}


def keep_view(store: Store, name: str, query: str | None) -> None:
    """Keep a query under a name, or delete that of the name for None."""
    with store.database.translated_errors(), store.database.write() as db:
        if query is None:
            db.execute("DELETE FROM views WHERE name = ?", (name,))
        else:
            db.execute("INSERT OR REPLACE INTO views VALUES (?, ?)", (_checked("view", name), query))


def _checked(what: str, text: str) -> str:
    text = text.strip()
    if len(text) > LONGEST[what] or (what in ("tag", "view") and not text):
        raise BadRequest(f"a {what} has 1 to {LONGEST[what]} characters")
    return text
