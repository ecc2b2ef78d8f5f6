"""What the watch remembers of what it found: closed findings that may come back, and their cases.

For: one incident per cause. A finding that comes back, or grows under another name, belongs to the
incident it had; an undetermined one is judged again when what the diagnosis asked for has come.
Not for: carrying an incident on (`handling.py`), or finding anything (`detect`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.detect import RECURS_S
from tandem.diagnose import asked_for
from tandem.facts import Facts
from tandem.records import Finding, Incident
from tandem.records import vocabulary as v
from tandem.store import Store

FAMILY = frozenset(
    {"silent-stall", "partial-stall", "transfer-failures-rising", "health-lies", "restart-hazard"}
)
"""What one cause may look like on one path, in any order."""
DYING = frozenset({"member-down", "member-restarting"})
"""What a member does that does not stay up."""
AGAIN_S = (30.0, 300.0)
"""How long after the evidence was sealed an undetermined verdict is judged again; then no more."""
PAST_MAX = 64


@dataclass(slots=True)
class Case:
    """One cause in hand: the finding it is told under now, and its incident once there is one."""

    finding: Finding
    incident: str | None = None
    asked: tuple[str, ...] = ()
    """Names of observations that would settle an undetermined verdict; empty when it is settled."""
    sealed_at: float = 0.0
    tries: int = 0
    broken: bool = False
    """Its handling broke: it is tried again after a pause."""


class Cases:
    """The memory of one watch between turns; what an earlier one wrote down is read back."""

    def __init__(self, store: Store, now: float) -> None:
        """Take up what the store knows of the last minutes."""
        self._past = {one.id: one for one in store.closed_findings(now - RECURS_S)}
        known = {one.id: one for one in store.open_findings()} | self._past
        self._cases: dict[str, Case] = {}
        for incident in reversed(store.incidents()):
            found = incident.finding
            if found is None or incident.report is None or incident.outcomes:
                continue
            if found.id in known:
                case = Case(known[found.id])
                self._learn(case, incident)
                self._cases[found.id] = case

    @property
    def past(self) -> tuple[Finding, ...]:
        """Findings that cleared lately: seen again, they are open again."""
        return tuple(self._past.values())

    def came_back(self, finding: Finding) -> bool:
        """Whether an open finding is one that had cleared."""
        return finding.id in self._past

    def case_of(self, finding: Finding) -> Case | None:
        """The case of a finding, None when nobody handed it on yet."""
        return self._cases.get(finding.id)

    def follow(self, findings: Sequence[Finding], facts: Facts) -> list[tuple[Finding, str]]:
        """Learn how the findings stand after a turn, and to which cases they belong.

        Gives those that joined the incident of an earlier one.
        """
        for finding in findings:
            if finding.closed_at is None:
                self._past.pop(finding.id, None)
            else:
                self._past[finding.id] = finding
        over = facts.now - RECURS_S
        kept = [one for one in self._past.values() if (one.closed_at or 0.0) >= over][-PAST_MAX:]
        self._past = {one.id: one for one in kept}
        joined = []
        for finding in findings:
            if finding.closed_at is None and finding.id not in self._cases:
                case = self._same_cause(finding, findings)
                if case is not None:
                    self._cases[finding.id] = case
                    if case.incident is not None and finding.actionable:
                        joined.append((finding, case.incident))
        known = {one.id: one for one in findings}
        for name, case in list(self._cases.items()):
            if name in known and known[name].closed_at is None:
                case.finding = known[name]
            elif name not in self._past:
                del self._cases[name]
        return joined

    def _same_cause(self, finding: Finding, findings: Sequence[Finding]) -> Case | None:
        """The case of a finding that opened as another one closed, or comes back by another name.

        A stall that becomes silent, or fails aloud, is the same cause grown. Another life of a
        member, or another path, is another cause; but for a member that dies again and again.
        """
        if finding.kind in DYING:
            for name, case in self._cases.items():
                other = self._past.get(name) or case.finding
                again = other.kind in DYING and other.subject == finding.subject
                if again and case.incident is not None:
                    return case
        if finding.kind not in FAMILY:
            return None
        closing = {one.id for one in findings if one.closed_at is not None}
        for name, case in self._cases.items():
            other = self._past.get(name) or case.finding
            if other.kind not in FAMILY or _other_lives(finding, other):
                continue
            mine, theirs = members(finding), members(other)
            grown = name in closing and mine & theirs
            if grown or mine <= theirs or theirs <= mine:
                return case
        return None

    def begin(self, finding: Finding) -> Case:
        """A finding is handed on."""
        case = Case(finding)
        self._cases[finding.id] = case
        return case

    def judged(self, case: Case, incident: Incident) -> None:
        """An incident was judged, the first time or again."""
        self._learn(case, incident)

    def _learn(self, case: Case, incident: Incident) -> None:
        case.incident = incident.id
        case.sealed_at = incident.seal.sealed_at if incident.seal else incident.opened_at
        said = incident.diagnosis
        undetermined = said is not None and said.verdict == "undetermined"
        case.asked = asked_for(said.next_observation or "") if said and undetermined else ()

    def to_judge_again(self, open_findings: Sequence[Finding], facts: Facts) -> Case | None:
        """A case whose finding stands, undetermined, and of which what was asked for has come."""
        for finding in open_findings:
            case = self._cases.get(finding.id)
            if case is None or not case.asked or not finding.actionable or case.broken:
                continue
            if case.tries >= len(AGAIN_S) or facts.now - case.sealed_at < AGAIN_S[case.tries]:
                continue
            if any(_came(facts, name, case.sealed_at) for name in case.asked):
                case.tries += 1
                return case
        return None

    def broke(self, case: Case) -> None:
        """The handling of a case broke; one that was being judged again stays as it was."""
        case.broken = not case.tries

    def forget_broken(self) -> None:
        """Let what broke be handed on once more."""
        self._cases = {name: one for name, one in self._cases.items() if not one.broken}

    def clear(self) -> None:
        """Forget everything: it speaks of lives that are over."""
        self._past.clear()
        self._cases.clear()


def members(finding: Finding) -> set[str]:
    """The members a finding speaks of."""
    return {*finding.incarnations, *finding.subject.split(">")}


def _other_lives(finding: Finding, other: Finding) -> bool:
    return any(
        other.incarnations.get(name, life) != life for name, life in finding.incarnations.items()
    )


def _came(facts: Facts, name: str, since: float) -> bool:
    """Whether something of this name was seen since; stacks are taken when it is judged."""
    if name == v.STACK:
        return True
    rows = (facts.latest(subject, name) for subject in facts.subjects(name))
    return any(seen is not None and seen.at > since for seen in rows)
