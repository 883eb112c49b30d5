"""The schema of the history, step by step; a released step is never edited, a new one is added behind it."""

from __future__ import annotations

_FIRST = (
    """CREATE TABLE runs (
        run_id     TEXT PRIMARY KEY,
        name       TEXT NOT NULL,
        backend    TEXT NOT NULL,
        target     TEXT NOT NULL,
        key        TEXT,
        parent     TEXT,
        identity   TEXT NOT NULL,          -- job, bundle and target: what makes two submits the same wish
        job        TEXT NOT NULL,          -- JSON
        created_at TEXT NOT NULL,
        acked_at   TEXT,                   -- when the person was told the id
        cancel_at  TEXT,                   -- when a person asked to cancel
        state      TEXT NOT NULL,
        exit_code  INTEGER,
        reason     TEXT NOT NULL DEFAULT '',
        started_at TEXT,
        ended_at   TEXT,
        url        TEXT
    )""",
    "CREATE INDEX runs_by_age ON runs (created_at DESC, run_id DESC)",
    "CREATE INDEX runs_unacknowledged ON runs (run_id) WHERE acked_at IS NULL",
    """CREATE TABLE attempts (
        attempt_id TEXT PRIMARY KEY,
        run_id     TEXT NOT NULL REFERENCES runs,
        number     INTEGER NOT NULL,
        plan       TEXT NOT NULL,          -- JSON
        handle     TEXT,                   -- NULL between intent and acceptance
        owner      TEXT NOT NULL,          -- the process that submits it
        cursor     TEXT,                   -- how far its log was read
        created_at TEXT NOT NULL,
        state      TEXT NOT NULL,
        exit_code  INTEGER,
        reason     TEXT NOT NULL DEFAULT '',
        started_at TEXT,
        ended_at   TEXT,
        url        TEXT,
        UNIQUE (run_id, number)
    )""",
    "CREATE INDEX attempts_unsettled ON attempts (attempt_id) WHERE handle IS NULL",
    """CREATE TABLE events (
        attempt_id TEXT NOT NULL REFERENCES attempts,
        node       INTEGER NOT NULL,
        seq        INTEGER NOT NULL,
        at         TEXT NOT NULL,
        kind       TEXT NOT NULL,
        data       TEXT NOT NULL,          -- JSON
        PRIMARY KEY (attempt_id, node, seq)
    ) WITHOUT ROWID""",
    """CREATE TABLE metrics (
        attempt_id TEXT NOT NULL REFERENCES attempts,
        node       INTEGER NOT NULL,
        seq        INTEGER NOT NULL,
        at         TEXT NOT NULL,
        step       INTEGER NOT NULL,
        name       TEXT NOT NULL,
        value      REAL,                   -- NULL is not-a-number, which SQLite cannot hold
        PRIMARY KEY (attempt_id, node, seq, name)
    ) WITHOUT ROWID""",
    "CREATE TABLE leases (run_id TEXT PRIMARY KEY, owner TEXT NOT NULL, expires_at REAL NOT NULL)",
)

# What `ls` asks for at every start, and `ls --state` and `--name`: without these it reads every run there ever was.
_SECOND = (
    "CREATE INDEX runs_by_state ON runs (state, created_at DESC, run_id DESC)",
    "CREATE INDEX runs_by_name ON runs (name, created_at DESC, run_id DESC)",
)

# Where each run came from (cloudtrain.provenance), beside `runs`: lists of runs need not read the patches.
_THIRD = ("CREATE TABLE provenance (run_id TEXT PRIMARY KEY REFERENCES runs, data TEXT NOT NULL) WITHOUT ROWID",)

MIGRATIONS: tuple[tuple[str, ...], ...] = (_FIRST, _SECOND, _THIRD)
