"""From an HTTP body to a request in the scheduler, and its outputs back to a connection.

For: every generation route: refusing what cannot be served, noticing a client that left, and the
metrics a client would feel (first token, gaps, whole request). Not for: the shapes of replies
(`generate.py`, `openai.py`).
"""

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator

from starlette.types import Receive

from tandem_engine.host import Host
from tandem_engine.replies import RequestError
from tandem_engine.request import Finish, Output, Request, ScoresWanted
from tandem_engine.sampling import SamplingParams
from tandem_engine.text import TextStream
from tandem_engine.wire import FAKE_BOOTSTRAP_HOST, Bootstrapped
from tandem_engine.wire import SamplingParams as WireSampling

MAX_NEW_TOKENS = 128
"""SGLang's default for `/generate` and `/v1/completions`."""
BEGINNING_CHARACTERS = 8
"""How many characters per token of context are looked at first: text has about four."""
NEVER_REACHED = "The client left."
PIECE_BYTES_MAX = 128
"""No token is longer (SmolLM2's longest has 81 bytes)."""
HOST = re.compile(r"[A-Za-z0-9_.:%-]{1,253}|\[[0-9A-Fa-f:.%]{2,}\]")
LABEL_MAX = 63
"""Beyond it a name cannot even be looked up."""


class Live:
    """One request of one HTTP connection."""

    def __init__(self, worker: Host, request: Request, queue: "asyncio.Queue[Output]") -> None:
        """The request is not submitted yet: `outputs` does it."""
        self._worker = worker
        self._queue = queue
        self.request = request

    async def outputs(self, receive: Receive) -> AsyncIterator[Output]:
        """Submit, and yield what comes; ends after the last output, or when the client left.

        `receive` is the connection's: the body must have been read.
        """
        request, metrics = self.request, self._worker.metrics
        self._worker.submit(request)
        watch = asyncio.create_task(_gone(receive, self._queue))
        before_s, streaming, made = request.arrived_s, _flag(request.streaming), 0
        try:
            while True:
                # Without a deadline on purpose: SGLang has none, the queues have theirs.
                output = await self._queue.get()
                if output.finish is not None and output.finish.message == NEVER_REACHED:
                    return
                if (
                    output.finish is not None
                    and output.finish.kind != "abort"
                    and self._worker.switchboard.process.loses_reply()
                ):
                    continue
                if output.tokens:
                    since_s = max(0.0, output.made_s - before_s)
                    if made:
                        metrics.gap.observe(since_s)
                    else:
                        metrics.ttft.observe(since_s, is_streaming=streaming)
                    before_s = output.made_s
                    made += len(output.tokens)
                if output.finish is not None and output.finish.kind != "abort":
                    took_s = time.monotonic() - request.arrived_s
                    metrics.e2e.observe(took_s, is_streaming=streaming)
                    metrics.requests.add(is_streaming=streaming)
                    metrics.prompt_tokens.add(len(request.prompt), is_streaming=streaming)
                    metrics.generated_tokens.add(made, is_streaming=streaming)
                    if request.cached:
                        metrics.cached_tokens.add(request.cached, cache_source="device")
                yield output
                if output.finish is not None:
                    return
        finally:
            watch.cancel()
            self._worker.done(request)


def open_request(
    worker: Host,
    body: Bootstrapped,
    prompt: list[int],
    sampling: WireSampling,
    *,
    max_new_tokens: int | None = MAX_NEW_TOKENS,
    scores: ScoresWanted | None = None,
) -> Live:
    """A request that may be served now; raises `RequestError` with the reason when it may not.

    `max_new_tokens` is the default where the client names none; None is all the context allows.
    """
    worker.check_open()
    model, settings = worker.model, worker.settings
    room, bootstrap = _meeting(worker, body)
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token")
    if len(prompt) >= model.context_length:
        raise _too_long(f"{len(prompt)} tokens", model.context_length)
    if max(prompt) >= model.vocabulary:
        raise RequestError(f"token {max(prompt)} is outside the vocabulary of {model.vocabulary}")
    room_left = model.context_length - len(prompt)
    wanted = sampling.max_new_tokens or max_new_tokens or room_left
    stops = (sampling.stop,) if isinstance(sampling.stop, str) else tuple(sampling.stop or ())
    ends = frozenset(sampling.stop_token_ids or ())
    queue: asyncio.Queue[Output] = asyncio.Queue()
    request = Request(
        rid=body.rid or uuid.uuid4().hex,
        prompt=prompt,
        sampling=_sampling(sampling),
        max_new_tokens=1 if settings.disaggregation_mode == "prefill" else min(wanted, room_left),
        text=TextStream(stops),
        stop_ids=ends if sampling.ignore_eos else ends | model.end_ids,
        room=room,
        bootstrap=bootstrap,
        arrived_s=time.monotonic(),
        streaming=bool(body.stream),
        scores=scores,
        deliver=queue.put_nowait,
    )
    return Live(worker, request, queue)


def tokens_of(worker: Host, text: str) -> list[int]:
    """The tokens of a prompt; raises `RequestError` for one that is too long by far.

    That one is not tokenized first: megabytes of text would stop the API for seconds (llama.cpp:
    25 s for 8 MB of one letter, 2 s for 100 KB of control tokens). So its beginning is looked at.
    """
    model = worker.model
    most = model.context_length
    if len(text) > most * PIECE_BYTES_MAX:
        raise _too_long(f"{len(text)} characters", most)
    size = most * BEGINNING_CHARACTERS
    while size < len(text):
        # Twice, because what a cut changes at its end must not matter.
        if len(model.tokenize(text[:size], special=True)) > 2 * most:
            raise _too_long(f"more than {most} tokens", most)
        size *= 2
    return model.tokenize(text, special=True)


def _too_long(what: str, context_length: int) -> RequestError:
    return RequestError(
        f"The input ({what}) is longer than the model's context length ({context_length} tokens)."
    )


def _meeting(worker: Host, body: Bootstrapped) -> tuple[int, str]:
    """The room and the bootstrap address of a request."""
    settings = worker.settings
    if body.bootstrap_room is None:
        raise RequestError(
            "Disaggregated request received without bootstrap room id; send it through a PD "
            "router, or give bootstrap_host, bootstrap_port and bootstrap_room to both sides"
        )
    host = body.bootstrap_host
    if host is None:
        if settings.disaggregation_mode == "decode":
            raise RequestError("bootstrap_host is missing: the decode cannot find the prefill")
        host = settings.host
    if not HOST.fullmatch(host) or any(
        not 0 < len(label) <= LABEL_MAX for label in host.removesuffix(".").split(".")
    ):
        raise RequestError(f"bootstrap_host {host[:64]!r} is not a host name")
    port = body.bootstrap_port or settings.disaggregation_bootstrap_port
    used = host != FAKE_BOOTSTRAP_HOST and body.bootstrap_room in worker.rooms
    if used and worker.switchboard.process.refuses_duplicates:
        raise RequestError(
            f"bootstrap_room {body.bootstrap_room} is in use; rooms are never reused"
        )
    return body.bootstrap_room, f"{host}:{port}"


def _sampling(wire: WireSampling) -> SamplingParams:
    try:
        return SamplingParams(
            temperature=1.0 if wire.temperature is None else wire.temperature,
            top_p=1.0 if wire.top_p is None else wire.top_p,
            top_k=-1 if wire.top_k is None else wire.top_k,
            seed=wire.seed if wire.seed is not None else wire.sampling_seed,
        )
    except ValueError as problem:
        raise RequestError(str(problem)) from None


async def _gone(receive: Receive, queue: "asyncio.Queue[Output]") -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    queue.put_nowait(Output(finish=Finish("abort", message=NEVER_REACHED)))


def _flag(value: bool) -> str:  # noqa: FBT001 - a label
    return "true" if value else "false"
