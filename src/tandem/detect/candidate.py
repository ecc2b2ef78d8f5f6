"""What a rule of detect offers: something that looks wrong at one moment, and who saw it.

For: the shape in which the rules answer, before hysteresis makes findings of it.
Not for: remembering anything between moments.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tandem.facts import Facts
from tandem.records import Finding, Witness

RECURRENCES_MAX = 8
"""How many times that a finding came back are remembered with it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One thing that looks wrong now; `members` are those it speaks of, for one cause at a time."""

    kind: str
    subject: str
    members: tuple[str, ...]
    onset_at: float
    summary: str
    witnesses: tuple[Witness, ...]
    actionable: bool = True
    outlives: bool = False
    """Whether it goes on when a member begins another life: of restarts, that is what it tells."""

    def finding(self, facts: Facts, onset_at: float) -> Finding:
        """The finding it opens, with the lives its members are in now."""
        lives = {member: facts.incarnation(member) for member in self.members}
        return Finding(
            id=f"{self.kind}@{self.subject}@{int(onset_at)}",
            kind=self.kind,
            subject=self.subject,
            onset_at=onset_at,
            found_at=facts.now,
            summary=self.summary,
            witnesses=self.witnesses,
            incarnations={
                name: life.id
                for name, life in lives.items()
                if life is not None and not self.outlives
            },
            actionable=self.actionable,
        )

    def again(self, finding: Finding) -> Finding:
        """An earlier finding of the same, open once more."""
        again = (*finding.recurred_at, self.onset_at)[-RECURRENCES_MAX:]
        return msgspec.structs.replace(finding, closed_at=None, recurred_at=again)

    def escalated(self, finding: Finding) -> Finding:
        """The same finding, which by now calls for action."""
        return msgspec.structs.replace(
            finding, summary=self.summary, witnesses=self.witnesses, actionable=True
        )


def server(statement: str, evidence: tuple[int, ...]) -> Witness:
    """Testimony of an engine, a router or a process about itself."""
    return Witness(side="server", statement=statement, evidence=_once(evidence))


def client(statement: str, evidence: tuple[int, ...]) -> Witness:
    """Testimony of whoever waits for an answer: a probe, or the router's open requests."""
    return Witness(side="client", statement=statement, evidence=_once(evidence))


def joined(facts: Facts, several: Sequence[Candidate], are: str) -> Candidate:
    """Several of one kind as one: named by the member they share, or by the deployment."""
    if len(several) == 1:
        return several[0]
    first = min(several, key=lambda one: (one.onset_at, one.subject))
    shared = set(several[0].members).intersection(*(one.members for one in several))
    return Candidate(
        kind=first.kind,
        subject=min(shared) if len(shared) == 1 else facts.deployment.name,
        members=tuple(dict.fromkeys(name for one in several for name in one.members)),
        onset_at=first.onset_at,
        summary=f"{len(several)} paths {are}; the first: {first.summary}",
        witnesses=first.witnesses,
    )


def _once(evidence: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(evidence))
