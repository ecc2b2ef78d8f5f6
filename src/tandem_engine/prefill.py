"""The prefill phase: prompts in, KV and one token out to a decode.

A request waits in the bootstrap queue for its decode's metadata and a hand-off slot, then for a
sequence and cells, is computed in chunks of at most 256 tokens (short prompts share a step), and is
posted to its decode. Its client is answered only after the decode acknowledged the KV.

For: the queues, the steps and what comes of them. Everything here runs on the scheduler's thread.
Not for: slots, agents and acknowledgements (`handoffs.py`).
"""

import logging
import time
from collections import deque
from collections.abc import Callable

from tandem_engine import scoring
from tandem_engine.accounting import Accounting
from tandem_engine.config import Settings, Timeouts
from tandem_engine.faults import Switchboard
from tandem_engine.handoff import HandoffError
from tandem_engine.handoff.header import Header
from tandem_engine.handoffs import DECODE_DEAD, Handoffs, Settled, timed_out
from tandem_engine.metrics import Metrics
from tandem_engine.model import Feed, KvExhaustedError, Logits, Model, ModelError
from tandem_engine.request import Finish, Outbox, Output, Phase, Request
from tandem_engine.sampling import sample
from tandem_engine.scheduler import Step
from tandem_engine.sequences import Sequences

log = logging.getLogger(__name__)
POLL_S = 0.002
POLL_SLOW_S = 0.02
POLL_SLOW_AFTER_S = 1.0
SCORED_CHUNK_TOKENS_MAX = 64
"""Rows of logits kept at a time when a prompt is scored: 64 x 49k floats are 12 MB."""
ABORTED = "Aborted by AbortReq."


class Prefill:
    """Drives the prefill phase over one model."""

    def __init__(
        self,
        model: Model,
        settings: Settings,
        timeouts: Timeouts,
        *,
        metrics: Metrics,
        outbox: Outbox,
        handoffs: Handoffs,
        ended: Callable[[Request], None],
        faults: Switchboard,
    ) -> None:
        """`ended` hears of every request that holds nothing any more."""
        self._model = model
        self._settings = settings
        self._timeouts = timeouts
        self._metrics = metrics
        self._outbox = outbox
        self._handoffs = handoffs
        self._ended = ended
        self._faults = faults
        self.sequences = Sequences(
            model, keep=model.sequences_max, poisoned=faults.corruption.poisoned
        )
        self.bootstrap: dict[int, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._computed: deque[Request] = deque()
        self.inflight: dict[int, Request] = {}
        self._left: list[Request] = []
        self._leaked: set[Request] = set()
        self._moved_s = 0.0
        self._flush = False
        self.accounting = Accounting(self, model, settings, metrics)

    # --- Events: the model may be computing ---

    def submit(self, request: Request) -> None:
        """A client's request."""
        now_s = time.monotonic()
        if request.fake:
            request.enter(Phase.PREFILL_WAITING, now_s)
            self.waiting.appendleft(request)
            return
        request.enter(Phase.BOOTSTRAP, now_s)
        self.bootstrap[request.room] = request
        reason = self._handoffs.why_ended(request.room)
        if reason is not None:
            self.failed(request.room, reason)

    def abort(self, rid: str, *, everything: bool = False) -> None:
        """A client left, or asked for an abort by (the beginning of) its request id."""
        for request in list(self.requests()):
            if everything or request.rid.startswith(rid):
                self.left(request)

    def refuse(self, room: int, _bootstrap: str, reason: str) -> None:
        """This side of a room was refused before it was a request: its decode hears of it."""
        self._handoffs.drop(room, f"refused by the prefill: {reason}")

    def left(self, request: Request) -> None:
        """The client of this request is gone."""
        if not request.answered:
            self._faults.compute.aborted()
            self._metrics.aborted.add()
            self._give_up(request)

    def failed(self, room: int, reason: str) -> None:
        """A room ended by its decode: tell the client and forget the request."""
        request = self.bootstrap.get(room) or self.inflight.get(room)
        if request is None:
            request = next((r for r in self.requests() if r.room == room and not r.fake), None)
        if request is not None and request.live:
            self._fail(request, reason)

    def _fail(self, request: Request, reason: str) -> None:
        """Tell the client of a live request that its room ended, and forget it."""
        what = "bootstrap" if request.phase is Phase.BOOTSTRAP else "transfer"
        metrics = self._metrics
        (metrics.bootstrap_failed if what == "bootstrap" else metrics.transfer_failed).add()
        message = (
            f"Prefill {what} failed for request rank=0 req.rid={request.rid!r} "
            f"req.bootstrap_room={request.room} with exception "
            f"KVTransferError(bootstrap_room={request.room}): {reason}"
        )
        log.warning(message)
        self._outbox.put(request, Output(finish=Finish("abort", message=message)))
        self._end(request)

    def flush_cache(self) -> None:
        """Drop every prefix kept for reuse; done when the model is idle."""
        self._flush = True

    def requests(self) -> list[Request]:
        """Every request that is in a queue or runs."""
        return [
            *self.bootstrap.values(), *self.waiting, *self.running, *self._computed,
            *self.inflight.values(),
        ]  # fmt: skip

    def _give_up(self, request: Request) -> None:
        """The client is gone. A room that is posted in a historical mode goes on without it."""
        if self._handoffs.pinned(request.room):
            self._metrics.transfer_failed.add()
            self._outbox.put(request, Output(finish=Finish("abort", message=ABORTED)))
            return
        if not request.fake:
            self._handoffs.drop(request.room, ABORTED)
        if request.phase in (Phase.BOOTSTRAP, Phase.INFLIGHT):
            self.failed(request.room, ABORTED)
        else:
            self._outbox.put(request, Output(finish=Finish("abort", message=ABORTED)))
            self._end(request)

    def _end(self, request: Request) -> None:
        """Forget a request; its sequence goes back when the model idles."""
        if not request.live:
            return
        request.enter(Phase.ENDED, time.monotonic())
        if not request.fake:
            self.bootstrap.pop(request.room, None)
            if request.room in self.inflight and self._faults.resources.leaks_room():
                self._leaked.add(request)
            else:
                self.inflight.pop(request.room, None)
        if request in self.waiting:
            self.waiting.remove(request)
        self._left.append(request)

    # --- The model is idle ---

    def prepare(self, now_s: float) -> None:
        """Take acknowledgements; move rooms that have their metadata and a slot on."""
        for settled in self._handoffs.settled():
            self._settle(settled, now_s)
        for room, request in list(self.bootstrap.items()):
            since_s = self._handoffs.take_slot(room)
            if since_s is not None:
                del self.bootstrap[room]
                self._metrics.transfer_bootstrap_ms.observe((now_s - request.arrived_s) * 1e3)
                self._metrics.stage.observe(
                    now_s - request.phase_since_s, stage="prefill_bootstrap"
                )
                request.enter(Phase.PREFILL_WAITING, now_s)
                self.waiting.append(request)

    def tend(self, now_s: float) -> None:
        """Release, post what was computed, time out."""
        for request in self._left:
            self._release(request, keep=False)
            if request not in self._leaked:
                self._ended(request)
        self._left.clear()
        while self._leaked and self._faults.resources.frees_rooms:
            leaked = self._leaked.pop()
            self.inflight.pop(leaked.room, None)
            self._ended(leaked)
        if self._flush:
            self._flush = False
            self.sequences.flush()
        foreign = self._faults.corruption.crosswired(self._model, self._computed)
        while self._computed:
            request = self._computed.popleft()
            self._post(request, foreign.get(request.sequence), now_s)
        self._handoffs.expire(now_s, self._timeouts.bootstrap_s, self.bootstrap)
        for room, request in list(self.bootstrap.items()):
            waited_s = now_s - request.phase_since_s
            if waited_s > self._timeouts.bootstrap_s and not self._handoffs.asked_for(room):
                reason = timed_out(room, waited_s, "Bootstrapping")
                self._handoffs.drop(room, reason)
                self.failed(room, reason)

    def _release(self, request: Request, *, keep: bool) -> None:
        if request.sequence >= 0:
            kept = request.prompt[: self._model.length(request.sequence)] if keep else ()
            self.sequences.release(request.sequence, kept)
            request.sequence = -1

    def _post(self, request: Request, foreign: bytes | None, now_s: float) -> None:
        """Write the KV of a computed prompt to its decode; `foreign` KV is a fault's."""
        if not request.live:
            return
        if request.fake:
            self._release(request, keep=False)
            self._succeed(request)
            return
        header = Header(
            self._model.identity,
            request.room,
            tokens=len(request.prompt),
            first_token=request.output[0],
            cached_tokens=request.cached,
            extra=scoring.packed(request.first_score),
        )
        header = self._faults.corruption.metadata(header)
        sequence = request.sequence
        size_bytes = self._model.kv_size(sequence) if foreign is None else len(foreign)

        def export(into: memoryview) -> int:
            if foreign is None:
                return self._model.export_kv(sequence, into)
            into[:size_bytes] = foreign
            return size_bytes

        try:
            self._handoffs.write(request.room, header, size_bytes, export)
        except HandoffError as problem:
            reason = f"Failed to send kv chunk of {request.room}: {problem}"
            self._handoffs.drop(request.room, reason)
            self._fail(request, reason)
            return
        # The bytes are the decode's now; ours may serve the conversation's next turn.
        self._release(request, keep=True)
        self._metrics.stage.observe(now_s - request.phase_since_s, stage="prefill_forward")
        request.enter(Phase.INFLIGHT, now_s)
        self.inflight[request.room] = request
        self._moved_s = now_s

    def _settle(self, settled: Settled, now_s: float) -> None:
        self._moved_s = now_s
        request = self.inflight.get(settled.room)
        if request is None:
            return
        if not settled.taken:
            self.failed(settled.room, DECODE_DEAD)
            return
        self.accounting.transferred(settled)
        self._succeed(request)

    def _succeed(self, request: Request) -> None:
        token = request.output[0]
        text = request.text.push(self._model.piece(token), last=True)
        scores = (request.first_score,) if request.first_score is not None else ()
        finish = Finish("length", matched=request.max_new_tokens)
        self._outbox.put(request, Output((token,), text, scores, finish, time.monotonic()))
        self._end(request)

    def plan(self, now_s: float) -> Step | None:
        """Chunks of running and waiting prompts, at most `chunked_prefill_size` tokens together."""
        self.running = [request for request in self.running if request.live]
        step = Step([], [], now_s)
        room = self._settings.chunked_prefill_size
        for request in self.running:
            room = self._feed(step, request, room)
        orphans = self._faults.process.orphans
        for request in list(self.waiting):
            if room <= 0:
                break
            if request in orphans:
                continue
            if not request.live:
                self.waiting.remove(request)
                continue
            if len(self.running) >= self._settings.max_running_requests or not self._admit(
                request, now_s
            ):
                break
            if self._chunk(request) > room:
                break
            self.waiting.remove(request)
            self.running.append(request)
            room = self._feed(step, request, room)
        return step if step.feeds else None

    def _admit(self, request: Request, now_s: float) -> bool:
        if request.sequence >= 0:
            return True
        reuse_max = 0 if request.fake else len(request.prompt) - 1
        if request.scores is not None:
            reuse_max = min(reuse_max, request.scores.start)
        held = self.sequences.acquire(request.prompt, len(request.prompt), reuse_max)
        if held is None:
            return False
        request.sequence, request.cached, request.computed = held.sequence, held.reused, held.reused
        self._metrics.queue_time.observe(now_s - request.phase_since_s)
        if not request.fake:
            self._metrics.transfer_alloc_ms.observe((now_s - request.phase_since_s) * 1e3)
        self._metrics.stage.observe(now_s - request.phase_since_s, stage="prefill_waiting")
        request.enter(Phase.PREFILLING, now_s)
        return True

    def _chunk(self, request: Request) -> int:
        """Tokens of the next chunk; its bounds depend on this prompt alone."""
        most = self._settings.chunked_prefill_size
        if request.scores is not None and request.scores.start < len(request.prompt):
            most = min(most, SCORED_CHUNK_TOKENS_MAX)
        return min(most, len(request.prompt) - request.computed)

    def _feed(self, step: Step, request: Request, room: int) -> int:
        size = self._chunk(request)
        if not 0 < size <= room:
            return room
        begin, end = request.computed, request.computed + size
        wanted = request.scores is not None and request.scores.start < end
        last = end == len(request.prompt)
        step.feeds.append(
            Feed(
                request.sequence,
                request.prompt[begin:end],
                begin,
                "all" if wanted else "last" if last else "none",
            )
        )
        step.requests.append(request)
        return room - size

    # --- Results ---

    def sample(self, step: Step, logits: list[Logits]) -> None:
        """Sample the first token of prompts that are complete."""
        step.rows = list(logits)
        for request, feed, rows in zip(step.requests, step.feeds, logits, strict=True):
            request.computed += len(feed.tokens)
            if request.computed == len(request.prompt) and request.live:
                token = sample(rows[-1], request.sampling, scoring.rng_of(request.sampling, 0))
                request.output.append(token)
                if request.scores is not None:
                    request.first_score = scoring.score(rows[-1], token, request.scores.top)
                self.running.remove(request)
                self._computed.append(request)

    def process(self, step: Step) -> None:
        """Score prompts, count, log, refresh the gauges."""
        self.accounting.process(step)

    def refused(self, step: Step, problem: ModelError) -> None:
        """The model refused: make room, or fail the requests of the step."""
        if isinstance(problem, KvExhaustedError) and self.sequences.flush():
            return
        for request in step.requests:
            reason = f"the model refused the step: {problem}"
            if not request.fake:
                self._handoffs.drop(request.room, reason)
            self._outbox.put(request, Output(finish=Finish("abort", message=reason)))
            self._end(request)

    def idle(self, now_s: float) -> float:
        """Poll fast while something moved lately, slowly for what hangs, not at all otherwise."""
        queued = bool(self.bootstrap or self.waiting or self.running or self.inflight)
        self.accounting.idle(now_s, queued=queued)
        if self._left or self._computed:
            return 0.0
        if self._handoffs.held:
            return POLL_S if now_s - self._moved_s < POLL_SLOW_AFTER_S else POLL_SLOW_S
        return self._timeouts.heartbeat_s / 4
