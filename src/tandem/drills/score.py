"""What a drill says in the end: the loop's own records held against the client's log.

For: the JSON of `tandem drill`. Not for: deciding anything the loop should have decided.
"""

import msgspec

from tandem.drills.traffic import ClientLog
from tandem.records import Diagnosis, Incident, Verification


class RepairJson(msgspec.Struct, kw_only=True):
    """What the repair did."""

    scope: str
    steps: list[dict[str, str]]
    duration_s: float


class VerificationJson(msgspec.Struct, kw_only=True):
    """What the proof showed."""

    sequential: dict[str, int]
    sessions: dict[str, int]
    corrupted: int
    transfer_failed_delta: int | None
    inflight_after: int | None
    passed: bool


class Score(msgspec.Struct, kw_only=True):
    """One drill's result; `finding`, the cause and `repair` are null where nothing was wrong."""

    drill: str
    seed: int
    ok: bool
    found_after_s: float | None
    finding: str | None
    diagnosis: Diagnosis | None
    """As `tandem diagnose --json` prints it; of a calm drill, what a person who asks is told."""
    repair: RepairJson | None
    verification: VerificationJson | None
    report: dict[str, str | None] | None
    client: dict[str, int]
    why: list[str]
    """What kept `ok` from being true; empty when it is."""


def _repair_json(incident: Incident) -> RepairJson | None:
    if not incident.outcomes or incident.plan is None:
        return None
    first, last = incident.outcomes[0], incident.outcomes[-1]
    return RepairJson(
        scope=incident.plan.scope,
        steps=[{"step": one.step, "status": one.status} for one in incident.outcomes],
        duration_s=round(last.ended_at - first.started_at, 2),
    )


def _verification_json(proof: Verification | None) -> VerificationJson | None:
    if proof is None:
        return None
    return VerificationJson(
        sequential={"passed": proof.sequential_passed, "total": proof.sequential_total},
        sessions={"passed": proof.sessions_passed, "total": proof.sessions_total},
        corrupted=proof.corrupted,
        transfer_failed_delta=proof.transfer_failed_delta,
        inflight_after=proof.inflight_after,
        passed=proof.passed,
    )


def score(
    drill: str, seed: int, incident: Incident | None, log: ClientLog, *, stall_expected: bool
) -> Score:
    """Hold one incident (or its absence) against what the client saw."""
    finding = incident.finding if incident else None
    if finding is not None and not finding.actionable:
        finding = None  # told, and told not to be a stall
    found_after_s = None
    if finding is not None:
        hung = log.first_never_completed(finding.found_at)
        found_after_s = round(finding.found_at - hung.sent_at, 2) if hung else None
    report = incident.report if incident else None
    result = Score(
        drill=drill,
        seed=seed,
        ok=False,
        found_after_s=found_after_s,
        finding=finding.kind if finding else None,
        diagnosis=incident.diagnosis if incident else None,
        repair=_repair_json(incident) if incident else None,
        verification=_verification_json(incident.verification if incident else None),
        report={"path": report.path, "commit": report.commit} if report else None,
        client={status: log.count(status) for status in ("completed", "failed", "open")},
        why=[],
    )
    planned = incident is not None and incident.plan is not None and bool(incident.plan.steps)
    shortfalls = (
        _stall_shortfalls(result) if stall_expected else _calm_shortfalls(result, planned=planned)
    )
    return msgspec.structs.replace(result, ok=not shortfalls, why=shortfalls)


EXPECTED_CAUSE = "degraded-pair-after-decode-restarts"


def _stall_shortfalls(result: Score) -> list[str]:
    said = result.diagnosis
    hunch = said.hunch if said else None
    proof = result.verification
    claims = {
        "the stall was found": result.finding is not None,
        "a client request really hung": result.found_after_s is not None,
        f"the cause is {EXPECTED_CAUSE}": said is not None and said.cause == EXPECTED_CAUSE,
        "the verdict is confirmed or best supported": said is not None
        and said.verdict in ("confirmed", "best_supported"),
        "the hunch was ruled out": hunch is not None and hunch.answer == "ruled_out",
        "the pair was repaired": result.repair is not None
        and result.repair.scope == "pair"
        and all(one["status"] in ("done", "already") for one in result.repair.steps),
        "the proof holds": proof is not None and proof.passed,
        "the report is committed": result.report is not None
        and result.report["commit"] is not None,
    }
    return [f"not so: {claim}" for claim, holds in claims.items() if not holds]


def _calm_shortfalls(result: Score, *, planned: bool) -> list[str]:
    claims = {
        "nothing was found": result.finding is None,
        "nobody is accused, even when a person asks": result.diagnosis is not None
        and result.diagnosis.cause is None,
        "nothing was repaired": result.repair is None,
        "no repair was proposed": not planned,
        "clients were served": result.client["completed"] > 0,
    }
    return [f"not so: {claim}" for claim, holds in claims.items() if not holds]
