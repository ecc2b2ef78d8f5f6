"""The page of findings is held to what detect finds, and its numbers to the code's."""

import re
from pathlib import Path

import pytest

import tidy
from tandem import cases
from tandem.detect import RECURS_S
from tandem.detect.corrupted import OTHERS_MIN
from tandem.detect.health import GREEN_IDLE_S, GREEN_S, RED_S
from tandem.detect.partial import LEASED, ORPHANED
from tandem.detect.paused import PAUSED_S
from tandem.detect.restarts import CRASHES_MIN, LOOP_S, RESTARTS_MIN
from tandem.detect.router import LOST_S, SHUT_S
from tandem.records import Thresholds
from tandem.records.finding import KINDS

PAGE = (tidy.ROOT / "docs" / "operating" / "findings.md").read_text()
DETECT = tidy.ROOT / "src" / "tandem" / "detect"


def section(kind):
    """Give the part of the page about one kind."""
    return PAGE.split(f"\n## {kind}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_documented(kind):
    """Every kind has its row, and a section that says what it means and what it is not."""
    assert re.search(rf"^\| `{kind}` \|", PAGE, re.MULTILINE)
    assert "Means" in section(kind) or "while" in section(kind)
    assert "Is not:" in section(kind) or kind == "slow-but-moving"


def test_no_kind_is_invented():
    """The page and the rules know no kinds beyond those of the record."""
    rows = re.findall(r"^\| `([a-z-]+)` \|", PAGE, re.MULTILINE)
    code = "".join(path.read_text() for path in sorted(Path(DETECT).glob("*.py")))
    offered = set(re.findall(r'kind="([a-z-]+)"', code))

    assert tuple(rows) == KINDS
    assert offered <= set(KINDS)


@pytest.mark.parametrize(
    ("kind", "said", "value"),
    [
        ("partial-stall", "36 s", LEASED * Thresholds().partial_floor_s),
        ("partial-stall", "45 s", ORPHANED * Thresholds().partial_floor_s),
        ("member-paused", "five seconds", PAUSED_S),
        ("router-disagrees", "150 s", SHUT_S),
    ],
)
def test_a_number_is_the_one_in_the_code(kind, said, value):
    """What the page says in seconds is what the rules use."""
    words = {"five seconds": 5.0}
    told = words.get(said) or float(said.split()[0])

    assert said in section(kind)
    assert told == value


def test_the_words_for_numbers_are_the_ones_in_the_code():
    """Numbers that are written out are those of the rules as well."""
    assert (GREEN_IDLE_S, GREEN_S, RED_S) == (10.0, 20.0, 20.0)
    assert (LOOP_S, CRASHES_MIN, RESTARTS_MIN) == (300.0, 3, 5)
    assert (RECURS_S, cases.AGAIN_S) == (600.0, (30.0, 300.0))
    assert LOST_S == 60.0
    assert OTHERS_MIN == 2
