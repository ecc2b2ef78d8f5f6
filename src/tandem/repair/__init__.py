"""Repair: do a plan's steps against the world, journaled, never half done and never twice.

For: executing plans (repairs, `up`, `down`) and resuming one that a crash cut short: every step
observes the world first, so what is done already is checked and not repeated.
Not for: choosing or approving steps, and not for keeping two repairs apart (the store's lock).
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tandem.errors import Bug, TandemError, WorldError
from tandem.ports import Clock, Hands, Journal, Progress, say
from tandem.records import Incarnation, Intent, Member, Outcome, Plan, Record, Settings, Step
from tandem.repair.gates import Gates
from tandem.repair.log_tail import end_of
from tandem.repair.waiting import to_its_end

__all__ = ["Hands", "repair", "succeeded"]

START_BOUND_S = 30.0
"""A supervisor's `start` returns at once; this only catches one that does not."""
STOP_MARGIN_S = 15.0
"""What `stop` may take beyond its grace."""
LOOK_BOUND_S = 10.0


async def repair(
    plan: Plan,
    hands: Hands,
    journal: Journal,
    clock: Clock,
    *,
    tell: Progress,
    settings: Settings,
    resume: bool = False,
) -> tuple[Outcome, ...]:
    """Do the plan's steps in order; returns one `Outcome` per step that was reached.

    Stops at the first failure of a step whose `on_failure` is `stop`. The plan is journaled first,
    then an `Intent` before each act and an `Outcome` after each step. With `resume` the journal's
    records since its last plan tell what an interrupted run of this plan had begun. When cancelled,
    the current step finishes or is undone, its outcome `interrupted` is journaled, and the
    cancellation goes on. Raises `RefusedError` before anything is touched when a member has no
    supervisor here, `WorldError` when a supervisor cannot say what runs.
    """
    for step in plan.steps:
        if step.verb in ("stop", "start", "expect-gone"):
            hands.supervisor(_member(hands, step.target))
    run = _Run(plan, hands, journal, clock, tell, settings)
    await run.look_around(_since_last_plan(journal.records()) if resume else ())
    if not run.intended:
        journal.append(plan)
    outcomes: list[Outcome] = []
    for step in plan.steps:
        outcome = await run.take(step)
        outcomes.append(outcome)
        if outcome.status == "failed" and step.on_failure == "stop":
            await say(tell, f"Stopped at {step.id}: {outcome.detail}.")
            break
    return tuple(outcomes)


def succeeded(plan: Plan, outcomes: Sequence[Outcome]) -> bool:
    """Whether every step that matters was reached and did not fail."""
    ended = {outcome.step: outcome.status for outcome in outcomes}
    return all(
        ended.get(step.id) in ("done", "already") or step.on_failure == "continue"
        for step in plan.steps
    )


def _since_last_plan(records: Sequence[Record]) -> Sequence[Record]:
    plans = [place for place, record in enumerate(records) if isinstance(record, Plan)]
    return records[plans[-1] :] if plans else records


def _member(hands: Hands, name: str) -> Member:
    member = hands.deployment.member(name)
    if member is None:
        raise Bug(f"A plan names {name}, which is no member of {hands.deployment.name}.")
    return member


@dataclass(frozen=True, slots=True)
class _End:
    """How a step ended, before it is written down."""

    status: Literal["done", "already", "failed"]
    detail: str
    incarnation: str | None = None


@dataclass(slots=True)
class _Run:
    """One run over one plan: what was there when the repair began, and what is ours since."""

    plan: Plan
    hands: Hands
    journal: Journal
    clock: Clock
    tell: Progress
    settings: Settings
    gates: Gates = field(init=False)
    baseline: dict[str, str | None] = field(default_factory=dict)
    """The lives when the repair began, in an earlier run perhaps."""
    intended: set[str] = field(default_factory=set)
    """Steps whose intent an earlier run journaled."""
    ours: dict[str, str] = field(default_factory=dict)
    """Lives that this repair began and that stand in the right order."""
    undone: str = ""

    def __post_init__(self) -> None:
        self.gates = Gates(self.hands, self.clock, self.tell)

    async def look_around(self, journaled: Sequence[Record]) -> None:
        """Learn the lives of the beginning, from the journal where there is one."""
        intents = [record for record in journaled if isinstance(record, Intent)]
        self.intended = {intent.step for intent in intents}
        self.baseline = dict(intents[0].incarnations) if intents else {}
        for name in self._targets("stop") | self._targets("start"):
            if name not in self.baseline:
                life = await self._life(name)
                self.baseline[name] = life.id if life else None
        await self._recognise_own_lives()

    def _targets(self, verb: str) -> set[str]:
        return {step.target for step in self.plan.steps if step.verb == verb}

    async def _life(self, name: str) -> Incarnation | None:
        member = _member(self.hands, name)
        try:
            async with asyncio.timeout(LOOK_BOUND_S):
                return await self.hands.supervisor(member).inspect(member)
        except TimeoutError as late:
            raise WorldError(
                f"The supervisor of {name} did not say within {LOOK_BOUND_S:.0f} s whether it runs",
                next_step="See what holds it, then run `tandem repair --approve`: it goes on.",
            ) from late

    async def _recognise_own_lives(self) -> None:
        """Find the lives an earlier run began, as long as no role before them began later.

        A decode that is older than its prefill's present life has met another prefill: the order
        no longer holds for it, so it is not recognised and will be stopped and started again.
        """
        latest_before: dict[str, float] = {}  # role to the newest start among its lives
        order: list[str] = []
        for step in self.plan.steps:
            if step.verb != "start" or step.id not in self.intended:
                continue
            member = _member(self.hands, step.target)
            life = await self._life(step.target)
            earlier = [role for role in order if role != member.role]
            missing = self._roles_before(step) - set(earlier)
            fits = life is not None and all(
                latest_before[role] <= life.started_at for role in earlier
            )
            if life is None or missing or not fits or life.id == self.baseline.get(member.name):
                latest_before[member.role] = float("inf")
            else:
                self.ours[member.name] = life.id
                newest = max(latest_before.get(member.role, 0.0), life.started_at)
                latest_before[member.role] = newest
            if member.role not in order:
                order.append(member.role)

    def _roles_before(self, step: Step) -> set[str]:
        steps = self.plan.steps[: self.plan.steps.index(step)]
        roles = {
            str(_member(self.hands, before.target).role)
            for before in steps
            if before.verb == "start"
        }
        return roles - {str(_member(self.hands, step.target).role)}

    async def take(self, step: Step) -> Outcome:
        """Take one step; whatever goes wrong becomes its outcome."""
        began = self.clock.now()
        self.undone = ""
        try:
            end = await self._act(step)
        except asyncio.CancelledError:
            detail = self.undone or "interrupted; nothing is half done"
            self._write(step, began, "interrupted", detail)
            raise
        except TandemError as problem:
            # With its next step: a person reads this where the repair stopped.
            end = _End("failed", str(problem).rstrip("."))
        # A plug-in that breaks must end as a record that a person can read, not as a trace.
        except Exception as problem:  # noqa: BLE001
            said = str(problem) or "it did not answer in time"
            end = _End("failed", f"{type(problem).__name__}: {said}")
        return self._write(step, began, end.status, end.detail, end.incarnation)

    def _write(
        self,
        step: Step,
        began: float,
        status: Literal["done", "already", "failed", "interrupted"],
        detail: str,
        incarnation: str | None = None,
    ) -> Outcome:
        outcome = Outcome(
            step=step.id,
            status=status,
            started_at=began,
            ended_at=self.clock.now(),
            detail=detail,
            incarnation=incarnation,
        )
        self.journal.append(outcome)
        return outcome

    async def _act(self, step: Step) -> _End:
        if step.verb == "drain":
            return await self._drain(step)
        if step.verb == "stop":
            return await self._stop(step)
        if step.verb == "expect-gone":
            return await self._expect_gone(step)
        if step.verb == "start":
            return await self._start(step)
        await self._intend(step, f"Checking {step.target}: {step.gate}.")
        look = await self.gates.wait(step)
        return _End("done" if look.passed else "failed", look.detail)

    async def _intend(self, step: Step, sentence: str) -> None:
        """Journal what comes, then tell it: after a crash the journal knows at least as much."""
        self.journal.append(
            Intent(step=step.id, at=self.clock.now(), incarnations=dict(self.baseline))
        )
        await say(self.tell, sentence)

    async def _drain(self, step: Step) -> _End:
        if any(name.startswith("stop:") for name in self.intended):
            return _End("already", "an earlier run of this repair was past the drain")
        await self._intend(step, f"Letting what moves on {step.target} finish.")
        look = await self.gates.wait(step)
        bound = "" if look.passed else f"; the bound of {step.timeout_s:.0f} s ends the wait"
        return _End("done", look.detail + bound)

    async def _stop(self, step: Step) -> _End:
        member = _member(self.hands, step.target)
        life = await self._life(member.name)
        grace_s = self.settings.policy.stop_grace_s
        supervisor = self.hands.supervisor(member)
        if life is None:
            # A crash leaves helpers and shared memory behind: stopping what is gone clears them.
            await to_its_end(supervisor.stop(member, grace_s), grace_s + STOP_MARGIN_S)
            return _End("already", f"{member.name} is not running")
        if life.id == self.ours.get(member.name):
            return _End("already", f"its new life ({life.name}) was begun by this repair", life.id)
        await self._intend(step, f"Stopping {member.name} ({life.name}): {step.why}.")
        await to_its_end(supervisor.stop(member, grace_s), grace_s + STOP_MARGIN_S)
        after = await self._life(member.name)
        if after is not None and after.id == life.id:
            holders = "; ".join(await supervisor.residue(member))
            return _End("failed", f"{member.name} ({life.name}) did not stop. {holders}".rstrip())
        return _End("done", f"{member.name} ({life.name}) is stopped", life.id)

    async def _expect_gone(self, step: Step) -> _End:
        member = _member(self.hands, step.target)
        life = await self._life(member.name)
        if life is not None and life.id == self.ours.get(member.name):
            return _End("already", f"the old life is gone, {life.name} runs", life.id)
        if life is not None and life.id != self.baseline.get(member.name):
            return _End(
                "failed",
                f"something else started {member.name} again ({life.name}) while it was to be "
                "stopped: stop whatever restarts it",
                life.id,
            )
        look = await self.gates.wait(step)
        return _End("done" if look.passed else "failed", look.detail)

    async def _start(self, step: Step) -> _End:
        member = _member(self.hands, step.target)
        life = await self._life(member.name)
        if life is not None:
            if member.name in self._targets("stop") and life.id != self.ours.get(member.name):
                return _End(
                    "failed",
                    f"{member.name} runs ({life.name}), but this repair did not start it: "
                    "the order is not assured",
                    life.id,
                )
            self.gates.lives[member.name] = life.id
            look = await self.gates.wait(step)
            return _End("already" if look.passed else "failed", look.detail, life.id)
        await self._intend(step, f"Starting {member.name}: {step.why}.")
        supervisor = self.hands.supervisor(member)
        self.gates.logs_begin[member.name] = end_of(supervisor.log_path(member))
        try:
            life = await to_its_end(supervisor.start(member), START_BOUND_S)
            self.ours[member.name] = self.gates.lives[member.name] = life.id
            look = await self.gates.wait(step)
        except asyncio.CancelledError:
            grace_s = self.settings.policy.stop_grace_s
            await to_its_end(supervisor.stop(member, grace_s), grace_s + STOP_MARGIN_S)
            self.undone = f"its start was undone: {member.name} is stopped again"
            raise
        return _End("done" if look.passed else "failed", look.detail, life.id)
