"""What the nodes of a run used (`run_usage`): mean and highest value over all nodes, GPUs and times, kept with every batch."""

from __future__ import annotations

from collections.abc import Iterable

from cloudtrain.events import MOST_GPUS, Event, read_usage

UNITS = {  # columns `system.NAME` of lists of runs
    "cpu": "percent of one processor",
    "memory": "GB",
    "gpu": "percent",
    "gpu_memory": "GB",
}

ADD_USAGE = (
    "INSERT INTO run_usage (name, run_id, points, total, highest)"
    " SELECT ?1, run_id, ?2, ?3, ?4 FROM attempts WHERE attempt_id = ?5"
    " ON CONFLICT (name, run_id) DO UPDATE SET points = points + excluded.points, total = total + excluded.total,"
    " highest = max(highest, excluded.highest)"
)


def _number(of: str, path: str, factor: str = "") -> str:
    return f"CASE WHEN json_type({of}, '{path}') IN ('integer', 'real') THEN json_extract({of}, '{path}'){factor} END"


# The same from the stored events, as SQL: for a history of an older version, and for one that was repaired.
FILL_USAGE = f"""INSERT OR IGNORE INTO run_usage
    WITH given AS (
        SELECT attempt_id, CASE WHEN json_valid(data) THEN data ELSE '{{}}' END AS data FROM events WHERE kind = 'usage'),
    gpus AS (
        SELECT attempt_id, CASE each.type WHEN 'object' THEN each.value ELSE '{{}}' END AS gpu
          FROM given, json_each(given.data, '$.gpus') AS each WHERE each.key < {MOST_GPUS})
    SELECT name, run_id, count(*), total(value), max(value) FROM (
        SELECT 'cpu' AS name, attempt_id, {_number("data", "$.cpu_percent")} AS value FROM given
        UNION ALL SELECT 'memory', attempt_id, {_number("data", "$.rss_bytes", " * 1e-9")} FROM given
        UNION ALL SELECT 'gpu', attempt_id, {_number("gpu", "$.percent")} FROM gpus
        UNION ALL SELECT 'gpu_memory', attempt_id, {_number("gpu", "$.memory_bytes", " * 1e-9")} FROM gpus
    ) JOIN attempts USING (attempt_id) WHERE value >= 0 AND value < 9e999 GROUP BY name, run_id"""


def summarize(events: Iterable[Event]) -> list[tuple[str, int, float, float]]:
    """Return name, number, sum and highest of the values in usage events."""
    found: dict[str, list[float]] = {}
    for event in events:
        usage = read_usage(event.data)
        values = [("cpu", usage.cpu_percent, 1.0), ("memory", usage.rss_bytes, 1e-9)]
        for gpu in usage.gpus:
            values += [("gpu", gpu.percent, 1.0), ("gpu_memory", gpu.memory_bytes, 1e-9)]
        for name, value, factor in values:
            if value is not None:
                found.setdefault(name, []).append(value * factor)
    return [(name, len(values), sum(values), max(values)) for name, values in found.items()]
