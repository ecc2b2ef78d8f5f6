"""The subject line of the commit: symptom, cause, what was ruled out, fix and proof in one breath.

For: one line of at most 200 characters. Not for: anything longer.
"""

from tandem.records import Incident, Plan, Verification
from tandem.report.aftermath_section import in_a_word
from tandem.report.words import cut, length, plain

SUBJECT_CHARACTERS = 200
HUNCH_CHARACTERS = 40


def subject(incident: Incident) -> str:
    """`incident: silent stall on A>B — CAUSE (best supported), X ruled out; pair ...; 8/8 ...`.

    When it would be too long, what was ruled out goes first, then the end is cut.
    """
    sick = _symptom(incident)
    cause = _cause(incident)
    out = _ruled_out(incident)
    since = in_a_word(incident.aftermath)
    rest = "; ".join(part for part in (_fix(incident), _proof(incident), since) if part)
    for ruled_out in (out, ""):
        named = f"{cause}, {ruled_out}" if ruled_out else cause
        line = "; ".join(part for part in (f"incident: {sick} — {named}", rest) if part)
        if len(line) <= SUBJECT_CHARACTERS:
            return cut(line, SUBJECT_CHARACTERS)
    return cut(line, SUBJECT_CHARACTERS)


def figures(proof: Verification) -> str:
    """`8/8 sequential, 30/30 sessions clean`."""
    return (
        f"{proof.sequential_passed}/{proof.sequential_total} sequential, "
        f"{proof.sessions_passed}/{proof.sessions_total} sessions clean"
    )


def _symptom(incident: Incident) -> str:
    if incident.finding is None:
        return "investigation, nothing seen to be wrong"
    return f"{plain(incident.finding.kind)} on {cut(incident.finding.subject, 60)}"


def _cause(incident: Incident) -> str:
    diagnosis = incident.diagnosis
    if diagnosis is None:
        return "not diagnosed"
    if diagnosis.cause is None:
        return "no cause found" if diagnosis.verdict == "none" else "cause undetermined"
    return f"{diagnosis.cause} ({plain(diagnosis.verdict)})"


def _ruled_out(incident: Incident) -> str:
    diagnosis = incident.diagnosis
    if diagnosis is None:
        return ""
    if diagnosis.hunch is not None and diagnosis.hunch.answer == "ruled_out":
        return f"{cut(diagnosis.hunch.asked, HUNCH_CHARACTERS)} ruled out"
    names = [one.mode for one in diagnosis.ruled_out[:2]]
    return f"{' and '.join(names)} ruled out" if names else ""


def _fix(incident: Incident) -> str:
    plan = incident.plan
    if plan is None:
        return ""
    if not incident.outcomes:
        return f"{_scope(plan)} proposed, nothing touched" if plan.steps else "nothing touched"
    last = incident.outcomes[-1]
    if last.status in ("failed", "interrupted"):
        return f"repair of the {plan.scope} stopped at {last.step}"
    took = length(last.ended_at - incident.outcomes[0].started_at)
    return f"{plan.scope} {'co-' if plan.scope == 'pair' else ''}restarted in {took}"


def _scope(plan: Plan) -> str:
    return "pair co-restart" if plan.scope == "pair" else f"restart of the {plan.scope}"


def _proof(incident: Incident) -> str:
    proof = incident.verification
    if proof is None:
        return ""
    return figures(proof) if proof.passed else f"not proven: {figures(proof)}"
