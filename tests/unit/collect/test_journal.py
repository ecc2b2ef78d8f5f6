"""Journals: a unit's output is followed, and its known lines are counted with their exact times.

A real systemd's journal says what is true; small programs stand where `journalctl` would for what
cannot be brought about.
"""

import asyncio
import json
import sys

import pytest

from booted import Booted
from tandem.cgroups import Service
from tandem.collect.incarnations import Incarnations
from tandem.collect.journal import (
    AGAIN_S,
    ENTRY_BYTES_MAX,
    NO_RIGHT,
    OF_KERNEL,
    JournalSource,
    of_service,
)
from tandem.collect.log_lines import REPEAT_S
from tandem.records import vocabulary as v

UNIT = Service("d.service")
UNTIL_S = 10.0
ARGUMENTS = "import json, sys, time; say = lambda *w: print(*w, flush=True); argv = sys.argv\n"


def entry(message, at=1000.0, cursor="c1"):
    return json.dumps(
        {"__CURSOR": cursor, "__REALTIME_TIMESTAMP": f"{at * 1e6:.0f}", "MESSAGE": message}
    )


class Bench:
    """A source over a small program."""

    def __init__(self, script, unit=UNIT, words=None):
        self.at = 2000.0
        self.words = words
        self.unit = unit
        self.source = JournalSource(
            "d",
            lambda: self.words if self.unit is None else of_service(self.unit),
            Incarnations(),
            program=(sys.executable, "-c", ARGUMENTS + script),
            now=lambda: self.at,
        )

    async def until(self, wanted):
        """Look until the rows are as wanted; the newest rows by name and label."""
        rows = {}
        async with asyncio.timeout(UNTIL_S):
            while not wanted(rows):
                harvest = await self.source.collect()
                rows |= {(one.name, one.label): one for one in harvest.observations}
        return rows

    async def lines(self, count):
        return await self.until(lambda rows: _lines(rows) == count)


def _lines(rows):
    return rows[v.LOG_LINES_TOTAL, ""].value if (v.LOG_LINES_TOTAL, "") in rows else None


@pytest.fixture
async def bench_of():
    made = []

    def make(script, **how):
        made.append(Bench(script, **how))
        return made[-1]

    yield make
    for one in made:
        await one.source.close()


class TestEntries:
    """What a follower says."""

    async def test_known_lines_have_their_exact_times(self, bench_of):
        """First and last seen are when the journal says they were written."""
        lines = [entry("Traceback (most recent call last):", at) for at in (1000.5, 1700.25)]
        rows = await bench_of(f"say({chr(10).join(lines)!r}); time.sleep(60)").lines(2)

        assert rows[v.LOG_SIGNATURE, "traceback"].value == 2
        assert rows[v.LOG_FIRST_SEEN_AT, "traceback"].value == 1000.5
        assert rows[v.LOG_LAST_SEEN_AT, "traceback"].value == 1700.25

    async def test_bytes_that_are_no_text_are_read(self, bench_of):
        """Colours and broken characters come as numbers, and what a terminal obeys is gone."""
        painted = list(b"\x1b[31mTraceback \x1b[0m(most recent call last):\xff")
        rows = await bench_of(f"say({entry(painted)!r}); time.sleep(60)").lines(1)

        assert rows[v.LOG_LAST, "traceback"].value == "Traceback (most recent call last):\ufffd"

    @pytest.mark.parametrize(
        "hostile",
        [
            "{",
            "[]",
            '{"MESSAGE": {}}',
            "\\x00",
            '{"__CURSOR": 3}',
            '{"MESSAGE": "\\\\ud800"}',
        ],
    )
    async def test_a_hostile_entry_is_passed_over(self, bench_of, hostile):
        """The entry after it is counted."""
        script = f"say('{hostile}'); say({entry('fine')!r}); time.sleep(60)"
        rows = await bench_of(script).until(lambda rows: (_lines(rows) or 0) >= 1)

        assert _lines(rows) <= 2

    async def test_an_entry_without_end_costs_a_bound(self, bench_of):
        """Megabytes without a newline are passed over, and the next entry is counted."""
        script = f"say('x' * 4_000_000); say({entry('fine')!r}); time.sleep(60)"
        bench = bench_of(script)
        rows = await bench.lines(1)

        assert len(bench.source._rest) <= ENTRY_BYTES_MAX
        assert _lines(rows) == 1

    async def test_what_is_far_behind_is_passed_over_and_told(self, bench_of):
        """A journal that grows faster than it is read is entered anew near its end."""
        old = entry("old" * 300, at=1000.0)
        script = (
            "fresh = '--no-tail' not in argv and not __import__('os').path.exists(argv[-1])\n"
            f"for _ in range(40_000): say({old!r})\ntime.sleep(60)"
        )
        rows = await bench_of(script).until(lambda rows: (v.LOG_SKIPPED_BYTES_TOTAL, "") in rows)

        assert "passed over" in rows[v.LOG_SKIPPED_BYTES_TOTAL, ""].missing

    async def test_a_member_without_a_unit_is_nothing_to_tell(self, bench_of):
        """Nothing is started."""
        bench = bench_of("say(1)", unit=None)

        assert (await bench.source.collect()).observations == ()
        assert bench.source._process is None


class TestFollower:
    """The program that follows."""

    async def test_it_goes_on_after_the_cursor_when_it_ended(self, bench_of):
        """A follower that was killed is started again later, where it was."""
        script = (
            f"again = [w for w in argv if w.startswith('--after-cursor=')]\n"
            f"say({entry('x')!r}.replace('x', ' '.join(again) or 'first').replace('c1', 'c7'))\n"
            f"again and time.sleep(60)"
        )
        bench = bench_of(script)
        await bench.until(lambda rows: rows and rows[v.LOG_LINES_TOTAL, ""].missing)
        bench.at += AGAIN_S + 1.0
        await bench.lines(2)

        assert bench.source._cursor == "c7"

    async def test_what_it_is_asked_for(self, bench_of):
        """One unit, as JSON, from near the end; a user's unit by its own word."""
        script = "say(json.dumps({'MESSAGE': ' '.join(argv[1:])})); time.sleep(60)"
        seen = []
        for unit in (UNIT, Service("u.service", 1000)):
            bench = bench_of(script, unit=unit)
            bench.source._lines.count = lambda line, _, **__: seen.append(line.decode())
            wanted = len(seen) + 1
            await bench.until(lambda _, wanted=wanted: len(seen) == wanted)

        assert "--output=json" in seen[0]
        assert "--follow --unit=d.service --lines=500" in seen[0]
        assert "--user-unit=u.service" in seen[1]

    async def test_a_driver_error_of_before_is_in_the_kernels_messages(self, bench_of):
        """XIDs from before Tandem started are counted, at their times."""
        xid = "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus."
        script = f"'--dmesg' in argv and say({entry(xid, at=1500.0)!r}); time.sleep(60)"
        rows = await bench_of(script, unit=None, words=OF_KERNEL).lines(1)

        assert rows[v.LOG_LAST, "gpu-xid"].value == xid
        assert rows[v.LOG_FIRST_SEEN_AT, "gpu-xid"].value == 1500.0

    @pytest.mark.parametrize(
        ("said", "wanted"),
        [
            ("No journal files were opened due to insufficient permissions.", NO_RIGHT),
            ("Hint: You are currently not seeing messages from other users.", NO_RIGHT),
            ("Failed to add match", "journalctl ended: Failed to add match"),
            ("", "it gave no reason"),
        ],
    )
    async def test_why_nothing_is_seen_is_told_now_and_then(self, bench_of, said, wanted):
        """The group that may see it is named; the row is not repeated at every look."""
        bench = bench_of(f"sys.stderr.write({said!r}); sys.exit(1)")
        rows = await bench.until(lambda rows: rows and rows[v.LOG_LINES_TOTAL, ""].missing)
        quiet = await bench.source.collect()
        bench.at += REPEAT_S / 2
        still = await bench.source.collect()

        assert wanted in rows[v.LOG_LINES_TOTAL, ""].missing
        assert (quiet.observations, still.observations) == ((), ())

    async def test_no_journalctl_is_a_reason(self):
        """A host without it says so."""
        source = JournalSource(
            "d", lambda: of_service(UNIT), Incarnations(), program=("/nowhere/journalctl",)
        )
        (row,) = (await source.collect()).observations

        assert "cannot start journalctl" in row.missing


@pytest.fixture(scope="module")
def booted():
    """Boot a real systemd once for this file."""
    machine = Booted()
    yield machine
    machine.close()


async def read_until(source, wanted):
    rows = {}
    async with asyncio.timeout(UNTIL_S):
        while not wanted(rows):
            harvest = await source.collect()
            rows |= {(one.name, one.label): one for one in harvest.observations}
    return rows


@pytest.mark.needs("journal")
class TestReal:
    """The journal of a whole systemd."""

    async def test_a_units_lines_and_its_end_are_counted(self, booted):
        """What it wrote before and while it was followed, and how systemd saw it end."""
        booted.write(
            "talks.service",
            "[Service]\nExecStart=/bin/sh -c 'echo Decode batch, 1; echo Decode batch, 2; "
            "while test ! -e /run/on; do sleep 0.02; done; "
            'printf "\\\\033[31mTraceback (most recent call last):\\\\033[0m\\\\n"; exit 1\'\n',
        )
        booted.run("systemctl", "start", "talks.service")
        source = JournalSource(
            "d",
            lambda: of_service(Service("talks.service")),
            Incarnations(),
            program=(*booted.inside, "journalctl"),
        )
        first = await read_until(source, lambda rows: _count(rows, "decode-batch") == 2)
        booted.run("touch", "/run/on")
        rows = await read_until(source, lambda rows: _count(rows, "main-process-exited") == 1)
        await source.close()

        assert _count(first, "traceback") in (0, None)
        assert rows[v.LOG_LAST, "traceback"].value == "Traceback (most recent call last):"
        assert "code=exited, status=1" in rows[v.LOG_LAST, "main-process-exited"].value
        assert (
            first[v.LOG_FIRST_SEEN_AT, "decode-batch"].value
            < rows[v.LOG_FIRST_SEEN_AT, "traceback"].value
        )

    async def test_a_plain_user_is_told_the_group(self, booted):
        """Without the right the reason names it."""
        source = JournalSource(
            "d",
            lambda: of_service(Service("talks.service")),
            Incarnations(),
            program=(
                *booted.inside,
                *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "journalctl"),
            ),
        )
        rows = await read_until(source, lambda rows: rows and rows[v.LOG_LINES_TOTAL, ""].missing)
        await source.close()

        assert rows[v.LOG_LINES_TOTAL, ""].missing == NO_RIGHT


def _count(rows, slug):
    return rows[v.LOG_SIGNATURE, slug].value if (v.LOG_SIGNATURE, slug) in rows else None
