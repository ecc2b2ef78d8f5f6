"""Approving a plan: once, unless its repair was cut short."""

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

import night
from tandem.cli.repairing import CUT_SHORT, approved_plan, repair_here
from tandem.errors import RefusedError

PLANNED = msgspec.structs.replace(
    night.INCIDENT, plan=msgspec.structs.replace(night.PLAN, needs_approval=True)
)


def ask(state, *, approve):
    """Ask for the plan of an incident that was acted on and is in this state."""
    incident = msgspec.structs.replace(PLANNED, state=state)
    return approved_plan(incident, approve=approve, show=lambda _: None, now=night.NOW)


class TestApproved:
    """Which plan may run."""

    @pytest.mark.parametrize("state", ["closed", "failed", "advised"])
    def test_a_repair_that_ended_is_not_run_again(self, state):
        """What was done, well or not, is not done twice."""
        with pytest.raises(RefusedError, match="acted on already"):
            ask(state, approve=True)

    @pytest.mark.parametrize("state", CUT_SHORT)
    def test_a_repair_that_was_cut_short_may_go_on(self, state):
        """After Ctrl-C in its middle, the same word lets it go on; again with approval."""
        assert ask(state, approve=True) == PLANNED.plan
        with pytest.raises(RefusedError, match=r"cut short.*--approve"):
            ask(state, approve=False)

    @pytest.mark.parametrize("state", CUT_SHORT)
    async def test_it_goes_on_where_it_stopped(self, monkeypatch, state):
        """It is finished as the next watch would finish it, not begun anew."""
        incident = msgspec.structs.replace(PLANNED, state=state)
        finished = []

        async def finish(parts, given, tell):
            finished.append(given)
            return given

        monkeypatch.setattr("tandem.unfinished.finish", finish)
        store = SimpleNamespace(folder=lambda _: Path("here"))
        sealed = SimpleNamespace(incident=incident, folder=Path("here"))

        await repair_here(SimpleNamespace(store=store), sealed, lambda _: None)

        assert finished == [incident]
