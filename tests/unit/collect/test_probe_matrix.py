"""The sources of a deployment: every path of its matrix, and how often each is probed."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probing import DONE, Clock, safe
from tandem.collect.incarnations import Incarnations
from tandem.collect.probe import probes
from tandem.records import Deployment, Member, ProbeSettings, Role
from tandem.records import vocabulary as v
from tandem.records.deployment import PATHS_MAX


def rows(harvest):
    """The word of each subject."""
    return {one.subject: one.value for one in harvest.observations if one.name == v.PROBE}


class TestMatrix:
    """The sources of a deployment."""

    async def test_pairs_of_ranks_are_paths_and_their_cell_has_one_word(self):
        """Each pair is probed for itself; a stuck one is the word of the whole cell."""
        prefill = Member(name="p0", role=Role.PREFILL, url="http://a", engine="sglang", dp_size=2)
        decode = Member(name="d0", role=Role.DECODE, url="http://b", engine="sglang", dp_size=3)
        asked = []

        class Ranked:
            async def complete_direct(self, prefill, decode, *, ranks, **_):
                asked.append(ranks)
                if ranks == (1, 2):
                    await asyncio.Event().wait()
                return DONE

        sources = probes(
            Deployment(name="x", members=(prefill, decode)),
            {"sglang": Ranked()},
            {},
            ProbeSettings(),
            Clock(),
            Incarnations(),
            safety=safe(),
        )
        last, *others = reversed(sources)
        first = rows(await others[-1].collect())
        await last.collect()
        after = rows(await others[-1].collect())
        await last.close()

        assert (len(sources), others[-1].name, last.name) == (
            6,
            "probe:p0/dp0>d0/dp0",
            "probe:p0/dp1>d0/dp2",
        )
        assert others[-1].interval_s == 5.0
        assert asked == [(0, 0), (1, 2), (0, 0)]
        assert (first["p0>d0"], after["p0/dp0>d0/dp0"], after["p0>d0"]) == (
            "completed",
            "completed",
            "late",
        )

    @pytest.mark.parametrize(
        ("prefills", "decodes", "every_s"), [(4, 4, 5.0), (10, 10, 15.0), (40, 100, 200.0)]
    )
    async def test_a_large_matrix_is_probed_more_rarely_and_not_at_once(
        self, prefills, decodes, every_s
    ):
        """Each path once in its turn, spread over the round: never more than a bounded rate."""
        names = [(f"p{number}", Role.PREFILL) for number in range(prefills)]
        names += [(f"d{number}", Role.DECODE) for number in range(decodes)]
        members = tuple(
            Member(name=name, role=role, url="", engine="sglang") for name, role in names
        )
        sent = []

        class Counted:
            async def complete_direct(self, prefill, decode, **_):
                sent.append(round(clock.at - began))
                return DONE

        clock = Clock()
        began = clock.at
        sources = probes(
            Deployment(name="x", members=members),
            {"sglang": Counted()},
            {},
            ProbeSettings(),
            clock,
            Incarnations(),
            safety=safe(),
        )
        due = dict.fromkeys(sources, began)
        for second in range(int(every_s) + 1):
            for source in [one for one, at in due.items() if at <= began + second]:
                clock.at = began + second
                due[source] = clock.at + source.interval_s
                await source.collect()
        per_second = max(sent.count(second) for second in set(sent))

        assert {source.interval_s for source in sources} == {every_s}
        # Before anything is known a source is looked at once more, soon.
        assert len(sources) <= len(sent) <= len(sources) + 42
        assert per_second <= max(16, 2 + len(sources) / every_s + 20)

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


@given(st.integers(1, 70), st.integers(1, 70))
def test_every_rank_is_on_a_path_and_paths_are_bounded(prefills, decodes):
    """Every rank of both sides is probed, all pairs where these are not too many."""
    members = (
        Member(name="p", role=Role.PREFILL, url="", engine="sglang", dp_size=prefills),
        Member(name="d", role=Role.DECODE, url="", engine="sglang", dp_size=decodes),
    )
    paths = Deployment(name="x", members=members).paths()

    assert len({one.subject for one in paths}) == len(paths) <= PATHS_MAX
    assert {one.prefill_dp or 0 for one in paths} == set(range(prefills))
    assert {one.decode_dp or 0 for one in paths} == set(range(decodes))
