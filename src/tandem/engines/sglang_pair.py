"""One request through an SGLang pair without a router: what is sent, and how the replies read.

For: the dual dispatch that a PD router does (both sides at once, one fresh room), and scoring.
Not for: routing, retries, or several requests at a time.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import aiohttp
import msgspec

from tandem.fetch import Fetched, cancelled, fetch, host_of
from tandem.ports import Completion
from tandem.records import Member

DEFAULT_BOOTSTRAP_PORT = 8998
BAD_REQUEST = 400
SAID_MAX = 200
"""Characters of an error reply that are repeated."""

ROOMS = 2**63 - 1
Ranks = tuple[int | None, int | None]
"""Data-parallel ranks of prefill and decode; None leaves the choice to the engine."""

TokenLogprob = tuple[float | None, int, str | None]
"""SGLang's triple: logprob (None for the first token of a prompt), token id, text."""


class _Error(msgspec.Struct):
    message: str = ""


class _Enveloped(msgspec.Struct):
    """An error reply."""

    message: str = ""
    error: _Error | None = None


class _Meta(msgspec.Struct):
    prompt_tokens: int = 0
    finish_reason: dict[str, object] | None = None
    input_token_logprobs: list[TokenLogprob] | None = None
    input_top_logprobs: list[list[TokenLogprob] | None] | None = None


class _Reply(msgspec.Struct):
    """A `/generate` reply."""

    text: str = ""
    output_ids: list[int] = []
    meta_info: _Meta = msgspec.field(default_factory=_Meta)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a request through a pair ended: each side's reply, None when it never came."""

    prefill: Fetched | None
    decode: Fetched | None
    latency_s: float


def bootstrap_port(prefill: Member) -> int:
    """The port of a prefill's rendezvous: the configured one, or SGLang's default."""
    return prefill.bootstrap_port or DEFAULT_BOOTSTRAP_PORT


def generation(prompt: str | Sequence[int], output_tokens: int) -> dict[str, object]:
    """A greedy `/generate` body."""
    body: dict[str, object] = {
        "sampling_params": {"max_new_tokens": output_tokens, "temperature": 0.0},
        "stream": False,
    }
    body["text" if isinstance(prompt, str) else "input_ids"] = (
        prompt if isinstance(prompt, str) else list(prompt)
    )
    return body


def scoring(body: dict[str, object]) -> dict[str, object]:
    """The same body, asking for the log-probability of every input token and of the best one."""
    return {**body, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}


async def dispatch(
    client: aiohttp.ClientSession,
    prefill: Member,
    decode: Member,
    body: dict[str, object],
    timeout_s: float,
    *,
    ranks: Ranks = (None, None),
) -> Ended:
    """Send one body to both sides with a fresh room from the system's entropy.

    When one side fails, or time is up, or the caller is cancelled, the other is hung up on: both
    engines abort a request whose client has gone.
    """
    room = {
        "bootstrap_host": host_of(prefill.url),
        "bootstrap_port": bootstrap_port(prefill),
        "bootstrap_room": fresh_room(prefill.dp_size, ranks[0]),
    }
    began = time.monotonic()
    sides = [
        asyncio.create_task(
            fetch(
                client,
                f"{member.url}/generate",
                json={**body, **room, **pinned},
                timeout_s=timeout_s,
            )
        )
        for member, pinned in zip((prefill, decode), pins(ranks), strict=True)
    ]
    try:
        pending = set(sides)
        while pending:
            # Each side ends by its own timeout; the margin is for closing the connection.
            done, pending = await asyncio.wait(
                pending, timeout=timeout_s + 5.0, return_when=asyncio.FIRST_COMPLETED
            )
            if not done or any(not side.result().ok for side in done):
                break
    finally:
        for side in sides:
            if not side.done():
                await cancelled(side)
    first, second = (
        side.result() if side.done() and not side.cancelled() else None for side in sides
    )
    return Ended(first, second, time.monotonic() - began)


def fresh_room(dp_size: int, rank: int | None) -> int:
    """A room nobody had, above 0, which is the health check's.

    A prefill that follows the room takes rank `room % dp_size`, and so does its decode when it
    looks for the rank that has the KV (SGLang's default in PD mode).
    """
    if rank is None:
        return secrets.randbelow(ROOMS) + 1
    return (secrets.randbelow(ROOMS // dp_size - 1) + 1) * dp_size + rank


def pins(ranks: Ranks) -> tuple[dict[str, int], dict[str, int]]:
    """What tells prefill and decode which data-parallel rank to use; nothing where any will do.

    `routed_dp_rank` picks a worker's own rank (older versions call it `data_parallel_rank`), and
    `disagg_prefill_dp_rank` tells the decode where its KV comes from (`io_struct.py`).
    """
    first, second = ({} if rank is None else _own(rank) for rank in ranks)
    if ranks[0] is not None:
        second["disagg_prefill_dp_rank"] = ranks[0]
    return first, second


def _own(rank: int) -> dict[str, int]:
    return {"routed_dp_rank": rank, "data_parallel_rank": rank}


def completion(ended: Ended) -> Completion:
    """The end of a request as its client sees it: decode's tokens, or what went wrong where."""
    reply, failure = _reply(ended.decode)
    _, prefill_failure = _reply(ended.prefill)
    if reply is None or prefill_failure is not None:
        sides = (("prefill", ended.prefill, prefill_failure), ("decode", ended.decode, failure))
        # A side that was hung up on because the other failed did nothing wrong itself.
        blamed = [
            (f"{side}: {why}", got)
            for side, got, why in sides
            if got is not None and why is not None
        ]
        late = bool(blamed) and all(got.timed_out for _, got in blamed)
        return Completion(
            status="timed_out" if late else "failed",
            latency_s=ended.latency_s,
            detail="; ".join(why for why, _ in blamed) or "neither side answered",
            refused=any(got.status == BAD_REQUEST for _, got in blamed),
        )
    return Completion(
        status="completed",
        text=reply.text,
        token_ids=tuple(reply.output_ids),
        latency_s=ended.latency_s,
        prompt_tokens=reply.meta_info.prompt_tokens,
    )


def with_kv_moved(ended: Completion, moved: bool | None) -> Completion:  # noqa: FBT001 - three-valued
    """The same completion, saying whether KV moved (None: nothing could show it)."""
    return replace(ended, kv_moved=moved)


def _reply(got: Fetched | None) -> tuple[_Reply | None, str | None]:
    """A side's reply, or one clause saying why it is none."""
    if got is None:
        return None, "was hung up on"
    if not got.ok:
        said = _complaint(got.body)
        return None, f"{got.why_not}: {said}" if said else got.why_not
    try:
        reply = msgspec.json.decode(got.body, type=_Reply)
    except msgspec.DecodeError as error:
        return None, f"answered something else: {error}"
    reason = reply.meta_info.finish_reason or {}
    if reason.get("type") == "abort":
        return None, f"aborted: {reason.get('message', 'no reason given')}"
    return reply, None


def _complaint(body: bytes) -> str:
    """What an error reply says, without its envelope (SGLang's, OpenAI's) where it has one."""
    with contextlib.suppress(msgspec.DecodeError):
        enveloped = msgspec.json.decode(body, type=_Enveloped)
        inner = enveloped.error.message if enveloped.error else ""
        if said := inner or enveloped.message:
            return said[:SAID_MAX].rstrip(".")
    return body[:SAID_MAX].decode(errors="replace").strip()


def prompt_ids(ended: Ended) -> list[int] | None:
    """The ids of the prompt as the engine tokenised it; None when its reply does not hold them."""
    reply, _ = _reply(ended.prefill)
    if reply is None or reply.meta_info.input_token_logprobs is None:
        return None
    ids = [token for _, token, _ in reply.meta_info.input_token_logprobs]
    return ids if ids and len(ids) == reply.meta_info.prompt_tokens else None


def gaps(ended: Ended, output_ids: Sequence[int]) -> list[float] | None:
    """Best log-probability minus the token's, for each of the last input tokens.

    None when the reply does not cover exactly these tokens.
    """
    reply, _ = _reply(ended.prefill)
    if reply is None:
        return None
    own = (reply.meta_info.input_token_logprobs or [])[-len(output_ids) :]
    best = (reply.meta_info.input_top_logprobs or [])[-len(output_ids) :]
    if [token for _, token, _ in own] != list(output_ids) or len(best) != len(own):
        return None
    found = []
    for (logprob, _, _), top in zip(own, best, strict=True):
        top_logprob = top[0][0] if top else None
        if logprob is None or top_logprob is None:
            return None
        found.append(max(0.0, top_logprob - logprob))
    return found
