"""The known prompt: when it is asked, and what is remembered of its answers."""

import dataclasses

from probing import DONE, Clock, safe
from tandem.collect.incarnations import Incarnations
from tandem.collect.known import BUSY_EVERY_S, IDLE_EVERY_S, Answers, known_text
from tandem.collect.probe import Knows, ProbeSource
from tandem.records import ProbeSettings
from tandem.records import vocabulary as v

LIVES = ("1:1", "2:2")


def test_it_is_always_the_same():
    """Two texts of one length are equal, and a longer one begins alike."""
    assert known_text(20) == known_text(20)
    assert known_text(40).startswith(known_text(20))


def test_it_is_due_once_a_minute_and_rarer_under_load():
    """A path at rest is asked at once; one that is busy not before five minutes have passed."""
    answers = Answers()
    before = [answers.due(0.0, busy=True), answers.due(0.0, busy=False)]
    answers.asked(0.0)

    assert before == [False, True]
    assert [answers.due(at, busy=False) for at in (IDLE_EVERY_S - 1, IDLE_EVERY_S)] == [False, True]
    assert [answers.due(at, busy=True) for at in (IDLE_EVERY_S, BUSY_EVERY_S)] == [False, True]


def test_it_tells_the_first_and_the_last_two():
    """Nothing of one answer; then the first of these lives stays while the last two move on."""
    answers = Answers()
    told = [answers.told((number,), LIVES) for number in (1, 2, 3)]

    assert told == [None, ("1", "1", "2"), ("1", "2", "3")]


def test_other_lives_answer_anew():
    """After a restart there is another first answer."""
    answers = Answers()
    for number in (1, 2):
        answers.told((number,), LIVES)
    told = [answers.told((number,), ("9:9", "2:2")) for number in (7, 8)]

    assert told == [None, ("7", "7", "8")]


async def test_a_probe_asks_it_between_fresh_ones_and_tells_its_answers():
    """Once a minute the prompt is the known one; from the second answer on they are told."""
    sent, clock = [], Clock()

    async def send(prompt):
        sent.append(prompt)
        return dataclasses.replace(DONE, token_ids=(len(sent), 9))

    ends = ("prefill-0", "decode-0")
    source = ProbeSource(
        "prefill-0>decode-0",
        ends,
        send,
        ProbeSettings(),
        clock,
        Incarnations(),
        knows=Knows(safety=safe()),
    )
    told = []
    for _ in range(4):
        harvest = await source.collect()
        told += [one.value for one in harvest.observations if one.name == v.PROBE_ANSWERS]
        clock.at += IDLE_EVERY_S / 2
    await source.close()
    known = [one == known_text(len(one.split())) for one in sent]

    assert known == [True, False, True, False]
    assert told == [("1 9", "1 9", "3 9")]
