"""A window that moves on gives the same answers as its rows given one by one."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import deployment
from tandem.facts import Facts
from tandem.records import Observation
from tandem.records import vocabulary as v
from tandem.store.state import SLOW
from tandem.store.window import DROP_EVERY_S, WINDOW_S, Window

NAMES = (v.INFLIGHT_QUEUE_REQS, v.STARTED_AT, v.PROBE)
VALUES = (0, 1, 2.5, True, "completed", None)


@st.composite
def looks(draw):
    """Batches of rows in the order in which they arrive, some late, over a few minutes."""
    at, batches = 1000.0, []
    for _ in range(draw(st.integers(1, 12))):
        at += draw(st.sampled_from((0.0, 1.0, 5.0, DROP_EVERY_S + 1, WINDOW_S)))
        batch = [
            Observation(
                source=draw(st.sampled_from(("loads", "metrics"))),
                subject="prefill-0",
                name=draw(st.sampled_from(NAMES)),
                label=draw(st.sampled_from(("", "a"))),
                at=at - draw(st.sampled_from((0.0, 0.0, 0.5, 3.0))),
                value=(value := draw(st.sampled_from(VALUES))),
                missing="nothing" if value is None else None,
            )
            for _ in range(draw(st.integers(0, 4)))
        ]
        batches.append((at, batch))
    return batches


def answers(facts, now):
    """Everything that can be asked of facts about every thing, at several moments."""
    found = []
    for view in (facts, facts.at(now - 2.0), facts.without(v.PROBE)):
        for name in NAMES:
            found += [view.labels("prefill-0", name), view.subjects(name)]
            for label in ("", "a"):
                what = ("prefill-0", name, label)
                found += [view.rows(*what), view.last(*what), view.latest(*what)]
                for since in (None, now - 4.0, now - 1000.0):
                    for source in (None, "loads"):
                        found.append(list(view.numbers(*what, since=since, source=source)))
    return found


@settings(max_examples=80, deadline=None)
@given(looks(), st.sampled_from((4.0, 30.0, WINDOW_S)))
def test_a_moving_window_answers_as_its_rows_do(batches, window_s):
    """After every batch, and for windows kept while more is added, nothing differs."""
    window, rows, number, kept = Window(0.0, ()), [], 0, []
    for now, batch in batches:
        numbered = []
        for seen in batch:
            number += 1
            numbered.append(msgspec.structs.replace(seen, id=number))
        rows += numbered
        window.add(numbered)
        since = now - window_s
        moving = Facts.over(
            deployment(), window.columns, now=now, since=since, newest_id=number, lasting=SLOW
        )
        last_slow = {}
        for seen in sorted(rows, key=lambda one: (one.at, one.id)):
            if seen.name in SLOW:
                last_slow[seen.name, seen.label] = seen
        carried = [seen for seen in last_slow.values() if seen.at < since]
        plain = Facts(deployment(), [*carried, *(one for one in rows if one.at >= since)], now=now)
        kept.append((moving, answers(plain, now), now))

    assert [answers(moving, now) for moving, _, now in kept] == [one for _, one, _ in kept]
