"""What a plan is made from, and the few questions the planner asks of it.

For: one reading of diagnosis, finding, facts and policy shared by ladder and costs.
Not for: choosing anything.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem import signs
from tandem.facts import Facts
from tandem.records import Deployment, Diagnosis, Finding, Member, ModeVerdict, Policy, Role, Trait
from tandem.records import vocabulary as v


@dataclass(frozen=True, slots=True)
class Case:
    """Everything a plan may rest on."""

    diagnosis: Diagnosis
    finding: Finding | None
    facts: Facts
    policy: Policy

    @property
    def deployment(self) -> Deployment:
        """The deployment the facts are of."""
        return self.facts.deployment

    @property
    def subject(self) -> str:
        """The sick path or member: the diagnosis's, else the finding's; empty when nobody knows."""
        if self.diagnosis.subject:
            return self.diagnosis.subject
        return self.finding.subject if self.finding else ""

    @property
    def leading(self) -> ModeVerdict | None:
        """The verdict of the mode named as the cause."""
        cause = self.diagnosis.cause
        return next((mode for mode in self.diagnosis.modes if mode.mode == cause), None)

    @property
    def one_pair(self) -> bool:
        """Whether the deployment is one prefill and one decode: then the router stops with them."""
        return len(self.deployment.cells()) == 1

    def sick(self, role: Role) -> tuple[Member, ...]:
        """The members of a role that the subject names; all of that role when there is only one."""
        named = [self.deployment.member(word) for word in self.subject.split(">")]
        found = tuple(member for member in named if member and member.role is role)
        everyone = self.deployment.of(role)
        return found if found or len(everyone) != 1 else everyone

    def trait(self, name: str) -> Trait | None:
        """The trait of the whole deployment, or else of the first member that has it."""
        subjects = ("*", *(member.name for member in self.deployment.members))
        found = (self.facts.trait(subject, name) for subject in subjects)
        return next((trait for trait in found if trait is not None), None)

    def dead(self, member: Member) -> bool:
        """Whether the process collector last saw no life of this member."""
        seen = self.facts.latest(member.name, v.ALIVE)
        return seen is not None and seen.value is False

    def loading(self, member: Member) -> float | None:
        """Seconds since a member started that has not answered yet; None when it is not loading.

        Loading ends with the first answer of its present life, or after `start_timeout_s`.
        """
        life = self.facts.incarnation(member.name)
        if life is None:
            return None
        age_s = self.facts.now - life.started_at
        if age_s > self.policy.start_timeout_s or self.answered_at(member, life.started_at):
            return None
        return age_s

    def answered_at(self, member: Member, since: float) -> float | None:
        """When a member first answered at or after `since`, as far as it was observed."""
        times = [at for at, well in self.answers(member) if well and at >= since]
        return min(times, default=None)

    def answers(self, member: Member) -> list[tuple[float, bool]]:
        """Every look at whether a member answers: (when, whether it did), oldest first."""
        if member.role is Role.ROUTER:
            rows = self.facts.rows(member.name, v.ROUTER_REQUESTS_TOTAL)
            return [(seen.at, seen.missing is None) for seen in rows]
        if member.role is Role.PREFILL and self.facts.rows(member.name, v.BOOTSTRAP_READY):
            rows = self.facts.rows(member.name, v.BOOTSTRAP_READY)
            return [(seen.at, seen.value is True) for seen in rows]
        rows = self.facts.rows(member.name, v.HEALTH_STATUS)
        return [(seen.at, seen.value == 200) for seen in rows]

    def number(self, subject: str, name: str) -> tuple[float, int] | None:
        """The newest number of a thing and the observation that holds it."""
        samples = self.facts.numbers(subject, name)
        return (samples[-1].value, samples[-1].id) if samples else None

    def live(self, subject: str, name: str) -> tuple[float, int] | None:
        """The same of a queue, by a source that does not freeze."""
        samples = self.facts.numbers(subject, name, source=signs.LIVE)
        return (samples[-1].value, samples[-1].id) if samples else None

    def queued(self, members: Iterable[Member], names: Sequence[str]) -> tuple[int, list[int]]:
        """How many requests the named queues of these members hold, and the evidence.

        Live counts only: a frozen gauge counts nobody.
        """
        found = [self.live(member.name, name) for member in members for name in names]
        held = [reading for reading in found if reading and reading[0] > 0]
        return int(sum(value for value, _ in held)), [cited for _, cited in held]


def cite(evidence: Iterable[int]) -> str:
    """Evidence as sentences carry it: ` [e12] [e31]`, or nothing."""
    return "".join(f" [e{number}]" for number in evidence)


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"
