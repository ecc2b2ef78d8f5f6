"""Verify: the proof that a deployment serves, under load and without wrong answers.

For: sequential requests, then multi-turn sessions, re-scored by a clean prefill, with every request
accounted for. Not for: deciding whether to repair, or watching real traffic afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from tandem.ports import Clock, Hands, Progress, say
from tandem.records import LostRequest, Profile, RequestRecord, Verification
from tandem.verify.counters import count, failed_delta, inflight_after
from tandem.verify.oracle import draw_markers, sampled, worst_gap
from tandem.verify.sequential import sequential
from tandem.verify.sessions import Sessions, name_of
from tandem.verify.ways import Ways

__all__ = ["verify"]


async def verify(
    profile: Profile,
    hands: Hands,
    clock: Clock,
    *,
    tell: Progress,
    lost: tuple[LostRequest, ...] = (),
    seen_moving: Sequence[str] = (),
) -> Verification:
    """Send the requests `profile` asks for, through the router where there is one, and judge them.

    `lost` are requests the repair killed, carried into the record; `seen_moving` are members whose
    failure counter has been seen above zero, so that its standing still proves something.
    Raises `RefusedError` when the deployment has no pair to verify.
    """
    ways = Ways(hands)
    began = clock.now()
    markers = draw_markers(profile.sequential + profile.sessions)
    chat, own = markers[: profile.sequential], markers[profile.sequential :]
    before = await count(hands)
    await say(tell, f"Sending {profile.sequential} requests one after the other.")
    first = await sequential(profile, ways, clock, chat, markers)
    through = [record for record in first if record.status == "clean"]
    doubts: list[str] = []
    sessions = Sessions(profile, ways, clock, tell, own, markers)
    scores = _Scores()
    if profile.sequential and not through:
        doubts.append("sessions were not run: no sequential request came through")
    else:
        await say(
            tell,
            f"{len(through)} of {profile.sequential} came through; running {profile.sessions} "
            f"sessions of {profile.turns} turns, {profile.concurrency} at a time.",
        )
        await sessions.run()
        if sessions.given_up:
            doubts.append("sessions were given up: every one that was tried hung")
        scores = await _rescore(profile, ways, sessions, clock, tell)
    delta, delta_doubts = failed_delta(before, await count(hands), seen_moving)
    inflight, inflight_doubts = await inflight_after(hands, clock)
    corrupted = sessions.corrupted | scores.corrupted
    clean = sessions.sound - corrupted
    return Verification(
        passed=(
            len(through) == profile.sequential
            and len(clean) == profile.sessions
            and not corrupted
            and not delta
            and not inflight
        ),
        sequential_passed=len(through),
        sequential_total=profile.sequential,
        sequential_latency_s=median([one.latency_s for one in through]) if through else 0.0,
        sessions_passed=len(clean),
        sessions_total=profile.sessions,
        corrupted=len(corrupted),
        rescored_tokens=scores.tokens,
        rescored_gap_max=scores.worst,
        transfer_failed_delta=delta,
        inflight_after=inflight,
        requests=(*first, *sessions.requests, *scores.requests),
        lost=lost,
        not_proven=(*doubts, *scores.doubts, *delta_doubts, *inflight_doubts),
        started_at=began,
        ended_at=clock.now(),
    )


@dataclass(slots=True)
class _Scores:
    """What re-scoring found."""

    tokens: int = 0
    worst: float | None = None
    corrupted: set[str] = field(default_factory=set)
    requests: list[RequestRecord] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)


async def _rescore(
    profile: Profile, ways: Ways, sessions: Sessions, clock: Clock, tell: Progress
) -> _Scores:
    """Let a clean prefill score one transcript of each sampled session."""
    scores = _Scores()
    names = [name_of(number) for number in range(profile.sessions)]
    finished = [name for name in names if name in sessions.transcripts]
    for place in sampled(len(finished), profile.rescored_sessions):
        transcript = sessions.transcripts[finished[place]]
        if not transcript.output_ids:
            scores.doubts.append(f"{transcript.session} was not re-scored: no token ids came back")
            continue
        sent_at = clock.now()
        gaps, why = await ways.score(
            transcript.prompt, transcript.output_ids, profile.request_timeout_s
        )
        if gaps is None or len(gaps) < len(transcript.output_ids):
            why = why or f"only {len(gaps or ())} of {len(transcript.output_ids)} tokens scored"
            scores.doubts.append(f"{transcript.session} was not re-scored: {why}")
            continue
        worst = worst_gap(gaps)
        wrong = worst > profile.gap_max
        scores.tokens += len(gaps)
        scores.worst = max(worst, scores.worst or 0.0)
        if wrong:
            scores.corrupted.add(transcript.session)
            await say(tell, f"{transcript.session}: a token {worst:.2f} below the best: corrupted")
        scores.requests.append(
            RequestRecord(
                session=f"re-score of {transcript.session}",
                turn=transcript.turn,
                sent_at=sent_at,
                latency_s=clock.now() - sent_at,
                status="corrupted" if wrong else "clean",
                detail=f"largest gap {worst:.3f} over {len(gaps)} tokens",
            )
        )
    if profile.rescored_sessions and not scores.tokens and not scores.doubts:
        scores.doubts.append("nothing was re-scored: no session came through a turn")
    return scores
