"""Metric families as text: the Prometheus format 0.0.4, or OpenMetrics 1.0 for who asks for it.

For: the few families of our own page. Not for: reading pages (`tandem.scan`), or a registry.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

PLAIN = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class Point(NamedTuple):
    """One sample: what follows the family's name, its labels, its value."""

    suffix: str
    labels: Mapping[str, str]
    value: float


class Family(NamedTuple):
    """One metric: `name` is without `_total` and `_info`, which their kinds add."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "info"]
    about: str
    points: Sequence[Point]


def one(name: str, kind: Literal["counter", "gauge"], about: str, value: float) -> Family:
    """A family of a single sample without labels."""
    return Family(name, kind, about, (Point(_SUFFIX.get(kind, ""), {}, value),))


def several(
    name: str,
    kind: Literal["counter", "gauge"],
    about: str,
    label: str,
    values: Mapping[str, float],
) -> Family:
    """A family split by one label, in the order of its values."""
    suffix = _SUFFIX.get(kind, "")
    points = tuple(Point(suffix, {label: key}, values[key]) for key in sorted(values))
    return Family(name, kind, about, points)


def wants_openmetrics(accept: str) -> bool:
    """Whether an `Accept` header prefers OpenMetrics: it is named, and not with a lower weight."""
    weights = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for part in accept.split(","):
        kind, *parameters = (word.strip() for word in part.split(";"))
        if kind in weights:
            given = next((word[2:] for word in parameters if word.startswith("q=")), "1")
            weights[kind] = max(weights[kind], _weight(given))
    return weights["application/openmetrics-text"] > 0 and (
        weights["application/openmetrics-text"] >= weights["text/plain"]
    )


def page(families: Iterable[Family], *, openmetrics: bool) -> bytes:
    """The whole page; the same families give the same bytes."""
    lines: list[str] = []
    for family in families:
        bare, plain_kind = family.name, family.kind
        if not openmetrics:
            # The older format has no info, and names a counter as its samples are named.
            bare += _SUFFIX.get(family.kind, "")
            plain_kind = "gauge" if family.kind == "info" else family.kind
        lines.append(f"# HELP {bare} {_text(family.about, quoted=openmetrics)}")
        lines.append(f"# TYPE {bare} {plain_kind}")
        lines += [
            f"{family.name}{point.suffix}{_labels(point.labels)} {_number(point.value)}"
            for point in family.points
        ]
    if openmetrics:
        lines.append("# EOF")
    return ("\n".join(lines) + "\n").encode()


_SUFFIX = {"counter": "_total", "info": "_info"}


def _weight(given: str) -> float:
    try:
        return float(given)
    except ValueError:
        return 0.0


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    pairs = (f'{name}="{_text(value, quoted=True)}"' for name, value in labels.items())
    return "{" + ",".join(pairs) + "}"


def _text(text: str, *, quoted: bool) -> str:
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    return escaped.replace('"', '\\"') if quoted else escaped


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**53 else repr(value)


__all__ = ["OPENMETRICS", "PLAIN", "Family", "Point", "one", "page", "several", "wants_openmetrics"]
