"""A member that systemd or a container engine runs lives as its main process does."""

import os

import pytest

from tandem.collect.incarnations import Incarnations
from tandem.collect.process import ProcessSource
from tandem.errors import WorldError
from tandem.processes import life_of
from tandem.records import Member, Role
from tandem.records import vocabulary as v


def member(**more):
    """A member at whose port nobody listens."""
    return Member(name="d", role=Role.DECODE, url="http://127.0.0.1:1", engine="sglang", **more)


def says(answer, asked=None):
    async def main_pid(of):
        if asked is not None:
            asked.append(of.name)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return main_pid


async def alive(of, main_pid):
    source = ProcessSource(of, None, Incarnations(), main_pid=main_pid)
    seen = {one.name: one for one in (await source.collect()).observations}
    return seen[v.ALIVE]


@pytest.mark.parametrize("how", [{"unit": "d.service"}, {"container": "d"}])
async def test_it_lives_before_it_listens(how):
    """A model may load for minutes; the service that does so is not down."""
    seen = await alive(member(**how), says(os.getpid()))

    assert (seen.value, seen.incarnation) == (True, life_of(os.getpid()).id)


async def test_it_is_asked_for_once_a_life():
    """While the life lasts nobody is asked again."""
    asked = []
    source = ProcessSource(
        member(unit="d.service"), None, Incarnations(), main_pid=says(os.getpid(), asked)
    )
    await source.collect()
    await source.collect()

    assert asked == ["d"]


@pytest.mark.parametrize("answer", [None, 2**30, WorldError("No bus.", next_step="Start it.")])
async def test_without_such_a_process_whoever_listens_counts(answer):
    """Here nobody does: the member is not alive."""
    seen = await alive(member(unit="d.service"), says(answer))

    assert seen.value is False


async def test_of_a_member_that_nobody_named_nobody_is_asked():
    """A unit that was only found is not its supervisor's word."""
    asked = []
    await alive(member(), says(os.getpid(), asked))

    assert asked == []
