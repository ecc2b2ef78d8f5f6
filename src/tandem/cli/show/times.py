"""Times and durations as a tired person reads them: UTC and relative, one unit, no arithmetic.

For: every view of `cli/show`. Not for: asking what time it is; `now` is given.
"""

from datetime import UTC, datetime

MINUTE_S = 60.0
HOUR_S = 3600.0
DAY_S = 86400.0


def duration(seconds: float) -> str:
    """Say a length of time in the largest unit that still tells: `0.6 s`, `42 s`, `17 h`."""
    length_s = abs(seconds)
    if length_s < 10:
        return f"{length_s:.1f} s"
    if length_s < 2 * MINUTE_S:
        return f"{length_s:.0f} s"
    if length_s < 2 * HOUR_S:
        return f"{length_s / MINUTE_S:.0f} min"
    if length_s < 2 * DAY_S:
        return f"{length_s / HOUR_S:.0f} h"
    return f"{length_s / DAY_S:.0f} days"


def ago(at: float, now: float) -> str:
    """Say how far `at` lies from `now` (both unix seconds): `3 min ago`, `in 20 s`."""
    if abs(now - at) < 1.0:
        return "just now"
    return f"{duration(now - at)} ago" if at < now else f"in {duration(at - now)}"


def utc(at: float, now: float | None = None) -> str:
    """Say a moment in UTC: `21:14:02Z` on the day of `now`, else with its date."""
    moment = datetime.fromtimestamp(at, tz=UTC)
    if now is not None and moment.date() == datetime.fromtimestamp(now, tz=UTC).date():
        return f"{moment:%H:%M:%S}Z"
    return f"{moment:%Y-%m-%d %H:%M:%S}Z"


def when(at: float, now: float) -> str:
    """Say a moment both ways: `21:14:02Z (3 min ago)`."""
    return f"{utc(at, now)} ({ago(at, now)})"


def length(text: str) -> float:
    """Read a length of time as people write it: `90s`, `15m`, `24h`, `2d`; seconds.

    Raises ValueError when it is none.
    """
    units = {"s": 1.0, "m": MINUTE_S, "h": HOUR_S, "d": DAY_S}
    number, unit = text.strip()[:-1], text.strip()[-1:]
    seconds = float(number) * units.get(unit, float("nan"))
    if not 0 < seconds < 1000 * DAY_S:
        raise ValueError(f"`{text}` is no length of time")
    return seconds
