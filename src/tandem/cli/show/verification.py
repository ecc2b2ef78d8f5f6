"""How a proof looks: what was asked for and held, what fell short, and what nothing could show.

For: `verify`, `repair`, `incidents show`. Not for: verifying.
"""

from rich.console import Group, RenderableType
from rich.text import Text

from tandem.cli.show.times import duration
from tandem.cli.show.words import BAD, DOUBT, GOOD, block, bullets, indented, pairs, rows, styled
from tandem.records import Verification

FAILED_SHOWN_MAX = 20


def verification_view(proof: Verification) -> Group:
    """Show the whole proof; of the failed requests at most `FAILED_SHOWN_MAX`."""
    verdict = ("the proof holds", GOOD) if proof.passed else ("the proof falls short", BAD)
    took = duration(proof.ended_at - proof.started_at)
    failed = [request for request in proof.requests if request.status != "clean"]
    shown = failed[:FAILED_SHOWN_MAX]
    listed = [
        (
            request.session,
            str(request.turn),
            styled(request.status),
            duration(request.latency_s),
            Text(request.detail),
        )
        for request in shown
    ]
    requests: list[RenderableType] = []
    if listed:
        requests.append(rows("session", "turn", "status", "took", "detail", of=listed))
    if len(failed) > len(shown):
        requests.append(Text(f"and {len(failed) - len(shown)} more (--json has all)"))
    return Group(
        Text.assemble(verdict, f" ({len(proof.requests)} requests in {took})"),
        indented(pairs(_figures(proof))),
        block("Not proven", bullets(proof.not_proven, DOUBT)),
        block("Requests that were not clean", requests),
        block(
            "Requests lost to the repair",
            bullets(f"{lost.subject}: {lost.count} {lost.detail}" for lost in proof.lost),
        ),
    )


def _figures(proof: Verification) -> list[tuple[str, RenderableType]]:
    sequential = (
        f"{proof.sequential_passed}/{proof.sequential_total} passed, "
        f"median {proof.sequential_latency_s:.2f} s"
    )
    gap = "" if proof.rescored_gap_max is None else f", largest gap {proof.rescored_gap_max:.3f}"
    delta = proof.transfer_failed_delta
    inflight = proof.inflight_after
    return [
        ("sequential", Text(sequential)),
        ("sessions", Text(f"{proof.sessions_passed}/{proof.sessions_total} clean")),
        ("corrupted", Text(str(proof.corrupted))),
        ("re-scored", Text(f"{proof.rescored_tokens} tokens{gap}")),
        ("transfer failures", Text("unknown" if delta is None else f"{delta:+d}")),
        ("inflight after", Text("unknown" if inflight is None else str(inflight))),
    ]
