"""The records of one bad night, built by hand: what every view of `tandem.cli.show` is tried on."""

import io

from rich.console import Console, RenderableType

from tandem.facts import Facts
from tandem.records import (
    Change,
    ChangeVerdict,
    Deployment,
    Diagnosis,
    Finding,
    HunchAnswer,
    Incident,
    Member,
    ModeVerdict,
    Observation,
    Outcome,
    Plan,
    RefusedRung,
    ReportRef,
    RequestRecord,
    Role,
    RuledOut,
    Seal,
    Step,
    TestResult,
    Verification,
    Witness,
)

ONSET = 1_764_450_000.0
"""2025-11-29 21:00:00 UTC."""
NOW = ONSET + 42.0

DEPLOYMENT = Deployment(
    name="laptop",
    members=(
        Member(name="prefill-0", role=Role.PREFILL, url="http://127.0.0.1:1", engine="sglang"),
        Member(name="decode-0", role=Role.DECODE, url="http://127.0.0.1:2", engine="sglang"),
        Member(name="router", role=Role.ROUTER, url="http://127.0.0.1:3", engine="smg"),
    ),
)

INFLIGHT = Observation(
    id=7, source="loads", subject="prefill-0", name="inflight_queue_reqs", at=ONSET + 30, value=8
)
STACKS = Observation(
    id=9,
    source="stack",
    subject="prefill-0",
    name="stack",
    at=ONSET + 31,
    missing="py-spy may not trace pid 12",
)
RESTART = Change(id=3, at=ONSET - 600, subject="decode-0", kind="restart", how_known="process")

FACTS = Facts(DEPLOYMENT, (INFLIGHT, STACKS), now=NOW, changes=(RESTART,))

FINDING = Finding(
    id=f"silent-stall@prefill-0>decode-0@{ONSET:.0f}",
    kind="silent-stall",
    subject="prefill-0>decode-0",
    onset_at=ONSET,
    found_at=ONSET + 6,
    summary="8 hand-offs pinned, nothing moves, health 200",
    witnesses=(
        Witness(side="client", statement="a probe is 6 s late", evidence=(5,)),
        Witness(side="server", statement="inflight never below 8", evidence=(7,)),
    ),
)

FAMILY = ModeVerdict(
    mode="degraded-pair-after-decode-restarts",
    incident_class="hangs-in-handoff",
    standing="best_supported",
    score=4.25,
    scope="pair",
    because="the inflight floor is 8 and decode restarted 3 times since prefill began",
    tests=(
        TestResult(
            test="inflight_pinned",
            answer="supports",
            strength="strong",
            because="inflight stays at 8",
            evidence=(7,),
        ),
        TestResult(
            test="restarted_alone",
            answer="supports",
            strength="moderate",
            because="decode alone was restarted",
            evidence=(3,),
        ),
        TestResult(
            test="transfer_thread",
            answer="unknown",
            strength="decisive",
            because="no stack was taken",
            evidence=(9, 404),
            collect="a stack dump of the prefill's transfer thread",
        ),
    ),
)
DESYNC = ModeVerdict(
    mode="collective-desync",
    incident_class="hangs-in-collective",
    standing="ruled_out",
    score=-6.0,
    scope="pair",
    because="the overlap schedule is off in the live process",
    tests=(
        TestResult(
            test="overlap_off",
            answer="contradicts",
            strength="decisive",
            because="--disable-overlap-schedule is in the live command line",
        ),
    ),
)

DIAGNOSIS = Diagnosis(
    knowledge_version="2025-11-29",
    verdict="best_supported",
    cause=FAMILY.mode,
    incident_class="hangs-in-handoff",
    mechanism=None,
    confidence_note="the thread was never seen, so the mechanism is open",
    modes=(FAMILY, DESYNC),
    ruled_out=(RuledOut(mode=DESYNC.mode, because=DESYNC.because, evidence=(7,)),),
    changes=(
        ChangeVerdict(
            change=3,
            subject="decode-0",
            what="",
            at=ONSET - 600,
            verdict="implicated",
            because="a decode-only restart against a running prefill",
        ),
        ChangeVerdict(
            change=4,
            subject="decode-0",
            what="--cuda-graph-max-bs",
            at=ONSET - 86400,
            verdict="exonerated",
            because="not on the failing path",
            inferred=True,
        ),
    ),
    hunch=HunchAnswer(
        asked="overlap schedule",
        matched="collective-desync",
        answer="ruled_out",
        because="its mechanism is off in the live process",
    ),
    next_observation="a stack dump of the prefill's transfer thread",
    subject="prefill-0>decode-0",
)

PLAN = Plan(
    scope="pair",
    because="both ends hold state of the other",
    steps=(
        Step(
            id="stop:decode-0",
            verb="stop",
            target="decode-0",
            gate="none",
            timeout_s=15,
            on_failure="stop",
            why="before its prefill",
        ),
        Step(
            id="start:prefill-0",
            verb="start",
            target="prefill-0",
            gate="bootstrap",
            timeout_s=60,
            on_failure="stop",
            why="its bootstrap comes first",
        ),
    ),
    refused=(RefusedRung(scope="engine:decode", because="that is how it began"),),
    kept=("decode-0: --cuda-graph-max-bs 64 -> 96",),
    costs=("about 10 s without service", "8 requests will be lost"),
)

OUTCOMES = (
    Outcome(
        step="stop:decode-0",
        status="done",
        started_at=NOW,
        ended_at=NOW + 1.5,
        detail="ended on SIGTERM",
    ),
    Outcome(
        step="start:prefill-0",
        status="failed",
        started_at=NOW + 2,
        ended_at=NOW + 62,
        detail="port 30000 is held by pid 77 (nginx)",
    ),
)

VERIFICATION = Verification(
    passed=False,
    sequential_passed=8,
    sequential_total=8,
    sequential_latency_s=0.59,
    sessions_passed=29,
    sessions_total=30,
    corrupted=1,
    rescored_tokens=96,
    rescored_gap_max=0.0213,
    transfer_failed_delta=0,
    inflight_after=None,
    requests=(
        RequestRecord(session="s01", turn=1, sent_at=NOW, latency_s=0.6, status="clean"),
        RequestRecord(
            session="s02",
            turn=3,
            sent_at=NOW,
            latency_s=0.7,
            status="corrupted",
            detail="marker of s17 leaked",
        ),
    ),
    lost=(),
    not_proven=("inflight: the prefill did not answer",),
    started_at=NOW,
    ended_at=NOW + 21,
)

INCIDENT = Incident(
    id="2025-11-29T21-00-06Z-silent-stall",
    opened_at=ONSET + 6,
    deployment=DEPLOYMENT,
    finding=FINDING,
    hunch="overlap schedule",
    seal=Seal(
        path="evidence.sqlite",
        sha256="ab" * 32,
        size_bytes=4096,
        observations=2,
        left_out=("stacks: py-spy may not trace",),
        sealed_at=NOW,
    ),
    diagnosis=DIAGNOSIS,
    plan=PLAN,
    outcomes=OUTCOMES,
    verification=VERIFICATION,
    report=ReportRef(path="INCIDENTS.md", commit="1a2b3c4", subject="laptop: silent stall"),
    state="failed",
)


def text(view: RenderableType, columns: int = 100, *, colour: bool = False) -> str:
    """Draw a view as a terminal (or, without colour, a pipe) of that width shows it."""
    file = io.StringIO()
    console = Console(file=file, width=columns, force_terminal=colour, markup=False, emoji=False)
    console.print(view)
    return file.getvalue()
