"""The first proof: a few chat requests, one after the other, as a client sends them.

For: knowing that a single request works before load is put on. Not for: concurrency.
"""

from collections.abc import Sequence
from typing import Literal

from tandem.ports import Clock, Completion
from tandem.records import Profile, RequestRecord
from tandem.verify.oracle import leaked
from tandem.verify.ways import Ways

Status = Literal["clean", "corrupted", "failed", "timed_out"]


async def sequential(
    profile: Profile, ways: Ways, clock: Clock, own: Sequence[str], markers: Sequence[str]
) -> tuple[RequestRecord, ...]:
    """Send `profile.sequential` chat requests in turn; one record each.

    `own` are these requests' markers, `markers` all of this run.
    """
    records: list[RequestRecord] = []
    for number, marker in enumerate(own, start=1):
        sent_at = clock.now()
        answer = await ways.send(
            f"The code word is {marker}. Say it back and name one colour.",
            output_tokens=profile.output_tokens,
            timeout_s=profile.request_timeout_s,
            chat=True,
        )
        records.append(
            accounted(answer, f"sequential-{number}", 1, sent_at, clock, (marker, markers))
        )
    return tuple(records)


def accounted(
    answer: Completion,
    session: str,
    turn: int,
    sent_at: float,
    clock: Clock,
    marks: tuple[str, Sequence[str]],
) -> RequestRecord:
    """The record of one request: clean only when it completed, said something, and leaked nothing.

    `marks` are its own marker and all of this run.
    """
    own, markers = marks
    foreign = leaked(answer.text, own, markers)
    status: Status = "clean"
    detail = ""
    if foreign is not None:
        status, detail = "corrupted", f"it contains {foreign}, the marker of another request"
    elif answer.status != "completed":
        status, detail = answer.status, answer.detail
    elif not answer.text.strip() and not answer.token_ids:
        status, detail = "failed", "it completed with an empty answer"
    return RequestRecord(
        session=session,
        turn=turn,
        sent_at=sent_at,
        latency_s=answer.latency_s or clock.now() - sent_at,
        status=status,
        detail=detail,
    )
