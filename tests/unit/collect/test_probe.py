"""Path probes follow their rules: one out at a time, left open when late, off where unsafe."""

import asyncio

import pytest

from tandem.collect.incarnations import Incarnations
from tandem.collect.probe import ProbeSource, probes
from tandem.collect.words import fresh_text
from tandem.ports import Completion
from tandem.records import Deployment, Incarnation, Member, ProbeSettings, Role, Trait
from tandem.records import vocabulary as v

CELL = "prefill-0>decode-0"
DONE = Completion(
    status="completed", token_ids=(1, 2), latency_s=0.1, kv_moved=True, prompt_tokens=24
)


class Clock:
    """Time that moves by sleeping; a sleeper goes on at once unless `held`."""

    def __init__(self):
        self.at = 100.0

    def now(self):
        return self.at

    async def sleep(self, seconds):
        # Whatever is ready runs before the time is over.
        for _ in range(10):
            await asyncio.sleep(0)
        self.at += seconds


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


def safe(value=True, because=""):
    def safety(member):
        return Trait(
            subject=member, name=v.T_ACTIVE_PROBE_SAFE, at=0.0, value=value, because=because
        )

    return safety


class Bench:
    """One probe source on a path, with everything around it in hand."""

    def __init__(self, **options):
        self.clock, self.path, self.lives = Clock(), Path(), Incarnations()
        self.live("prefill-0", "p1")
        self.live("decode-0", "d1")
        settings = options.pop("settings", ProbeSettings(deadline_s=5.0))
        options.setdefault("safety", safe())
        self.source = ProbeSource(
            CELL,
            ("prefill-0", "decode-0"),
            self.path.send,
            settings,
            self.clock,
            self.lives,
            **options,
        )

    def live(self, member, life):
        self.lives.saw(member, Incarnation(id=life, started_at=1.0))

    async def look(self):
        """What one look says, by name; the probe's own word under `probe`."""
        harvest = await self.source.collect()
        return {seen.name: seen.value for seen in harvest.observations}


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


class TestMatrix:
    """The sources of a deployment."""

    async def test_every_cell_directly_and_the_router_once(self):
        """Two prefills and one decode behind a router give two direct probes and a routed one."""
        members = (
            Member(name="p0", role=Role.PREFILL, url="http://127.0.0.1:1", engine="sglang"),
            Member(name="p1", role=Role.PREFILL, url="http://127.0.0.1:2", engine="sglang"),
            Member(name="d0", role=Role.DECODE, url="http://127.0.0.1:3", engine="sglang"),
            Member(name="r", role=Role.ROUTER, url="http://127.0.0.1:4", engine="smg"),
        )
        calls = []

        class Spoken:
            async def complete_direct(self, prefill, decode, **_):
                calls.append((prefill.name, decode.name))
                return DONE

            async def complete(self, member, *, chat, **_):
                calls.append((member.name, chat))
                return DONE

        spoken = Spoken()
        sources = probes(
            Deployment(name="x", members=members),
            {"sglang": spoken},
            {"smg": spoken},
            ProbeSettings(),
            Clock(),
            Incarnations(),
            safety=safe(),
        )
        for source in sources:
            await source.collect()

        assert [source.name for source in sources] == ["probe:p0>d0", "probe:p1>d0", "probe:r"]
        assert calls == [("p0", "d0"), ("p1", "d0"), ("r", False)]


def test_probe_texts_are_fresh_and_of_the_wanted_length():
    """Two texts of 24 words differ."""
    one, two = fresh_text(24), fresh_text(24)

    assert (len(one.split()), one != two) == (24, True)
