"""What a rule of detect offers: something that looks wrong at one moment, and who saw it.

For: the shape in which the rules answer, before hysteresis makes findings of it.
Not for: remembering anything between moments.
"""

from dataclasses import dataclass

from tandem.facts import Facts
from tandem.records import Finding, Witness


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
            incarnations={name: life.id for name, life in lives.items() if life is not None},
            actionable=self.actionable,
        )


def server(statement: str, evidence: tuple[int, ...]) -> Witness:
    """Testimony of an engine, a router or a process about itself."""
    return Witness(side="server", statement=statement, evidence=_once(evidence))


def client(statement: str, evidence: tuple[int, ...]) -> Witness:
    """Testimony of whoever waits for an answer: a probe, or the router's open requests."""
    return Witness(side="client", statement=statement, evidence=_once(evidence))


def _once(evidence: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(evidence))
