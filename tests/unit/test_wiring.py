"""What is built from a configuration where metrics come from Prometheus."""

import pytest

from fakes import deployment
from tandem import wiring
from tandem.collect.live import LiveSource
from tandem.collect.prometheus import PrometheusSource
from tandem.records import Settings, WatchSettings
from tandem.wiring import open_parts


def settings_of(root, *, decodes=1, **watch):
    """Settings of a pair with a router, and so many decodes."""
    return Settings(
        root=str(root),
        deployment=deployment(decodes=decodes, supervisor="none"),
        watch=WatchSettings(**watch),
    )


async def sources(settings):
    """Give every source that watching these would run."""
    async with open_parts(settings) as parts:
        return [runner.source for runner in parts.collector._runners]


class TestPrometheus:
    """`[watch] prometheus`."""

    async def test_no_page_is_scraped_then(self, tmp_path):
        """One source has the metrics of all; the members are asked for what it cannot have."""
        found = await sources(settings_of(tmp_path, prometheus="http://127.0.0.1:9"))
        names = [one.name for one in found]

        assert [one.name for one in found if isinstance(one, PrometheusSource)] == ["prometheus"]
        assert [one.name for one in found if isinstance(one, LiveSource)] == [
            *("live:prefill-0", "live:decode-0", "live:router")
        ]
        assert [one for one in names if one.startswith(("engine:", "router:"))] == []
        assert {"health:prefill-0", "health:decode-0"} <= set(names)

    async def test_without_it_each_member_is_scraped(self, tmp_path):
        """As ever."""
        names = [one.name for one in await sources(settings_of(tmp_path))]

        assert {"engine:prefill-0", "engine:decode-0", "router:router"} <= set(names)
        assert "prometheus" not in names

    async def test_many_members_are_asked_less_often_each(self, tmp_path, monkeypatch):
        """All looks at members together keep to a rate, however many there are."""
        monkeypatch.setattr(wiring, "DIRECT_PER_S", 2.0)
        found = await sources(settings_of(tmp_path, decodes=6, prometheus="http://127.0.0.1:9"))
        live = [one.interval_s for one in found if isinstance(one, LiveSource)]
        health = [one.interval_s for one in found if one.name.startswith("health:")]

        assert (set(live), set(health)) == ({4.0}, {4.0})

    @pytest.mark.parametrize("how", ["file", "variable", "none"])
    def test_the_token_is_read_anew_each_time(self, tmp_path, monkeypatch, how):
        """A file that is replaced, or a variable; nothing where none is given."""
        (tmp_path / "token").write_text("first\n")
        monkeypatch.setenv("PROM_TOKEN", "first")
        given = {
            "file": {"prometheus_token_file": str(tmp_path / "token")},
            "variable": {"prometheus_token_variable": "PROM_TOKEN"},
            "none": {},
        }[how]
        read = wiring._token(settings_of(tmp_path, prometheus="http://127.0.0.1:9", **given))
        first = read()
        (tmp_path / "token").write_text("second\n")
        monkeypatch.setenv("PROM_TOKEN", "second")

        assert [first, read()] == (["", ""] if how == "none" else ["first", "second"])
