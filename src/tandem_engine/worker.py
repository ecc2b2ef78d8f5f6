"""One worker: model, scheduler, connections and HTTP, built in order and taken down in order.

For: `__main__.py`, and tests that run a prefill and a decode in one process.
Not for: any decision about requests.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from importlib import metadata

from tandem_engine.bootstrap import Bootstrap
from tandem_engine.collective import CollectiveError, Sizes
from tandem_engine.config import Settings, StartError, Timeouts
from tandem_engine.decode import Decode
from tandem_engine.faults import Switchboard
from tandem_engine.health import gives_output
from tandem_engine.host import State
from tandem_engine.http import Api
from tandem_engine.listeners import Listeners
from tandem_engine.loading import load_aside
from tandem_engine.lockstep import LockstepModel, Ranks, start_ranks
from tandem_engine.metrics import Metrics
from tandem_engine.model import Model, ModelError
from tandem_engine.prefill import Prefill
from tandem_engine.replies import RequestError
from tandem_engine.request import Finish, Outbox, Output, Request
from tandem_engine.roles import DecodeRole, PrefillRole, Role
from tandem_engine.scheduler import Scheduler, watchdog
from tandem_engine.wire import FAKE_BOOTSTRAP_HOST, Bootstrapped, Registration

log = logging.getLogger(__name__)
CONTEXT_LENGTH = 1024
"""Laptops first: a worker allocates KV for every sequence it may run, 22.5 KiB a token (SmolLM2),
and a decode as much shared memory again to land in. 8 sequences of 1024 stay below 300 MB."""
REQUESTS_MAX = 4096
"""More requests than this at a time are refused with 503."""
STOP_S = 2.0
DELAY_POLL_S = 0.05
STILL_S = 1.0
"""A drain ends early when no step was computed for this long."""
ENDED = "The worker ended."


@dataclasses.dataclass(frozen=True, slots=True)
class Core:
    """A loaded model and what runs over it."""

    model: Model
    role: Role
    scheduler: Scheduler

    @property
    def phase(self) -> Prefill | Decode:
        """The phase that the scheduler drives."""
        return self.role.phase

    def post(self, handler: Callable[..., None], *arguments: object) -> None:
        """Run a handler on the scheduler's thread."""
        self.scheduler.post(handler, *arguments)


class Worker:
    """A prefill or a decode."""

    def __init__(self, settings: Settings, timeouts: Timeouts, switchboard: Switchboard) -> None:
        """Bind the ports; raises `StartError`. Nothing is served before `start`."""
        self.switchboard = switchboard
        self.timeouts = timeouts
        self.state: State = "starting"
        self.started_s = time.time()
        self.version = f"{settings.metrics_era}+tandem.{_own_version()}"
        self.rooms: dict[int, Request] = {}
        self._active: set[Request] = set()
        prefill = settings.disaggregation_mode == "prefill"
        self._listeners = Listeners()
        port = self._listeners.bind("HTTP API", settings.host, settings.port)
        bootstrap = settings.disaggregation_bootstrap_port
        self._rank_port = 0
        if prefill:
            bootstrap = self._listeners.bind("bootstrap server", settings.host, bootstrap)
            self._rank_port = self._listeners.bind("control socket", settings.host, 0)
        self.settings = dataclasses.replace(
            settings, port=port, disaggregation_bootstrap_port=bootstrap
        )
        self.metrics = Metrics(
            settings.served_model_name, settings.disaggregation_mode, settings.metrics_era
        )
        switchboard.reporting.bind(self.metrics)
        self._bootstrap = Bootstrap() if prefill else None
        self._core: Core | None = None
        self._ranks: Ranks | None = None
        self._watches: set[asyncio.Task[None]] = set()
        self._killed = False
        self.torn = False
        """Whether something inside goes on (a load, a step): only the process can end it now."""
        self.fatal = asyncio.Event()
        """Set when the scheduler or a rank broke: the process should end."""

    @property
    def url(self) -> str:
        """Where the HTTP API answers."""
        return f"http://{self.settings.host}:{self.settings.port}"

    @property
    def context_length(self) -> int:
        """The longest sequence, tokens."""
        settings = self.settings
        return min(settings.context_length or CONTEXT_LENGTH, settings.max_total_tokens)

    @property
    def core(self) -> "Core":
        """What runs once the model is loaded; raises `RequestError` (503) before."""
        if self._core is None:
            raise RequestError("the worker is starting; try later", 503)
        return self._core

    @property
    def model(self) -> Model:
        """The model; raises as `core` does."""
        return self.core.model

    @property
    def readings(self) -> Role:
        """The live numbers; raises as `core` does."""
        return self.core.role

    # --- Life ---

    async def start(self) -> None:
        """Serve HTTP, load the model, start the scheduler, register; raises `StartError`."""
        self._loop = asyncio.get_running_loop()
        # SGLang's order: the rendezvous and the API answer (503) before the model has loaded.
        if self._bootstrap is not None:
            self._listeners.serve("bootstrap server", self._bootstrap.app)
        self._listeners.serve("HTTP API", Api(self).app)
        model = await self._load()
        model.identity = self.switchboard.handoff.identity(model.identity)
        self._core = self._assemble(model)
        self._watch(watchdog(self._core.scheduler, self.settings.watchdog_s, self._broken))
        if self._ranks is not None:
            self._watch(self._ranks.watch(self._broken))
        if self._bootstrap is not None:
            self._bootstrap.register(self._registration(model))
        self.state = "ready"
        log.info("The server is fired up and ready to roll!")

    async def _load(self) -> Model:
        """The model, in lock step with the other ranks when there are any; raises `StartError`."""
        settings = self.settings
        sizes = Sizes(
            self.context_length, settings.max_running_requests + 1, settings.max_total_tokens
        )
        try:
            if settings.ranks > 1:
                self._ranks = await start_ranks(settings.ranks - 1, sizes)
            self.torn = True
            model = await load_aside(settings.model_path, sizes)
            self.torn = False
            loaded_s = time.monotonic()
            while time.monotonic() - loaded_s < self.switchboard.process.switches.start_delay_s:
                await asyncio.sleep(DELAY_POLL_S)
            if self._ranks is None:
                return model
            return await asyncio.to_thread(
                LockstepModel, model, self._ranks.hub, self.switchboard.compute.apart
            )
        except (ModelError, CollectiveError, OSError) as problem:
            self.torn = False
            raise StartError(str(problem)) from problem

    def _watch(self, watch: Coroutine[None, None, None]) -> None:
        self._watches.add(asyncio.create_task(watch))

    def _assemble(self, model: Model) -> "Core":
        """Everything over a loaded model, running; raises `StartError`."""
        outbox = Outbox(self._loop)
        role: Role
        if self.settings.disaggregation_mode == "prefill":
            role = PrefillRole(self, model, outbox, self._listeners.socket("control socket"))
        else:
            role = DecodeRole(self, model, outbox)
        scheduler = Scheduler(
            model,
            role.phase,
            outbox,
            overlap=not self.settings.disable_overlap_schedule,
            died=self._died,
            held=self.switchboard.compute.held,
            # So that a look at the stacks finds rank 0 among the others (`scheduler_TP1`, ...).
            rank=" TP0" if self._ranks is not None else "",
        )
        role.bind(scheduler.post)
        scheduler.start()
        return Core(model, role, scheduler)

    def _registration(self, model: Model) -> Registration:
        return Registration(
            rank_ip=self.settings.host,
            rank_port=self._rank_port,
            page_size=model.identity.page_size,
            kv_cache_dtype=model.identity.kv_dtype,
            prefill_http_port=self.settings.port,
        )

    async def stop(self) -> str:
        """Stop admitting, finish what moves within the drain time, fail the rest, let go of all.

        What had to be cut off, in a few words; empty when everything ended by itself.
        """
        cut = ["the model was still loading"] if self.torn else []
        if self.state == "ready":
            self.state = "draining"
            drain_s = self.settings.drain_timeout_s
            moves = await self._until_empty(drain_s)
            if self._active:
                why = f"not done in {drain_s:g} s" if moves else f"nothing moved for {STILL_S:g} s"
                cut.append(f"requests cut off: {len(self._active)} ({why})")
            self._let_go()
            self.abort("", everything=True)
            await self._until_empty(STOP_S)
        await self.kill(clean=True)
        if self.torn and self._core is not None:
            cut.append("a thread inside never returned and ends with the process")
        return "; ".join(cut)

    async def kill(self, *, clean: bool = False) -> None:
        """End at once, as a killed process would; `clean` also removes the landing's memory."""
        core, killed = self._core, self._killed
        self._killed = True
        for watch in self._watches:
            watch.cancel()
        if self._ranks is not None and (not clean or core is None or core.scheduler.stepping):
            self._ranks.close()
        if clean:
            self._hang_up()
        if core is not None and not killed:
            self._let_go()
            ended = await asyncio.to_thread(core.scheduler.stop)
            await asyncio.to_thread(core.role.close, clean=clean)
            if ended:
                core.model.close()
            self.torn = not ended
        if self._ranks is not None:
            await self._ranks.end()
        self.state = "dead"
        await self._listeners.stop(clean=clean)

    def _let_go(self) -> None:
        """What waits without a bound returns, so that it can be told to end."""
        self.core.role.let_go()
        self.core.scheduler.let_go()

    def _hang_up(self) -> None:
        """Answer the clients whom the scheduler does not: it hangs, or is gone."""
        for request in self._active:
            request.deliver(Output(finish=Finish("abort", message=ENDED, status=503)))

    async def _until_empty(self, timeout_s: float) -> bool:
        """Wait for the last request, as long as something moves: what hangs is not waited for.

        Whether anything still moved at the end.
        """
        scheduler, moved_s = self.core.scheduler, time.monotonic()
        deadline_s, outputs = moved_s + timeout_s, scheduler.outputs
        while self._active and time.monotonic() < min(deadline_s, moved_s + STILL_S):
            await asyncio.sleep(0.02)
            if scheduler.stepping or scheduler.outputs != outputs:
                moved_s, outputs = time.monotonic(), scheduler.outputs
        return time.monotonic() < moved_s + STILL_S

    def _died(self, problem: BaseException) -> None:
        """The scheduler's thread broke: the worker must not stay half alive."""
        if self._killed:
            return
        log.error("Scheduler hit an exception", exc_info=problem)
        self._loop.call_soon_threadsafe(self._broken)

    def _broken(self) -> None:
        self.state = "dead"
        self.fatal.set()

    # --- Requests ---

    def check_open(self) -> None:
        """Raise `RequestError` (503) unless requests are admitted now."""
        if self.state != "ready":
            raise RequestError(f"the worker is {self.state}; try another one, or later", 503)
        if len(self._active) >= REQUESTS_MAX:
            raise RequestError(f"{REQUESTS_MAX} requests are waiting here; try later", 503)

    def submit(self, request: Request) -> None:
        """Hand a request to the scheduler."""
        self._active.add(request)
        handler: Callable[[Request], None] = self.core.phase.submit
        if not request.fake:
            if request.room in self.rooms and self.switchboard.process.refuses_duplicates:
                # Both were let in before either was submitted.
                request.answered = True
                message = f"bootstrap_room {request.room} is in use; rooms are never reused"
                request.deliver(Output(finish=Finish("abort", message=message, status=400)))
                return
            if request.room in self.rooms:
                handler = _duplicate
            self.rooms[request.room] = request
        self.core.post(handler, request)

    def refused(self, body: Bootstrapped, reason: str) -> None:
        """A request was refused: the other side must not wait for its room."""
        room, host = body.bootstrap_room, body.bootstrap_host or self.settings.host
        if self._core is None or self.state == "dead" or room is None or room in self.rooms:
            return
        if host == FAKE_BOOTSTRAP_HOST:
            return  # there is no other side, and the number may be somebody's real room
        port = body.bootstrap_port or self.settings.disaggregation_bootstrap_port
        self.core.post(self.core.phase.refuse, room, f"{host}:{port}", reason)

    def done(self, request: Request) -> None:
        """The connection of a request is served or gone."""
        self._active.discard(request)
        if not request.answered and self.state != "dead":
            self.core.post(self.core.phase.left, request)

    def room_ended(self, request: Request) -> None:
        """Nothing is held for this request any more; called on the scheduler's thread."""
        if self.rooms.get(request.room) is request:
            del self.rooms[request.room]
        if not request.fake:
            self.switchboard.resources.ended()
            self.switchboard.process.ended(self.core.scheduler.end)

    def abort(self, rid: str, *, everything: bool) -> None:
        """Abort requests by (the beginning of) their id, or all."""
        self.core.post(partial(self.core.phase.abort, rid, everything=everything))

    def flush_cache(self) -> None:
        """Drop the prefixes kept for reuse."""
        self.core.post(self.core.phase.flush_cache)

    async def healthy(self) -> bool:
        """SGLang's health: some output of the scheduler within 20 s, by a fake request if need be.

        The fake request bypasses the rendezvous and the hand-off, so a pair that is stalled there
        is healthy.
        """
        if self.switchboard.reporting.always_green and self.state != "starting":
            return True
        if self.state != "ready":
            return False
        return await gives_output(
            self.core.scheduler,
            self.core.phase,
            self.switchboard,
            timeout_s=self.timeouts.health_s,
            ready=lambda: self.state == "ready",
        )

    async def turn(self) -> None:
        """Return when the scheduler has handled everything posted before."""
        turned: asyncio.Future[None] = self._loop.create_future()

        def answer() -> None:
            self._loop.call_soon_threadsafe(turned.set_result, None)

        self.core.post(answer)
        if self.state != "dead":
            await turned

    def held(self) -> dict[str, int]:
        """What is held for requests now, by name: all zero when the worker is idle."""
        return {"rooms": len(self.rooms), "requests": len(self._active)} | self.core.role.held()

    def exposed_metrics(self) -> str:
        """The page of `/metrics`."""
        if self._core is not None:
            idle = self.metrics.idle_seconds
            idle.add(max(0.0, self._core.scheduler.idle_s - idle.value()))
        return self.metrics.exposed()


def _duplicate(request: Request) -> None:
    """On the scheduler's thread: two requests cannot meet in one room."""
    raise KeyError(f"bootstrap_room {request.room} is in use")


def _own_version() -> str:
    try:
        return metadata.version("tandem-pd")
    except metadata.PackageNotFoundError:
        return "0"
