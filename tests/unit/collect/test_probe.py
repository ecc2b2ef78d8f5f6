"""Path probes follow their rules: one out at a time, left open when late, off where unsafe."""

import asyncio
import dataclasses
import functools

import pytest

from probing import DONE, Clock, safe
from tandem.collect.incarnations import Incarnations
from tandem.collect.probe import Knows, ProbeSource, left_open
from tandem.collect.words import fresh_text
from tandem.facts import Facts
from tandem.ports import Completion
from tandem.records import Deployment, Incarnation, Member, Observation, ProbeSettings, Role
from tandem.records import vocabulary as v

CELL = "prefill-0>decode-0"
COSTS = (v.PROBES_SENT_TOTAL, v.PROBE_TOKENS_TOTAL)


class Path:
    """A path whose answers the test gives: `answer` sets what every request on its way gets."""

    def __init__(self):
        self.sent = []
        self.given_up = 0
        self.end = asyncio.Event()
        self.completion = DONE

    async def send(self, prompt):
        self.sent.append(prompt)
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        return self.completion


class Bench:
    """One probe source on a path, with everything around it in hand."""

    def __init__(self, **options):
        self.clock, self.path, self.lives = Clock(), Path(), Incarnations()
        self.live("prefill-0", "p1")
        self.live("decode-0", "d1")
        settings = options.pop("settings", ProbeSettings(deadline_s=5.0))
        about = (
            "safety",
            "recently_completed",
            "released",
            "page_tokens",
            "context_tokens",
            "left",
        )
        about += ("tokens_per_s",)
        told = {name: options.pop(name) for name in about if name in options}
        self.source = ProbeSource(
            CELL,
            ("prefill-0", "decode-0"),
            self.path.send,
            settings,
            self.clock,
            self.lives,
            knows=Knows(**{"safety": safe(), **told}),
            **options,
        )

    def live(self, member, life):
        self.lives.saw(member, Incarnation(id=life, started_at=1.0))

    async def look(self):
        """What one look says, by name; the probe's own word under `probe`, costs left out."""
        harvest = await self.source.collect()
        return {
            seen.name: seen.value
            for seen in harvest.observations
            if not seen.label and seen.subject == CELL and seen.name not in COSTS
        }

    async def long_look(self):
        """What one look says of a long probe."""
        harvest = await self.source.collect()
        return {seen.name: seen.value for seen in harvest.observations if seen.label == v.LONG}


@pytest.fixture
async def bench():
    made = Bench()
    yield made
    await made.source.close()


class TestOneProbe:
    """A probe from its start to its end."""

    async def test_a_probe_that_ends_in_time_is_completed(self, bench):
        """Its latency, its tokens and whether KV moved are told."""
        bench.path.end.set()
        said = await bench.look()

        assert said == {
            v.PROBE: "completed",
            v.PROBE_LATENCY_S: 0.1,
            v.PROBE_TOKENS: 26,
            v.PROBE_KV_MOVED: True,
        }

    async def test_a_late_probe_stays_open_and_its_path_is_not_probed_again(self, bench):
        """After the deadline it is late once, then stuck; one request was sent, none given up."""
        words = [(await bench.look())[v.PROBE] for _ in range(4)]

        assert words == ["late", "stuck", "stuck", "stuck"]
        assert (len(bench.path.sent), bench.path.given_up) == (1, 0)

    async def test_a_late_probe_that_ends_frees_its_path(self, bench):
        """Its end is told with its own latency, and the path is probed again at once."""
        await bench.look()
        bench.path.end.set()
        for _ in range(5):
            await asyncio.sleep(0)
        said = await bench.look()

        assert said[v.PROBE] == "completed"
        assert len(bench.path.sent) == 2

    async def test_a_new_life_of_an_end_frees_the_path(self, bench):
        """The stuck request is given up when the decode was restarted, and a new one is sent."""
        await bench.look()
        bench.live("decode-0", "d2")
        said = await bench.look()

        assert (len(bench.path.sent), bench.path.given_up, said[v.PROBE]) == (2, 1, "late")

    async def test_an_end_that_is_gone_does_not_free_the_path(self, bench):
        """A member that died takes the probe's connection with it; nothing is sent meanwhile."""
        await bench.look()
        bench.lives.saw("decode-0", None)
        said = await bench.look()

        assert (len(bench.path.sent), said[v.PROBE]) == (1, "stuck")

    async def test_a_life_learned_after_sending_is_no_restart(self):
        """The first look of a watch does not know the lives yet; learning them frees nothing."""
        bench = Bench()
        bench.lives.saw("decode-0", None)
        await bench.look()
        bench.live("decode-0", "d1")
        learned = (await bench.look())[v.PROBE]
        bench.live("decode-0", "d2")
        await bench.look()
        await bench.source.close()

        assert (learned, len(bench.path.sent)) == ("stuck", 2)

    async def test_a_failed_probe_says_why(self, bench):
        """The reason is told beside the word."""
        bench.path.completion = Completion(status="failed", detail="decode: connection refused")
        bench.path.end.set()
        said = await bench.look()

        assert said == {v.PROBE: "failed", v.PROBE_DETAIL: "decode: connection refused"}

    async def test_closing_gives_up_what_is_out(self, bench):
        """Shutting down leaves no request behind."""
        await bench.look()
        await bench.source.close()

        assert bench.path.given_up == 1


class TestSizes:
    """How much is sent."""

    @pytest.mark.parametrize(("page", "words"), [(None, 24), (1, 24), (64, 72)])
    async def test_a_probe_is_longer_than_one_page(self, page, words):
        """The larger page of the two engines is passed, or nothing would have to move."""
        bench = Bench(page_tokens={"prefill-0": 1, "decode-0": page}.get)
        bench.path.end.set()
        await bench.look()

        assert len(bench.path.sent[0].split()) == words

    @pytest.mark.parametrize(("context", "words"), [(None, 256), (4096, 256), (400, 200)])
    async def test_after_a_restart_one_short_and_one_long_probe_are_owed(self, context, words):
        """Both are sent soon, whatever traffic flows; then probes are short again."""
        bench = Bench(
            context_tokens=lambda _: context, recently_completed=lambda _: bool(bench.path.sent[2:])
        )
        bench.path.end.set()
        await bench.look()
        bench.live("decode-0", "d2")
        said = await bench.look()
        soon = bench.source.interval_s
        long = await bench.long_look()
        idle = await bench.look()

        assert [len(text.split()) for text in bench.path.sent] == [24, 24, words]
        assert (said[v.PROBE], soon, long[v.PROBE]) == ("completed", 1.0, "completed")
        assert idle == {}

    async def test_a_long_probe_counts_tokens_and_not_words(self, bench):
        """Where a word is many tokens, as the short probe's answer told, fewer words are sent."""
        bench.path.completion = dataclasses.replace(DONE, prompt_tokens=24 * 5)
        bench.path.end.set()
        await bench.look()
        bench.live("decode-0", "d2")
        await bench.look()
        await bench.long_look()

        assert len(bench.path.sent[-1].split()) == 256 // 5

    async def test_a_late_long_probe_is_an_overdue_path(self, bench):
        """It has three deadlines; then the path's own word is late as well, and it stays alone."""
        bench.path.end.set()
        await bench.look()
        bench.live("decode-0", "d2")
        await bench.look()
        bench.path.end.clear()
        sent_at = bench.clock.now()
        harvest = await bench.source.collect()
        words = {(one.label, one.value) for one in harvest.observations if one.name == v.PROBE}
        waited_s = bench.clock.now() - sent_at
        later = await bench.look()

        assert words == {("", "late"), (v.LONG, "late")}
        assert (waited_s, later[v.PROBE], len(bench.path.sent)) == (15.0, "stuck", 3)

    async def test_a_size_that_is_refused_says_nothing_of_the_path(self, bench):
        """A context too short for the long probe is told of that probe alone, and not retried."""
        bench.path.end.set()
        await bench.look()
        bench.live("decode-0", "d2")
        await bench.look()
        bench.path.completion = Completion(status="failed", detail="too long", refused=True)
        said = await bench.source.collect()
        bench.path.completion = DONE
        after = await bench.look()

        about = {(one.name, one.label) for one in said.observations if one.name not in COSTS}
        assert about == {(v.PROBE, v.LONG), (v.PROBE_DETAIL, v.LONG)}
        assert (after[v.PROBE], len(bench.path.sent[-1].split())) == ("completed", 24)

    async def test_a_routed_probe_is_never_long(self):
        """Nobody can tell whether it would take the cell that was restarted."""
        bench = Bench(engines=("decode-0",))
        bench.path.end.set()
        await bench.look()
        bench.live("decode-0", "d2")
        await bench.look()
        await bench.look()

        assert {len(text.split()) for text in bench.path.sent} == {24}


class TestProof:
    """What counts as proof, and what it costs."""

    async def test_an_answer_without_kv_seen_to_move_is_unproven(self, bench):
        """Two good replies prove no hand-off where the transfer counter stood still."""
        bench.path.completion = dataclasses.replace(DONE, kv_moved=False)
        bench.path.end.set()
        said = await bench.look()

        assert (said[v.PROBE], said[v.PROBE_KV_MOVED]) == ("unproven", False)
        assert "no KV was seen to move" in said[v.PROBE_DETAIL]

    async def test_probes_and_their_tokens_are_counted(self, bench):
        """What was computed counts where it is known, else what was asked for."""
        bench.path.end.set()
        await bench.source.collect()
        bench.path.completion = Completion(status="failed", detail="no")
        harvest = await bench.source.collect()
        costs = {one.name: one.value for one in harvest.observations if one.name in COSTS}

        assert costs == {v.PROBES_SENT_TOTAL: 2, v.PROBE_TOKENS_TOTAL: 26 + 26}


class TestOneStuckProbe:
    """At most one stuck probe per path and life."""

    async def lost(self, **options):
        """A bench whose probe was late, and then ended without an answer."""
        bench = Bench(**options)
        await bench.look()
        bench.path.completion = Completion(status="failed", detail="decode: HTTP 500")
        bench.path.end.set()
        for _ in range(5):
            await asyncio.sleep(0)
        return bench, await bench.source.collect()

    async def test_a_path_whose_room_may_be_held_is_not_probed_again(self):
        """A late probe that failed left its room behind, as far as anybody has seen."""
        bench, ended = await self.lost()
        said = await bench.look()

        assert "failed" in [one.value for one in ended.observations if one.name == v.PROBE]
        assert (said[v.PROBE], len(bench.path.sent)) == ("stuck", 1)
        assert said[v.PROBE_DETAIL] == (
            "it ended after 5 s without an answer (decode: HTTP 500), and its room was not seen "
            "released"
        )

    async def test_once_its_queues_were_seen_empty_it_is_probed_again(self):
        """A hand-off queue that was empty since then holds no room of ours."""
        empty_at = [0.0]
        bench, _ = await self.lost(
            released=lambda members, since: (
                members == ("prefill-0", "decode-0") and empty_at[0] >= since
            )
        )
        held = (await bench.look())[v.PROBE]
        empty_at[0] = bench.clock.now()
        bench.path.completion = DONE

        assert (held, (await bench.look())[v.PROBE]) == ("stuck", "completed")

    @pytest.mark.parametrize(
        ("word", "life", "sent"),
        [("stuck", "d1", 0), ("late", "d1", 0), ("completed", "d1", 1), ("stuck", "d0", 1)],
    )
    async def test_what_a_watch_before_left_open_is_held_as_well(self, word, life, sent):
        """A new Tandem sends nothing on a path whose probe was overdue in these very lives."""
        members = tuple(
            Member(name=name, role=role, url="", engine="sglang")
            for name, role in (("prefill-0", Role.PREFILL), ("decode-0", Role.DECODE))
        )
        rows = [
            Observation(source="probe", subject=CELL, name=v.PROBE, at=90.0, value=word),
            *(
                Observation(
                    source="process", subject=name, name=v.STARTED_AT, at=90.0, value=1.0,
                    incarnation=one,
                )
                for name, one in (("prefill-0", "p1"), ("decode-0", life))
            ),
        ]  # fmt: skip
        known = Facts(Deployment(name="x", members=members), rows, now=100.0)
        bench = Bench(left=functools.partial(left_open, known))
        bench.path.end.set()
        said = await bench.look()

        assert (len(bench.path.sent), said[v.PROBE]) == (sent, "completed" if sent else "stuck")

    async def test_a_new_life_holds_no_old_room(self):
        """After a restart the path is probed at once."""
        bench, _ = await self.lost()
        bench.live("prefill-0", "p2")
        bench.path.completion = DONE

        assert (await bench.look())[v.PROBE] == "completed"


class TestPaused:
    """A Tandem that did not run itself."""

    async def test_time_in_which_tandem_was_stopped_makes_no_probe_late(self, bench):
        """An answer that came meanwhile is read first; only then does the deadline go on."""
        paused = [40.0]
        slept = bench.clock.sleep

        async def sleep(seconds):
            await slept(seconds + (paused.pop() if paused else 0.0))
            if bench.clock.now() > 142.0:
                bench.path.end.set()

        bench.clock.sleep = sleep
        said = await bench.look()

        assert said[v.PROBE] == "completed"
        assert bench.clock.now() < 146.0

    async def test_a_look_that_was_cut_short_goes_on_waiting(self, bench):
        """The collector may give a look up; its probe is late when its own time is over."""
        look = asyncio.create_task(bench.look())
        await asyncio.sleep(0)
        look.cancel()
        await asyncio.gather(look, return_exceptions=True)
        said = await bench.look()

        assert (said[v.PROBE], bench.clock.now(), len(bench.path.sent)) == ("late", 105.0, 1)


class TestHeldBack:
    """Where no probe is sent."""

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"settings": ProbeSettings(active=False)}, "active = false"),
            ({"safety": safe(value=False, because="PR #30352")}, "PR #30352"),
            ({"safety": safe(value=None, because="nobody knows")}, "nobody knows"),
        ],
    )
    async def test_off_says_why(self, options, said):
        """Switched off, unsafe, or of unknown safety: off, and nothing is sent."""
        bench = Bench(**options)
        found = await bench.look()

        assert found[v.PROBE] == "off"
        assert said in found[v.PROBE_DETAIL]
        assert bench.path.sent == []

    async def test_nothing_known_yet_hides_nothing(self):
        """Before the adapters told, a probe sees nothing and says why: no word that judges."""
        bench = Bench(safety=lambda _: None)
        (seen,) = (await bench.source.collect()).observations

        assert (seen.value, seen.missing) == (None, "nothing is known of prefill-0 yet")
        assert bench.path.sent == []

    async def test_it_asks_again_soon_while_nothing_is_known(self):
        """Until the adapters told, a probe is tried each second; then at its own interval."""
        told = {}
        bench = Bench(safety=told.get)
        await bench.look()
        before = bench.source.interval_s
        told.update({name: safe()(name) for name in ("prefill-0", "decode-0")})
        bench.path.end.set()
        await bench.look()

        assert (before, bench.source.interval_s) == (1.0, 5.0)

    async def test_real_traffic_stands_in_for_a_probe(self):
        """Where traffic just completed nothing is sent or said, and it is looked at again soon."""
        bench = Bench(recently_completed=lambda subject: subject == CELL)

        assert (await bench.look(), bench.path.sent) == ({}, [])
        assert bench.source.interval_s == 1.0


def test_probe_texts_are_fresh_and_of_the_wanted_length():
    """Two texts of 24 words differ."""
    one, two = fresh_text(24), fresh_text(24)

    assert (len(one.split()), one != two) == (24, True)


class TestUnderLoad:
    """Probes of a path that works hard."""

    async def test_a_loaded_path_is_probed_from_its_own_share(self):
        """At 1,000 tokens a second 26 tokens are worth a probe every 65 s; still, at once."""
        rate = [1000.0]
        bench = Bench(tokens_per_s=lambda _: rate[0])
        bench.path.end.set()
        sent = []
        for _ in range(3):
            await bench.look()
            sent.append(len(bench.path.sent))
            bench.clock.at += 40.0
        rate[0] = 0.0
        bench.clock.at -= 39.0
        await bench.look()
        await bench.source.close()

        assert (sent, len(bench.path.sent)) == ([1, 1, 2], 3)
