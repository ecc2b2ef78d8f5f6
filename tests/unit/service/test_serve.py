"""A watch with systemd and a scraper around it: the loop is the real one, over a painted world."""

import asyncio
import socket

import aiohttp
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics

import faults
from tandem.errors import RefusedError, WorldError
from tandem.records import WatchSettings
from tandem.service import Notifier, serve
from tandem.service.attendance import standing
from tandem.service.counts import Counts
from tandem.service.serving import metrics_served


class Heard(Notifier):
    """A notifier that keeps what it was given; `deaf` loses it."""

    def __init__(self):
        super().__init__("@unused")
        self.sent = []
        self.deaf = False

    def send(self, *lines):
        if self.deaf:
            return False
        self.sent.append(lines)
        return True


def free_port():
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def served(site, notifier, *, turns):
    """Serve for so many turns."""
    await serve(site.parts, hunch=None, tell=site.told.append, notifier=notifier, turns_max=turns)


class TestSystemd:
    """What is told, turn by turn."""

    async def test_it_is_ready_once_a_turn_has_ended(self, site_of):
        """READY comes with the first turn, WATCHDOG with each, the status when it changes."""
        site, notifier = site_of(faults.serving), Heard()
        await served(site, notifier, turns=3)

        assert notifier.sent == [
            ("WATCHDOG=1", "READY=1", "STATUS=test: watched, nothing found"),
            ("WATCHDOG=1",),
            ("WATCHDOG=1",),
            ("STOPPING=1", "STATUS=test: ending what is under way"),
        ]

    async def test_what_was_not_taken_is_told_again(self, site_of):
        """A manager that was too busy for READY hears it with the next turn."""
        site, notifier = site_of(faults.serving), Heard()
        notifier.deaf = True
        site.store.on_event = None
        site.store.before["append"] = lambda _: setattr(notifier, "deaf", site.turns() < 3)
        count = iter(range(100))
        site.turns = lambda: next(count)
        await served(site, notifier, turns=6)

        assert notifier.sent[0][:2] == ("WATCHDOG=1", "READY=1")
        assert [line for lines in notifier.sent for line in lines].count("READY=1") == 1

    async def test_a_finding_is_the_status(self, site_of):
        """`systemctl status` shows what stands."""
        site, notifier = site_of(), Heard()
        await served(site, notifier, turns=12)
        said = [line for lines in notifier.sent for line in lines if line.startswith("STATUS")]

        assert said[-2] == "STATUS=test: found silent-stall on prefill-0>decode-0"

    async def test_a_look_that_breaks_is_told_and_not_restarted_for(self, site_of):
        """A full disk is not mended by a restart: the turn ended, and the status says blind."""
        site, notifier = site_of(faults.serving), Heard()

        def full(_):
            raise WorldError("The disk is full.", next_step="Free some space.")

        site.store.before["append"] = full
        await served(site, notifier, turns=1)

        assert "WATCHDOG=1" in notifier.sent[0]
        assert any("blind" in line for line in notifier.sent[0])

    async def test_a_turn_that_hangs_tells_nothing(self, site_of):
        """While a turn does not end, no watchdog message is sent."""
        site, notifier = site_of(faults.serving), Heard()
        asked = asyncio.Event()

        async def hanging(*_):
            asked.set()
            await asyncio.Event().wait()

        site.parts.collector.tick = hanging
        running = asyncio.ensure_future(served(site, notifier, turns=5))
        await asyncio.wait_for(asked.wait(), 10)
        for _ in range(100):
            await asyncio.sleep(0)
        before = list(notifier.sent)
        running.cancel()
        await asyncio.wait({running}, timeout=10)

        assert before == []
        assert [lines[0] for lines in notifier.sent] == ["STOPPING=1"]

    def test_many_findings_are_not_all_named(self):
        """The status names three and counts the rest."""
        from stores import FINDING  # noqa: PLC0415
        from tandem.parts import Turn  # noqa: PLC0415

        said = standing(Turn(1, 0.0, 0.1, looked=True, findings=(FINDING,) * 5))

        assert said.startswith("found silent-stall on p>d, ")
        assert said.endswith(" and 2 more")


class TestMetrics:
    """`[watch] metrics_port`."""

    async def scraped(self, site, port, **headers):
        """Watch until the third turn, scrape there; gives status, content type and body."""
        got = []

        async def scrape():
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{port}/metrics", headers=headers) as reply,
            ):
                got.append((reply.status, reply.headers["Content-Type"], await reply.text()))

        real, count = site.clock.sleep, iter(range(100))

        async def sleep(seconds):
            await real(seconds)
            if next(count) == 3:
                await scrape()

        site.clock.sleep = sleep
        await served(site, Heard(), turns=5)
        return got[0]

    async def test_prometheus_gets_what_was_counted(self, site_of):
        """The page shows the turns so far, in the format that was asked for."""
        port = free_port()
        site = site_of(faults.serving, watch=WatchSettings(metrics_port=port))
        status, kind, text = await self.scraped(
            site, port, Accept="application/openmetrics-text;version=1.0.0"
        )
        read = {s.name: s.value for family in openmetrics(text) for s in family.samples}

        assert (status, kind.split(";")[0]) == (200, "application/openmetrics-text")
        assert read["tandem_watch_turns_total"] == 4
        assert read["tandem_watch_observations_total"] > 0
        assert read["tandem_watch_store_bytes"] > 0

    async def test_a_browser_gets_the_plain_format(self, site_of):
        """Without a wish it is the format that everything reads."""
        port = free_port()
        site = site_of(faults.serving, watch=WatchSettings(metrics_port=port))
        _, kind, text = await self.scraped(site, port)

        assert kind == "text/plain; version=0.0.4; charset=utf-8"
        assert "tandem_watch_turns_total 4\n" in text

    async def test_a_taken_port_is_an_error_at_the_start(self, site_of):
        """Who holds it is named, and nothing was watched."""
        with socket.create_server(("127.0.0.1", 0)) as holder:
            port = holder.getsockname()[1]
            site = site_of(faults.serving, watch=WatchSettings(metrics_port=port))
            with pytest.raises(WorldError, match=rf"127\.0\.0\.1:{port}: held by pid \d+"):
                await served(site, Heard(), turns=1)

        assert site.told == []

    async def test_a_second_watch_is_refused_before_its_port(self, site_of):
        """What is in the way is the other watch, not its port."""
        with socket.create_server(("127.0.0.1", 0)) as holder:
            port = holder.getsockname()[1]
            site = site_of(faults.serving, watch=WatchSettings(metrics_port=port))
            with site.store.lock("watch"), pytest.raises(RefusedError, match="already under way"):
                await served(site, Heard(), turns=1)

    async def test_a_client_that_says_nothing_is_let_go(self, site_of, monkeypatch):
        """Half a request holds a connection for a while, not for ever."""
        monkeypatch.setattr("tandem.service.serving.IDLE_S", 0.05)
        port = free_port()
        site = site_of(faults.serving, watch=WatchSettings(metrics_port=port))
        async with metrics_served(site.parts, Counts("x", 0.0), port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /met")
            async with asyncio.timeout(10):
                ended = await reader.read()
            writer.close()

        assert b"200 OK" not in ended

    async def test_off_by_default(self, site_of, monkeypatch):
        """Without a port nothing listens."""
        site = site_of(faults.serving)
        monkeypatch.setattr("aiohttp.web.AppRunner.setup", None)
        await served(site, Heard(), turns=1)

        assert site.parts.settings.watch.metrics_port == 0
