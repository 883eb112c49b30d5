"""Schema migrations of the history. Never edit a released step: append a new one."""

from __future__ import annotations

import sqlite3

from cloudtrain.history.usage import FILL_USAGE

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

# For `ls`, `ls --state` and `ls --name`: without these indexes they read every run.
_SECOND = (
    "CREATE INDEX runs_by_state ON runs (state, created_at DESC, run_id DESC)",
    "CREATE INDEX runs_by_name ON runs (name, created_at DESC, run_id DESC)",
)

# Where each run came from (cloudtrain.source.provenance). A table of its own: a list of runs need not read the patches.
_THIRD = ("CREATE TABLE provenance (run_id TEXT PRIMARY KEY REFERENCES runs, data TEXT NOT NULL) WITHOUT ROWID",)

# Curves in blocks of BLOCK numbered log lines, updated by a trigger: a curve of a million points is a thousand rows.
# NaN and infinity count as points, but not in a block's total, lowest and highest.
BLOCK = 1024
_FINITE = "(new.value IS NOT NULL AND new.value > -9e999 AND new.value < 9e999)"
_BLOCK_COLUMNS = """block       INTEGER NOT NULL,      -- seq / BLOCK
        points      INTEGER NOT NULL,
        finite      INTEGER NOT NULL,      -- how many of them are finite numbers
        total       REAL NOT NULL,         -- their sum
        lowest      REAL,
        highest     REAL,
        first_value REAL,
        last_value  REAL,
        first_step  INTEGER NOT NULL,
        last_step   INTEGER NOT NULL,
        last_seq    INTEGER NOT NULL,
        last_at     TEXT NOT NULL,"""
_ADD_POINT = f"""UPDATE curves SET points = points + 1,
               finite = finite + {_FINITE},
               total = total + CASE WHEN {_FINITE} THEN new.value ELSE 0 END,
               lowest = CASE WHEN {_FINITE} THEN coalesce(min(lowest, new.value), new.value) ELSE lowest END,
               highest = CASE WHEN {_FINITE} THEN coalesce(max(highest, new.value), new.value) ELSE highest END,
               last_value = CASE WHEN new.seq >= last_seq THEN new.value ELSE last_value END,
               last_step = CASE WHEN new.seq >= last_seq THEN new.step ELSE last_step END,
               last_at = CASE WHEN new.seq >= last_seq THEN new.at ELSE last_at END,"""
_FOURTH = (
    f"""CREATE TABLE curves (
        attempt_id  TEXT NOT NULL REFERENCES attempts,
        name        TEXT NOT NULL,
        node        INTEGER NOT NULL,
        {_BLOCK_COLUMNS}
        PRIMARY KEY (attempt_id, name, node, block)
    ) WITHOUT ROWID""",
    f"""INSERT INTO curves
        SELECT attempt_id, name, node, seq / {BLOCK}, count(*), total(finite), total(finite * value),
               min(CASE WHEN finite THEN value END), max(CASE WHEN finite THEN value END), NULL, NULL, 0, 0, max(seq), ''
          FROM (SELECT *, (value IS NOT NULL AND value > -9e999 AND value < 9e999) AS finite FROM metrics)
         GROUP BY attempt_id, name, node, seq / {BLOCK}""",
    f"""UPDATE curves SET (first_value, first_step) =
        (SELECT value, step FROM metrics m WHERE m.attempt_id = curves.attempt_id AND m.node = curves.node
            AND m.seq >= block * {BLOCK} AND m.seq < (block + 1) * {BLOCK} AND m.name = curves.name ORDER BY seq LIMIT 1)""",
    """UPDATE curves SET (last_value, last_step, last_at) =
        (SELECT value, step, at FROM metrics m WHERE m.attempt_id = curves.attempt_id AND m.node = curves.node
            AND m.seq = last_seq AND m.name = curves.name)""",
    # Two statements instead of an upsert: inside a trigger the outer statement's OR IGNORE decides about conflicts.
    f"""CREATE TRIGGER metrics_into_curves AFTER INSERT ON metrics BEGIN
        INSERT OR IGNORE INTO curves VALUES (new.attempt_id, new.name, new.node, new.seq / {BLOCK}, 0, 0, 0, NULL, NULL,
               new.value, NULL, new.step, new.step, -1, '');
        {_ADD_POINT}
               last_seq = max(last_seq, new.seq)
         WHERE attempt_id = new.attempt_id AND name = new.name AND node = new.node AND block = new.seq / {BLOCK};
    END""",
)

# Notifications that were sent: a second watcher does not send them again.
_FIFTH = ("CREATE TABLE notices (attempt_id TEXT, event TEXT, at TEXT NOT NULL, PRIMARY KEY (attempt_id, event))",)

# Billed seconds, of all nodes together.
_SIXTH = ("ALTER TABLE runs ADD COLUMN billable_s INTEGER", "ALTER TABLE attempts ADD COLUMN billable_s INTEGER")

# Container image that each node ran, as the platform reported it: JSON, node -> NAME@sha256:...
_SEVENTH = ("ALTER TABLE attempts ADD COLUMN images TEXT",)

# A submission whose answer was lost: since when its outcome is unknown, how often it was tried, and when last.
# `event` is what ended an attempt, where its state does not tell (Status.event).
_EIGHTH = (
    "ALTER TABLE attempts ADD COLUMN tries INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE attempts ADD COLUMN tried_at TEXT",
    "ALTER TABLE attempts ADD COLUMN unanswered_since TEXT",
    "ALTER TABLE attempts ADD COLUMN event TEXT NOT NULL DEFAULT ''",
)

# The process that watches all runs of this home on one host, its cloudtrain and the address of its socket. Of a run's
# environment only names of variables, and values that are paths or names (runs/planning/environment.py), never credentials.
_NINTH = (
    """CREATE TABLE watchers (
        host TEXT PRIMARY KEY, owner TEXT NOT NULL, version TEXT NOT NULL, address TEXT NOT NULL, expires_at REAL NOT NULL
    )""",
    """CREATE TABLE environments (
        run_id   TEXT PRIMARY KEY REFERENCES runs,
        pointers TEXT NOT NULL,             -- JSON, name -> value
        hidden   TEXT NOT NULL,             -- JSON, names of variables whose values are only in the watcher's memory
        lacking  TEXT NOT NULL DEFAULT '[]' -- JSON, those of them that the watcher does not have
    )""",
)

# A point has the rank that logged it, and the epoch where that is known; a curve is one rank's. The rank of older points is
# not known, so 0.
_TENTH = (
    "ALTER TABLE metrics ADD COLUMN rank INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE metrics ADD COLUMN epoch REAL",
    "DROP TRIGGER metrics_into_curves",
    f"""CREATE TABLE curves_by_rank (
        attempt_id  TEXT NOT NULL REFERENCES attempts,
        name        TEXT NOT NULL,
        rank        INTEGER NOT NULL,
        node        INTEGER NOT NULL,
        {_BLOCK_COLUMNS}
        last_epoch  REAL,
        PRIMARY KEY (attempt_id, name, rank, node, block)
    ) WITHOUT ROWID""",
    """INSERT INTO curves_by_rank SELECT attempt_id, name, 0, node, block, points, finite, total, lowest, highest,
        first_value, last_value, first_step, last_step, last_seq, last_at, NULL FROM curves""",
    "DROP TABLE curves",
    "ALTER TABLE curves_by_rank RENAME TO curves",
    f"""CREATE TRIGGER metrics_into_curves AFTER INSERT ON metrics BEGIN
        INSERT OR IGNORE INTO curves VALUES (new.attempt_id, new.name, new.rank, new.node, new.seq / {BLOCK}, 0, 0, 0,
               NULL, NULL, new.value, NULL, new.step, new.step, -1, '', NULL);
        {_ADD_POINT}
               last_epoch = CASE WHEN new.seq >= last_seq THEN new.epoch ELSE last_epoch END,
               last_seq = max(last_seq, new.seq)
         WHERE attempt_id = new.attempt_id AND name = new.name AND rank = new.rank AND node = new.node
           AND block = new.seq / {BLOCK};
    END""",
)

# What lists of runs are filtered and sorted by. A list reads the index, not the rows, which hold whole jobs. `run_values` has
# labels (`label.NAME`) and hyperparameters (`hp.NAME`, of `--NAME VALUE` in args too), by a trigger; `number` is set where
# the text is a number. `run_metrics` has the last value of each metric, of the lowest rank, and its extremes (points.py).
# `marks` is what people write to runs, `views` the queries of lists that they keep.
_GIVEN = "run_id, CASE WHEN json_valid(job) THEN job ELSE '{}' END AS job"
_ARGS = "json_each(job, '$.args')"
_VALUES = f"""found(name, run_id, text) AS (
        SELECT prefix || key, run_id, CASE type WHEN 'true' THEN type WHEN 'false' THEN type ELSE CAST(value AS TEXT) END
          FROM (SELECT 'hp.' AS prefix, run_id, each.* FROM given, json_each(job, '$.hyperparameters') AS each
                UNION ALL SELECT 'label.', run_id, each.* FROM given, json_each(job, '$.labels') AS each)
         WHERE type != 'null'
        UNION ALL SELECT 'hp.' || substr(a.value, 3, instr(a.value, '=') - 3), run_id, substr(a.value, instr(a.value, '=') + 1)
          FROM given, {_ARGS} AS a WHERE a.value LIKE '--_%=%'
        UNION ALL SELECT 'hp.' || substr(a.value, 3), run_id, CAST(b.value AS TEXT)
          FROM given, {_ARGS} AS a, {_ARGS} AS b
         WHERE a.value LIKE '--_%' AND a.value NOT LIKE '%=%' AND b.key = a.key + 1 AND b.value NOT LIKE '--%')
    SELECT name, run_id, text,
           CASE WHEN json_valid(text) AND json_type(text) IN ('integer', 'real') THEN CAST(text AS REAL) END FROM found"""
FILL_METRICS = """INSERT OR IGNORE INTO run_metrics
    SELECT name, run_id, rank, number, last_seq, last_value, lowest, highest, last_step FROM (
        SELECT c.name, a.run_id, c.rank, a.number, c.last_seq, c.last_value, c.last_step, min(c.lowest) OVER every AS lowest,
               max(c.highest) OVER every AS highest, row_number() OVER (PARTITION BY a.run_id, c.name
                   ORDER BY c.rank, a.number DESC, c.node DESC, c.block DESC) AS place
          FROM curves c JOIN attempts a USING (attempt_id)
        WINDOW every AS (PARTITION BY a.run_id, c.name, c.rank)) WHERE place = 1"""
_ELEVENTH = (
    "ALTER TABLE runs ADD COLUMN usd REAL",  # what it cost, where a price is known; set when it ends
    "DROP INDEX runs_by_age",
    """CREATE INDEX runs_by_age ON runs
        (created_at DESC, run_id DESC, state, name, target, backend, exit_code, started_at, ended_at, usd)""",
    """CREATE TABLE run_values (
        name   TEXT NOT NULL,
        run_id TEXT NOT NULL REFERENCES runs,
        text   TEXT NOT NULL,
        number REAL,
        PRIMARY KEY (name, run_id)
    ) WITHOUT ROWID""",
    "CREATE INDEX run_values_by_run ON run_values (run_id)",
    f"INSERT OR IGNORE INTO run_values WITH given AS (SELECT {_GIVEN} FROM runs), {_VALUES}",
    f"""CREATE TRIGGER runs_into_values AFTER INSERT ON runs BEGIN
        INSERT OR IGNORE INTO run_values
            WITH given AS (SELECT {_GIVEN} FROM (SELECT new.run_id AS run_id, new.job AS job)), {_VALUES};
    END""",
    """CREATE TABLE run_metrics (
        name    TEXT NOT NULL,
        run_id  TEXT NOT NULL REFERENCES runs,
        rank    INTEGER NOT NULL,
        attempt INTEGER NOT NULL,
        seq     INTEGER NOT NULL,
        last    REAL,                  -- NULL is not-a-number
        lowest  REAL,
        highest REAL,
        step    INTEGER NOT NULL,
        PRIMARY KEY (name, run_id)
    ) WITHOUT ROWID""",
    "CREATE INDEX run_metrics_by_run ON run_metrics (run_id)",
    FILL_METRICS,
    """CREATE TABLE marks (
        run_id   TEXT PRIMARY KEY REFERENCES runs,
        title    TEXT NOT NULL DEFAULT '',
        note     TEXT NOT NULL DEFAULT '',
        tags     TEXT NOT NULL DEFAULT '[]', -- JSON
        starred  INTEGER NOT NULL DEFAULT 0,
        archived INTEGER NOT NULL DEFAULT 0
    )""",
    "CREATE TABLE views (name TEXT PRIMARY KEY, query TEXT NOT NULL)",
)

# Sweeps, and their trials: each becomes a run. `point` is what the method was asked for, `params` what the job gets.
_TWELFTH = (
    """CREATE TABLE sweeps (
        sweep_id   TEXT PRIMARY KEY,
        name       TEXT NOT NULL,
        spec       TEXT NOT NULL,           -- JSON
        created_at TEXT NOT NULL,
        state      TEXT NOT NULL,
        reason     TEXT NOT NULL DEFAULT '',
        ended_at   TEXT,
        extra      INTEGER NOT NULL DEFAULT 0, -- trials over its budget, by `sweep extend`
        owner      TEXT NOT NULL DEFAULT '',
        expires_at REAL NOT NULL DEFAULT 0
    )""",
    """CREATE TABLE trials (
        sweep_id TEXT NOT NULL REFERENCES sweeps,
        number   INTEGER NOT NULL,
        params   TEXT NOT NULL,             -- JSON
        point    TEXT NOT NULL,             -- JSON
        target   TEXT NOT NULL,
        retry_of INTEGER,                   -- the trial that failed
        run_id   TEXT,                      -- NULL until it was submitted
        stopped  TEXT NOT NULL DEFAULT '',  -- why it was cancelled
        result   TEXT,                      -- JSON, of a trial that has ended: one value for each metric, or null
        PRIMARY KEY (sweep_id, number)
    ) WITHOUT ROWID""",
    "CREATE INDEX trials_by_run ON trials (run_id) WHERE run_id IS NOT NULL",
)

# What the nodes used, for columns of lists (usage.py).
_THIRTEENTH = (
    """CREATE TABLE run_usage (
        name    TEXT NOT NULL,
        run_id  TEXT NOT NULL REFERENCES runs,
        points  INTEGER NOT NULL,
        total   REAL NOT NULL,
        highest REAL NOT NULL,
        PRIMARY KEY (name, run_id)
    ) WITHOUT ROWID""",
    "CREATE INDEX run_usage_by_run ON run_usage (run_id)",
    FILL_USAGE,
)

# Attached runs whose log and metrics were not copied since `attach --all` read their state.
_FOURTEENTH = (
    "CREATE TABLE unread_runs (run_id TEXT PRIMARY KEY REFERENCES runs) WITHOUT ROWID",
    "INSERT INTO unread_runs SELECT run_id FROM runs WHERE identity LIKE 'attached:%'"
    " AND NOT EXISTS (SELECT 1 FROM attempts a WHERE a.run_id = runs.run_id AND cursor IS NOT NULL)",
)

# Points come with their blocks (points.py): the trigger took longer than all other writing.
_FIFTEENTH = ("DROP TRIGGER metrics_into_curves",)

# Which nodes failed lately is asked at each submit: without it every event of many runs is read.
_SIXTEENTH = ("CREATE INDEX events_of_ends ON events (attempt_id) WHERE kind IN ('result', 'verdict')",)

# A run's number, for its short name (`lm-12`): never used again, not even when the run is deleted. And how a project's
# charts are arranged in the console.
_SEVENTEENTH = (
    "CREATE TABLE run_numbers (number INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL UNIQUE)",
    "INSERT INTO run_numbers (run_id) SELECT run_id FROM runs ORDER BY created_at, run_id",
    """CREATE TRIGGER number_of_run AFTER INSERT ON runs BEGIN
        INSERT INTO run_numbers (run_id) SELECT new.run_id
        WHERE NOT EXISTS (SELECT 1 FROM run_numbers WHERE run_id = new.run_id);
    END""",
    "CREATE TABLE layouts (project TEXT PRIMARY KEY, layout TEXT NOT NULL) WITHOUT ROWID",
)

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    _FIRST,
    _SECOND,
    _THIRD,
    _FOURTH,
    _FIFTH,
    _SIXTH,
    _SEVENTH,
    _EIGHTH,
    _NINTH,
    _TENTH,
    _ELEVENTH,
    _TWELFTH,
    _THIRTEENTH,
    _FOURTEENTH,
    _FIFTEENTH,
    _SIXTEENTH,
    _SEVENTEENTH,
)


def migrate(db: sqlite3.Connection) -> None:
    """Apply the missing migrations, each one and its version number in one transaction."""
    for number, statements in enumerate(MIGRATIONS, start=1):
        db.execute("BEGIN IMMEDIATE")
        if db.execute("PRAGMA user_version").fetchone()[0] < number:  # another process may have been first
            for statement in statements:
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {number}")
        db.execute("COMMIT")
