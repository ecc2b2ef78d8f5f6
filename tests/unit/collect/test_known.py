"""The known prompt: when it is asked, and what is remembered of its answers."""

from tandem.collect.known import BUSY_EVERY_S, IDLE_EVERY_S, Answers, known_text

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
