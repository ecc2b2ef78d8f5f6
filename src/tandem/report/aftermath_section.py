"""How a report tells what became of a repair in real traffic.

For: "held for 30 min", "recurred after 41 min", and what that rests on. Not for: finding it out.
"""

from tandem.records import Aftermath, Incident, Milestone
from tandem.report.blocks import Block, Bullets, Code, Paragraph, Strong, Text
from tandem.report.words import length, moment

WATCHED_SHARE = 0.5
"""Less of the time watched than this says nothing of the whole."""


def in_a_word(aftermath: Aftermath | None) -> str:
    """`held for 24 h`, `recurred after 41 min`, or nothing when nothing is known yet."""
    if aftermath is None:
        return ""
    if aftermath.recurred_at is not None:
        return f"recurred after {_span(aftermath.recurred_at - aftermath.since)}"
    newest = aftermath.held[-1] if aftermath.held else None
    if newest is None or not _watched(newest) or newest.requests == 0:
        return ""
    return f"held for {_span(newest.after_s)}"


def aftermath_blocks(incident: Incident) -> list[Block]:
    """What was seen since the proof, milestone by milestone; empty while nothing is due."""
    found = incident.aftermath
    blocks: list[Block] = []
    if incident.recurrence_of is not None:
        blocks.append(
            Paragraph((Strong("A recurrence"), " of ", Code(incident.recurrence_of), "."))
        )
    if found is None or not found.statements:
        return blocks
    items = [_milestone(one) for one in found.held]
    if found.recurred_at is not None:
        items.append(_recurred(found))
    return [*blocks, Paragraph(("In real traffic since the proof:",)), Bullets(tuple(items))]


def _milestone(one: Milestone) -> Text:
    span = _span(one.after_s)
    watched = f"watched for {length(one.watched_s)} of it"
    if not _watched(one):
        return (Strong(f"Not known for {span}"), f": {watched}.")
    served = "" if one.requests is None else f", {one.requests} requests served"
    again = ""
    if one.restarts:
        times = "once" if one.restarts == 1 else f"{one.restarts} times"
        again = f"; its members were restarted {times} meanwhile, so more than the repair held"
    if one.requests == 0:
        return (Strong(f"Nothing came back in {span}"), f", and nothing was served: {watched}.")
    return (Strong(f"Held for {span}"), f": {watched}{served}{again}.")


def _recurred(found: Aftermath) -> Text:
    at = found.recurred_at or found.since
    return (
        Strong(f"Recurred after {_span(at - found.since)}"),
        f", at {moment(at)}: ",
        Code(found.recurred_as or "an incident that is gone"),
        ".",
    )


def _watched(one: Milestone) -> bool:
    return one.watched_s >= WATCHED_SHARE * one.after_s


def _span(seconds: float) -> str:
    """`41 min`, `24 h`: as people say it, no finer."""
    minutes = round(seconds / 60.0)
    if minutes < 1:
        return length(seconds)
    return f"{minutes} min" if minutes < 120 else f"{round(minutes / 60.0)} h"


__all__ = ["aftermath_blocks", "in_a_word"]
