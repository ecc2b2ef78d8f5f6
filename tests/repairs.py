"""Running a plan in a world in memory: what the tests of repair share.

For: `unit/test_repair*.py`. Not for: the world itself (`fakes.py`).
"""

from fakes import Listener, ListJournal
from tandem.plan.steps import restart_steps
from tandem.records import Plan, Policy
from tandem.repair import repair

POLICY = Policy()


def co_restart(world):
    """The plan that restarts the first pair, with the router when there is one pair only."""
    deployed = world.deployment
    members = [deployed.member("prefill-0"), deployed.member("decode-0")]
    if len(deployed.cells()) == 1:
        members += [member for member in deployed.members if member.role == "router"]
    return Plan(
        scope="pair",
        steps=restart_steps(deployed, members, ["prefill-0>decode-0"], POLICY),
        refused=(),
        kept=(),
        costs=(),
        because="test",
    )


async def run(plan, world, *, journal=None, tell=None):
    """Execute a plan in a world; a journal with something in it is resumed."""
    journal = journal if journal is not None else ListJournal()
    return await repair(
        plan,
        world.hands(),
        journal,
        world.clock,
        tell=tell if tell is not None else Listener(),
        settings=world.settings(policy=POLICY),
        resume=bool(journal.kept),
    )


def statuses(outcomes):
    """What became of each step."""
    return {outcome.step: outcome.status for outcome in outcomes}


def acts(world):
    """Starts and stops in the order they happened."""
    return [line for line in world.history if line.startswith(("start", "stop"))]
