"""Durations, sizes and times: read as people write them (`1h30m`, `64GiB`), and written one way everywhere."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime

from cloudtrain.clock import SYSTEM, Clock

_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_NAMES = {"s": "sec second", "m": "min minute", "h": "hr hour", "d": "day", "w": "week"}
_WORDS = {name + s: unit for unit, names in _NAMES.items() for name in names.split() for s in ("", "s")}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT])(i?)[bB]?\s*")
_USD = re.compile(r"\s*(?:\$\s*(\d+(?:\.\d+)?)|(\d+(?:\.\d+)?)\s*(?:USD|usd))\s*")
HOUR_S = 3600.0
_MAX_S = 10 * 365 * 86400
_MAX_BYTES = 10**15
MOST_RANKS = 100_000  # of a job
RANKS_WHY = "the largest published trainings have 16,000 to 100,000 processes"
_MAX_USD = 10**9
PRICE_LIST = r"[a-z][a-z0-9-]{0,39}/[A-Za-z0-9-]{1,40}"  # the name of one: provider/region


def duration_s(text: str) -> int:
    """Return whole seconds of a text such as `24h`, `1h30m` or `90 s`; raises ValueError with what would be right."""
    at, total = 0, 0.0
    while at < len(text):
        part = _PART.match(text, at)
        unit = part and _WORDS.get(part[2].lower(), part[2].lower())
        if not part or unit not in _SECONDS:
            raise ValueError("write a number and a unit: 90s, 15m, 24h, 7d or 1h30m")
        total += float(part[1]) * _SECONDS[unit]
        at = part.end()
    if not 1 <= total <= _MAX_S:
        raise ValueError("it must be between 1s and ten years")
    return round(total)


def size_bytes(text: str) -> int:
    """Return the bytes of a text such as `64GB`, `64GiB` or `500 MB`; raises ValueError with what would be right."""
    match = _SIZE.fullmatch(text)
    if not match:
        raise ValueError("write a number and a unit: 500MB, 64GB, 64GiB or 1TB")
    power = "kmgt".index(match[2].lower()) + 1
    size = float(match[1]) * float(1024 if match[3] else 1000) ** power
    if not 1 <= size <= _MAX_BYTES:
        raise ValueError("it must be greater than 0 and at most 1,000 TB")
    return round(size)


def usd(text: str) -> float:
    """Return the amount of a text such as `40 USD`, `$40` or `40.50usd`; raises ValueError with what would be right."""
    match = _USD.fullmatch(text)
    if not match or float(match[1] or match[2]) <= 0:
        raise ValueError("write an amount in US dollars: 40 USD")
    if float(match[1] or match[2]) > _MAX_USD:
        raise ValueError("it must be at most 1,000,000,000 USD")
    return float(match[1] or match[2])


def usd_per_month(text: str) -> float:
    """Return the amount of a text such as `500 USD/month`; raises ValueError with what would be right."""
    amount, _, period = text.rpartition("/")
    if period.strip() != "month":
        raise ValueError("write an amount a month: 500 USD/month")
    return usd(amount)


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun: `1 run`, `1,200 runs`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def format_size(count: float) -> str:
    """Format a number of bytes: 12 B, 3.4 kB, 2 MB, 80 GB."""
    units = iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while count >= 1000 and unit != "TB":
        count, unit = count / 1000, next(units)
    return (f"{count:.0f}" if count >= 10 else f"{count:.1f}".removesuffix(".0")) + f" {unit}"


def format_number(value: float, digits: int = 4) -> str:
    """Format a number as people write it: 0.05, 5.2e-4, 12346, 1.2e9; with so many digits, or all before the point."""
    if not math.isfinite(value):
        return str(float(value))
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        if float(value).is_integer():
            return str(int(value))
        text = f"{value:.{digits}g}"
        return text if "e" not in text else str(round(value))
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"


def natural_key(name: str) -> list[tuple[int, str]]:
    """Return what sorts names with numbers as people count: layer.2 before layer.10."""
    key = []
    for position, part in enumerate(re.split(r"([0-9]+)", name)):
        number = part.lstrip("0") if position % 2 else None  # compared as text: it may have thousands of digits
        key.append((-1, part) if number is None else (len(number), number))
    return key


def format_duration(seconds: float) -> str:
    """Format a duration: 12s, 3m 05s, 2h 10m, 4d 03h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        size, part, names = 60, 1, "ms"
    elif whole < 48 * 3600:
        size, part, names = 3600, 60, "hm"
    else:
        size, part, names = 86400, 3600, "dh"
    rest = whole % size // part
    return f"{whole // size}{names[0]}" + (f" {rest:02d}{names[1]}" if rest else "")


def now(clock: Clock = SYSTEM) -> str:
    """Return the time as ISO 8601 in UTC with microseconds."""
    return format_time(clock.now())


def format_time(moment: datetime | float) -> str:
    """Format a time, or seconds since 1970, as ISO 8601 in UTC with microseconds."""
    moment = moment if isinstance(moment, datetime) else datetime.fromtimestamp(moment, UTC)
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def unix_time(text: str) -> float:
    """Return the seconds since 1970 of an ISO time, in UTC where it names no zone; raises ValueError."""
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def seconds_since(text: str, clock: Clock = SYSTEM) -> float:
    """Return the seconds from an ISO time until now; raises ValueError."""
    return clock.now() - unix_time(text)
