"""After a repair: what is counted, when the report gains a statement, and who counts on."""

import msgspec
import pytest

import faults
from fakes import World, deployment
from night import DIAGNOSIS, FINDING, VERIFICATION
from sites import AUTO, DECODE
from stores import OUTCOME
from tandem import aftermath
from tandem.aftermath import HOLDS_S, Follower
from tandem.errors import WorldError
from tandem.facts import Facts
from tandem.handling import recurrence_of, written
from tandem.parts import Parts
from tandem.records import Aftermath, Change, Incident, Milestone, Observation, ReportRef
from tandem.records import vocabulary as v
from tandem.report import render
from tandem.store import Store

T = 1_764_500_000.0
MINUTE_S = 60.0


def repaired(id="2025-11-30T10-00-00Z-silent-stall", *, ended_at=T, **fields):  # noqa: A002
    """An incident whose repair was proven at `ended_at`."""
    finding = msgspec.structs.replace(
        FINDING, subject="prefill-0>decode-0", incarnations={}, onset_at=ended_at - 120.0
    )
    fields = {
        "finding": finding,
        "outcomes": (OUTCOME,),
        "verification": msgspec.structs.replace(VERIFICATION, ended_at=ended_at, passed=True),
        "report": ReportRef(path="INCIDENTS.md", commit=None, subject=None, state="closed"),
        "state": "closed",
        **fields,
    }
    return Incident(id=id, opened_at=ended_at - 60.0, deployment=deployment(), **fields)


class Bench:
    """A store with a repaired incident, and a follower that looks when it is told to."""

    def __init__(self, root, monkeypatch):
        self.world = World(deployment())
        self.world.clock.time = T
        self.settings = msgspec.structs.replace(self.world.settings(), root=str(root))
        self.root = root
        self.total, self.life, self.probes = 100.0, "decode-0:1", 0.0
        self.changes = []
        self.told = []
        self.stores = []
        self.reports = []

        async def write_down(parts, incident, *, tell):
            self.reports.append(incident)
            followed = incident.aftermath.statements
            incident = msgspec.structs.replace(
                incident,
                report=ReportRef(
                    path="x", commit=None, subject=None, state=incident.state, followed=followed
                ),
            )
            parts.store.save(incident)
            return incident

        monkeypatch.setattr(aftermath, "write_down", write_down)
        self.restart()

    def restart(self):
        """Another watch over the same disk."""
        store = Store.open(self.root, self.settings)
        self.stores.append(store)
        self.parts = Parts(
            settings=self.settings,
            store=store,
            hands=self.world.hands(),
            clock=self.world.clock,
            collector=None,
            modes=(),
            take_stacks=None,
        )
        self.follower = Follower(self.parts, self.told.append)

    def facts(self):
        """What is seen now."""
        now = self.world.clock.time
        seen = [
            Observation(
                source="metrics", subject=DECODE, name=v.REQUESTS_TOTAL, at=now,
                value=self.total, incarnation=self.life,
            ),
            Observation(
                source="probe", subject="prefill-0>decode-0", name=v.PROBES_SENT_TOTAL, at=now,
                value=self.probes,
            ),
        ]  # fmt: skip
        return Facts(self.world.deployment, seen, now=now, changes=self.changes)

    async def look(self, *, minutes=0.0, every_s=20.0, requests=1.0, probes=0.0, free=True):
        """Look now, and again every so often for so long; traffic flows meanwhile."""
        ends_at = self.world.clock.time + minutes * MINUTE_S
        while True:
            self.follower.turned(self.facts(), free=free)
            if self.follower.busy:
                await self.follower._writing
            if self.world.clock.time >= ends_at:
                return
            self.world.clock.time += every_s
            self.total += requests
            self.probes += probes

    @property
    def newest(self):
        """The incident as the disk has it."""
        return self.parts.store.incidents()[-1]


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Give a follower over a store with one repaired incident."""
    made = Bench(tmp_path, monkeypatch)
    made.parts.store.save(repaired())
    yield made
    for store in made.stores:
        store.close()


class TestHeld:
    """Nothing came back."""

    async def test_after_half_an_hour_the_report_says_so(self, bench):
        """Not a look earlier, and once: how long was watched, and what was served."""
        await bench.look(minutes=29.6)
        before = bench.newest.aftermath
        await bench.look(minutes=5)

        assert before is None
        assert bench.newest.aftermath == Aftermath(
            since=T, held=(Milestone(after_s=1800.0, watched_s=1800.0, requests=90),)
        )
        assert len(bench.reports) == 1
        assert "has held for 30 min (watched 30 min, 90 requests served)" in bench.told[0]

    async def test_after_a_day_it_says_that_too(self, bench):
        """Both milestones, each with its own count; then it is over, and costs nothing more."""
        await bench.look(minutes=30, every_s=30.0)
        await bench.look(minutes=23.5 * 60, every_s=30.0)
        await bench.look(minutes=60, every_s=30.0)
        half, day = bench.newest.aftermath.held

        assert [one.after_s for one in (half, day)] == list(HOLDS_S)
        assert (half.requests, day.requests) == (60, 2880)
        assert day.watched_s == 86_400.0
        assert bench.follower._followed == {}
        assert written(bench.newest)

    async def test_our_own_probes_are_no_traffic(self, bench):
        """What path probes made the decode finish is taken off."""
        await bench.look(minutes=31, requests=3.0, probes=3.0)

        assert bench.newest.aftermath.held[0].requests == 0

    async def test_without_a_counter_nothing_is_claimed(self, bench):
        """No counter of requests: None, which is not zero."""
        bench.total = None
        bench.life = None
        now = bench.world.clock
        for _ in range(95):
            bench.follower.turned(Facts(bench.world.deployment, (), now=now.time), free=True)
            if bench.follower.busy:
                await bench.follower._writing
            now.time += 20.0

        assert bench.newest.aftermath.held[0].requests is None

    async def test_a_restart_of_its_members_is_told(self, bench):
        """Whoever restarted the decode since shares the credit; requests are counted over it."""
        await bench.look(minutes=10)
        bench.total, bench.life = 4.0, "decode-0:2"
        bench.changes = [Change(at=T + 600.0, subject=DECODE, kind="restart")]
        await bench.look(minutes=21)
        (half,) = bench.newest.aftermath.held

        assert half.restarts == 1
        assert half.requests == 30 + 4 + 60

    async def test_what_the_proof_asked_for_is_no_traffic(self, bench):
        """A watch that last saw the old life counts from the first look after the proof."""
        bench.world.clock.time, bench.life = T - 30.0, "decode-0:0"
        bench.follower.turned(bench.facts(), free=True)
        bench.world.clock.time, bench.life, bench.total = T + 1.0, "decode-0:1", 114.0
        await bench.look(minutes=31)

        assert bench.newest.aftermath.held[0].requests == 90

    async def test_while_another_report_is_written_it_waits(self, bench):
        """It is told at the first turn in which nobody else writes."""
        await bench.look(minutes=31, free=False)
        waited = bench.reports == []
        await bench.look()

        assert waited
        assert len(bench.reports) == 1

    @pytest.mark.parametrize(
        "fields",
        [
            {"state": "failed"},
            {"state": "advised", "outcomes": (), "verification": None},
            {"aftermath": Aftermath(since=T, recurred_at=T + 60.0, recurred_as="x")},
        ],
    )
    async def test_what_was_not_proven_or_is_over_is_not_followed(self, bench, fields):
        """Only a repair whose proof held can hold."""
        bench.parts.store.save(repaired(**fields))
        await bench.look(minutes=31)

        assert bench.reports == []

    async def test_a_disk_that_refuses_is_tried_again(self, bench, monkeypatch):
        """The statement is made once there is room; the turn in which it broke is told of it."""
        real, left = bench.parts.store.save, [1]

        def save(incident):
            if left and left.pop():
                raise WorldError("The disk is full.", next_step="Free some space.")
            real(incident)

        monkeypatch.setattr(bench.parts.store, "save", save)
        broken = []
        for _ in range(110):
            try:
                await bench.look()
            except WorldError as error:
                broken.append(error)
            bench.world.clock.time += 20.0

        assert len(broken) >= 1
        assert len(bench.newest.aftermath.held) == 1


class TestRestarts:
    """Watches come and go."""

    async def test_nothing_is_lost_or_counted_twice(self, bench):
        """However often the watch ends, the count is that of a watch that stayed."""
        for minutes in (3, 7, 0.5, 11, 2, 8):
            await bench.look(minutes=minutes)
            # Killed: what was not kept is counted again from the counters themselves.
            bench.restart()
        (half,) = bench.newest.aftermath.held

        assert half.requests == 90
        assert half.watched_s == pytest.approx(1800.0, abs=6 * 40.0)

    async def test_two_watches_one_after_the_other_say_it_once(self, bench):
        """The second finds on the disk that it has been said."""
        await bench.look(minutes=31)
        bench.restart()
        await bench.look(minutes=31)

        assert len(bench.reports) == 1
        assert len(bench.newest.aftermath.held) == 1

    async def test_a_time_in_which_nobody_watched_is_told(self, bench):
        """The requests of the gap are in the counter; that nobody looked is in the milestone."""
        await bench.look(minutes=4)
        bench.restart()
        bench.world.clock.time += 40 * MINUTE_S
        bench.total += 500.0
        await bench.look()
        (half,) = bench.newest.aftermath.held

        assert half.watched_s == pytest.approx(240.0, abs=40.0)
        assert half.requests == 512

    async def test_killed_between_saying_and_writing_it_is_written(self, bench):
        """The report of an aftermath that it does not tell is out of date."""
        incident = msgspec.structs.replace(
            repaired(),
            aftermath=Aftermath(since=T, held=(Milestone(after_s=1.0, watched_s=1.0, requests=1),)),
        )

        assert written(repaired())
        assert not written(incident)

    async def test_a_damaged_note_costs_the_count_and_nothing_else(self, bench):
        """Half a note, as a full disk leaves it, is as none."""
        await bench.look(minutes=10)
        (bench.parts.store.folder(bench.newest.id) / "tally.json").write_text('{"record":"ta')
        bench.restart()
        await bench.look(minutes=21)

        assert bench.newest.aftermath.held[0].watched_s == pytest.approx(1200.0, abs=40.0)


class TestRecurred:
    """The same again."""

    async def test_both_incidents_know_each_other(self, bench):
        """The first says when and as what it came back, and holds for nothing any more."""
        await bench.look(minutes=41)
        finding = msgspec.structs.replace(
            bench.newest.finding, id="again", onset_at=T + 41 * MINUTE_S
        )
        first = recurrence_of(bench.parts.store.incidents(), finding)
        again = Incident(
            id="2025-11-30T11-00-00Z-silent-stall", opened_at=T + 42 * MINUTE_S,
            deployment=deployment(), finding=finding, recurrence_of=first,
        )  # fmt: skip
        bench.parts.store.save(again)
        await bench.look(minutes=60)
        found = bench.newest.aftermath

        assert first == bench.newest.id
        assert (found.recurred_at, found.recurred_as) == (T + 41 * MINUTE_S, again.id)
        assert [one.after_s for one in found.held] == [1800.0]
        assert "recurred after 41 min" in bench.told[-1]

    @pytest.mark.parametrize(
        ("changed", "same"),
        [
            ({}, True),
            ({"kind": "partial-stall"}, True),
            ({"kind": "member-down"}, False),
            ({"subject": "prefill-0>decode-1"}, False),
            ({"onset_at": T - 1.0}, False),
            ({"onset_at": T + 86_401.0}, False),
        ],
    )
    def test_the_same_is_of_one_kind_and_subject_within_a_day(self, changed, same):
        """Another path, another kind, or two days later is another matter."""
        finding = msgspec.structs.replace(repaired().finding, onset_at=T + 60.0)
        found = recurrence_of([repaired()], msgspec.structs.replace(finding, **changed))

        assert found == (repaired().id if same else None)

    def test_what_was_never_proven_cannot_recur(self):
        """An incident without a proof has nothing to come back from."""
        finding = msgspec.structs.replace(repaired().finding, onset_at=T + 60.0)

        assert recurrence_of([repaired(state="failed")], finding) is None
        assert recurrence_of([repaired()], None) is None


class TestReport:
    """The section is written again in place."""

    def said(self, **after):
        """The Markdown, and the subject of the commit."""
        incident = repaired(aftermath=Aftermath(since=T, **after), diagnosis=DIAGNOSIS, id="2025-x")
        rendered = render(incident, Facts(incident.deployment, (), now=T))
        return rendered.markdown, rendered.subject

    def test_held_says_how_long_it_was_watched_and_what_was_served(self):
        """The claim, what it rests on, and the subject of the commit."""
        half = Milestone(after_s=1800.0, watched_s=1740.0, requests=412)
        day = Milestone(after_s=86_400.0, watched_s=86_000.0, requests=9000, restarts=1)
        text, subject = self.said(held=(half, day))

        assert "Held for 30 min" in text
        assert "watched for 29 min 0 s of it, 412 requests served" in text
        assert "restarted once meanwhile, so more than the repair held" in text
        assert subject.endswith("; held for 24 h")

    def test_what_nobody_watched_is_not_claimed(self):
        """Less than half of it watched is not known; without traffic nothing is proven."""
        blind = Milestone(after_s=1800.0, watched_s=600.0, requests=3)
        idle = Milestone(after_s=86_400.0, watched_s=86_400.0, requests=0)
        text, subject = self.said(held=(blind, idle))

        assert "Not known for 30 min" in text
        assert "Nothing came back in 24 h" in text
        assert "nothing was served" in text
        assert "held" not in subject

    def test_a_recurrence_is_the_last_word(self):
        """When, and as which incident."""
        half = Milestone(after_s=1800.0, watched_s=1800.0, requests=9)
        text, subject = self.said(held=(half,), recurred_at=T + 2460.0, recurred_as="2025-y")

        assert "Recurred after 41 min" in text
        assert "2025-y" in text
        assert subject.endswith("; recurred after 41 min")


class TestLoop:
    """The whole loop, over a painted world with shorter milestones."""

    async def test_a_repair_that_holds_and_one_that_does_not(self, site_of, monkeypatch):
        """Repaired, held, silent again: the document says so in the first incident's section."""
        monkeypatch.setattr(aftermath, "HOLDS_S", (20.0, 3000.0))
        monkeypatch.setattr(aftermath, "RESCAN_S", 2.0)
        site = site_of(policy=AUTO)
        await site.watch(until="held")
        site.open()
        faults.silence(site.scene, 8)
        await site.watch(until="recurred")
        site.open()
        await site.watch(turns=20)
        again, first = site.store.incidents()
        document = (site.root / "INCIDENTS.md").read_text()

        assert first.aftermath.recurred_as == again.id
        assert again.recurrence_of == first.id
        assert [one.after_s for one in first.aftermath.held] == [20.0]
        assert document.count("begin -->") == 2
        assert document.count("Recurred after") == 1
        assert f"a recurrence of {first.id}" in document
