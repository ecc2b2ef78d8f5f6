"""One worker: model, scheduler, connections and HTTP, built in order and taken down in order.

For: `__main__.py`, and tests that run a prefill and a decode in one process.
Not for: any decision about requests.
"""

import asyncio
import contextlib
import dataclasses
import logging
import socket
import time
import uuid
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from typing import Any, Literal

import uvicorn
from starlette.applications import Starlette

from tandem_engine.bootstrap import Bootstrap
from tandem_engine.config import Settings, StartError, Timeouts
from tandem_engine.faults import Switchboard
from tandem_engine.http import Api
from tandem_engine.metrics import Metrics
from tandem_engine.model import Model, ModelError, load_model
from tandem_engine.replies import RequestError
from tandem_engine.request import HEALTH_RID_PREFIX, Outbox, Output, Request
from tandem_engine.roles import DecodeRole, PrefillRole
from tandem_engine.sampling import SamplingParams
from tandem_engine.scheduler import Scheduler
from tandem_engine.text import TextStream
from tandem_engine.wire import FAKE_BOOTSTRAP_HOST, Load, MemoryLoad, QueueLoad, Registration

log = logging.getLogger(__name__)
SGLANG_ERA = "0.5.23"
CONTEXT_LENGTH = 2048
REQUESTS_MAX = 4096
"""More requests than this at a time are refused with 503."""
STOP_S = 2.0
STILL_S = 1.0
"""A drain ends early when no step was computed for this long."""

State = Literal["starting", "ready", "draining", "dead"]


class _Server(uvicorn.Server):
    """Signals belong to `__main__.py`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield


def listen(host: str, port: int, what: str) -> socket.socket:
    """A bound, listening socket; raises `StartError` when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle off on what it accepts: 40 ms a reply otherwise.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as problem:
        listener.close()
        raise StartError(
            f"the {what} cannot listen on {host}:{port}: {problem.strerror}; "
            f"free the port or give another one"
        ) from problem
    listener.setblocking(False)  # noqa: FBT003 - the socket module's own signature
    return listener


class Worker:
    """A prefill or a decode."""

    model: Model

    def __init__(self, settings: Settings, timeouts: Timeouts, switchboard: Switchboard) -> None:
        """Bind the ports; raises `StartError`. Nothing is served before `start`."""
        self.switchboard = switchboard
        self.timeouts = timeouts
        self.state: State = "starting"
        self.started_s = time.time()
        self.version = f"{SGLANG_ERA}+tandem.{_own_version()}"
        self.rooms: dict[int, Request] = {}
        self._active: set[Request] = set()
        self._listeners = {"api": listen(settings.host, settings.port, "HTTP API")}
        prefill = settings.disaggregation_mode == "prefill"
        try:
            if prefill:
                port = settings.disaggregation_bootstrap_port
                self._listeners["bootstrap"] = listen(settings.host, port, "bootstrap server")
                self._listeners["rank"] = listen(settings.host, 0, "control socket")
        except StartError:
            self._listeners["api"].close()
            raise
        ports = {name: one.getsockname()[1] for name, one in self._listeners.items()}
        self.settings = dataclasses.replace(
            settings,
            port=ports["api"],
            disaggregation_bootstrap_port=ports.get(
                "bootstrap", settings.disaggregation_bootstrap_port
            ),
        )
        self._killed = False
        self._rank_port = ports.get("rank", 0)
        self.metrics = Metrics(settings.served_model_name, settings.disaggregation_mode)
        self._bootstrap = Bootstrap() if prefill else None
        self._servers: list[tuple[_Server, asyncio.Task[None]]] = []
        self.fatal = asyncio.Event()

    @property
    def url(self) -> str:
        """Where the HTTP API answers."""
        return f"http://{self.settings.host}:{self.settings.port}"

    # --- Life ---

    async def start(self) -> None:
        """Serve HTTP, load the model, start the scheduler, register; raises `StartError`."""
        self._loop = asyncio.get_running_loop()
        # SGLang's order: the rendezvous and the API answer (503) before the model has loaded.
        if self._bootstrap is not None:
            self._serve(self._bootstrap.app, "bootstrap")
        self._serve(Api(self).app, "api")
        settings = self.settings
        prefill = settings.disaggregation_mode == "prefill"
        sequences = settings.max_running_requests + 1
        context = min(settings.context_length or CONTEXT_LENGTH, settings.max_total_tokens)
        try:
            self.model = await asyncio.to_thread(
                load_model,
                settings.model_path,
                context_length=context,
                sequences_max=sequences,
                cells=settings.max_total_tokens,
            )
        except ModelError as problem:
            raise StartError(str(problem)) from problem
        outbox = Outbox(self._loop)
        role = PrefillRole if prefill else DecodeRole
        self._role = role(self, outbox, self._listeners.get("rank"))
        self._scheduler = Scheduler(
            self.model,
            self._role.phase,
            outbox,
            overlap=not settings.disable_overlap_schedule,
            died=self._died,
        )
        self._role.bind(self._scheduler.post)
        self._scheduler.start()
        if self._bootstrap is not None:
            self._bootstrap.register(self._registration())
        self.state = "ready"
        log.info("The server is fired up and ready to roll!")

    def _registration(self) -> Registration:
        return Registration(
            rank_ip=self.settings.host,
            rank_port=self._rank_port,
            page_size=self.model.identity.page_size,
            kv_cache_dtype=self.model.identity.kv_dtype,
            prefill_http_port=self.settings.port,
        )

    def _serve(self, app: Starlette, listener: str) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=65,
            timeout_graceful_shutdown=1,
        )
        server = _Server(config)
        task = asyncio.create_task(server.serve(sockets=[self._listeners[listener]]))
        self._servers.append((server, task))

    async def stop(self) -> None:
        """Stop admitting, finish what moves within the drain time, fail the rest, let go of all."""
        if self.state == "ready":
            self.state = "draining"
            await self._until_empty(self.settings.drain_timeout_s)
            self.abort("", everything=True)
            await self._until_empty(STOP_S)
        await self.kill(clean=True)

    async def kill(self, *, clean: bool = False) -> None:
        """End at once, as a killed process would; `clean` also removes the landing's memory."""
        if hasattr(self, "_scheduler") and not self._killed:
            self._killed = True
            await asyncio.to_thread(self._scheduler.stop)
            await asyncio.to_thread(self._role.close, clean=clean)
            self.model.close()
        self.state = "dead"
        for server, _ in self._servers:
            server.should_exit = True
            server.force_exit = not clean
        if self._servers:
            await asyncio.wait([task for _, task in self._servers], timeout=STOP_S)
        for server, _ in self._servers:
            # A process that ends closes its connections; one that goes on has to do it.
            for connection in list(server.server_state.connections):
                if connection.transport is not None:
                    connection.transport.abort()
        for listener in self._listeners.values():
            listener.close()

    async def _until_empty(self, timeout_s: float) -> None:
        """Wait for the last request, as long as something moves: what hangs is not waited for."""
        moved_s = time.monotonic()
        deadline_s, outputs = moved_s + timeout_s, self._scheduler.outputs
        while self._active and time.monotonic() < min(deadline_s, moved_s + STILL_S):
            await asyncio.sleep(0.02)
            if self._scheduler.stepping or self._scheduler.outputs != outputs:
                moved_s, outputs = time.monotonic(), self._scheduler.outputs

    def _died(self, problem: BaseException) -> None:
        """The scheduler's thread broke: the worker must not stay half alive."""
        log.error("Scheduler hit an exception", exc_info=problem)
        self.state = "dead"
        self._loop.call_soon_threadsafe(self.fatal.set)

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
        if not request.fake:
            self.rooms[request.room] = request
        self._scheduler.post(self._role.phase.submit, request)

    def done(self, request: Request) -> None:
        """The connection of a request is served or gone."""
        self._active.discard(request)
        if not request.answered and self.state != "dead":
            self._scheduler.post(self._role.phase.left, request)

    def room_ended(self, request: Request) -> None:
        """Nothing is held for this request any more; called on the scheduler's thread."""
        if self.rooms.get(request.room) is request:
            del self.rooms[request.room]

    def abort(self, rid: str, *, everything: bool) -> None:
        """Abort requests by (the beginning of) their id, or all."""
        self._scheduler.post(partial(self._role.phase.abort, rid, everything=everything))

    def flush_cache(self) -> None:
        """Drop the prefixes kept for reuse."""
        self._scheduler.post(self._role.phase.flush_cache)

    async def healthy(self) -> bool:
        """SGLang's health: some output of the scheduler within 20 s, by a fake request if need be.

        The fake request bypasses the rendezvous and the hand-off, so a pair that is stalled there
        is healthy.
        """
        if self.state != "ready":
            return False
        before = self._scheduler.outputs
        answers: asyncio.Queue[Output] = asyncio.Queue()
        probe = Request(
            rid=f"{HEALTH_RID_PREFIX}_{uuid.uuid4().hex}",
            prompt=[0],
            sampling=SamplingParams(temperature=0.0),
            max_new_tokens=1,
            text=TextStream(),
            stop_ids=frozenset(),
            room=0,
            bootstrap=f"{FAKE_BOOTSTRAP_HOST}:0",
            arrived_s=time.monotonic(),
            deliver=answers.put_nowait,
        )
        # A busy scheduler answers by its next step, as SGLang's does.
        if not self._role.phase.running:
            self._scheduler.post(self._role.phase.submit, probe)
        deadline_s = time.monotonic() + self.timeouts.health_s
        while time.monotonic() < deadline_s and self.state == "ready":
            if self._scheduler.outputs > before:
                return True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(answers.get(), 0.05)
        if self.state == "ready":
            self._scheduler.post(self._role.phase.left, probe)
            log.error(
                "Health check failed. Server couldn't get a response from detokenizer for last %d "
                "seconds.",
                self.timeouts.health_s,
            )
        return False

    async def turn(self) -> None:
        """Return when the scheduler has handled everything posted before."""
        turned: asyncio.Future[None] = self._loop.create_future()

        def answer() -> None:
            self._loop.call_soon_threadsafe(turned.set_result, None)

        self._scheduler.post(answer)
        if self.state != "dead":
            await turned

    def held(self) -> dict[str, int]:
        """What is held for requests now, by name: all zero when the worker is idle."""
        return {"rooms": len(self.rooms), "requests": len(self._active)} | self._role.held()

    # --- What the info routes show ---

    def load(self) -> Load:
        """The present load, computed now: `/v1/loads` never freezes."""
        if self.state == "starting" or not hasattr(self, "_role"):
            raise RequestError("the worker is starting", 503)
        phase = self._role
        gauges, model = phase.gauges(), self.model
        pending = phase.pending_tokens()
        waiting = gauges.num_queue_reqs + gauges.num_decode_prealloc_queue_reqs
        return Load(
            num_running_reqs=gauges.num_running_reqs,
            num_waiting_reqs=waiting,
            num_waiting_uncached_tokens=pending,
            num_used_tokens=gauges.num_used_tokens,
            num_total_tokens=gauges.num_used_tokens + pending,
            max_total_num_tokens=model.cells,
            max_running_requests=self.settings.max_running_requests,
            token_usage=round(gauges.token_usage, 4),
            gen_throughput=round(gauges.gen_throughput, 2),
            cache_hit_rate=round(gauges.cache_hit_rate, 4),
            utilization=round(gauges.utilization, 4),
            memory=MemoryLoad(0.0, 0.0, 0.0, model.cells),
            disaggregation=phase.disaggregation(),
            queues=QueueLoad(waiting=waiting, retracted=gauges.num_retracted_reqs),
        )

    def exposed_metrics(self) -> str:
        """The page of `/metrics`."""
        if hasattr(self, "_scheduler"):
            idle = self.metrics.idle_seconds
            idle.add(max(0.0, self._scheduler.idle_s - idle.value()))
        return self.metrics.exposed()

    def server_info(self) -> dict[str, object]:
        """Server arguments, state, version: what a router and an operator ask for."""
        states: list[dict[str, Any]] = []
        if self.state != "starting":
            load = self.load()
            states.append(
                {
                    "last_gen_throughput": load.gen_throughput,
                    "disaggregation_mode": self.settings.disaggregation_mode,
                    "effective_max_running_requests_per_dp": self.settings.max_running_requests,
                    "memory_usage": {"token_capacity": self.model.cells},
                }
            )
        return self._described() | {
            "version": self.version,
            "engine": "tandem_engine",
            "startup_time": self.started_s,
            "status": self.state,
            "max_total_num_tokens": self.settings.max_total_tokens,
            "internal_states": states,
        }

    def _described(self) -> dict[str, object]:
        shown = self.settings.described()
        if hasattr(self, "model"):
            shown["kv_cache_dtype"] = self.model.identity.kv_dtype
            shown["page_size"] = self.model.identity.page_size
            shown["context_length"] = self.model.context_length
        return shown

    def model_info(self) -> dict[str, object]:
        """What `/model_info` shows."""
        return {
            "model_path": self.settings.model_path,
            "tokenizer_path": self.settings.model_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
        }

    def models(self) -> dict[str, object]:
        """What `/v1/models` shows."""
        card = {
            "id": self.settings.served_model_name,
            "object": "model",
            "created": int(self.started_s),
            "owned_by": "sglang",
            "root": self.settings.served_model_name,
            "parent": None,
            "max_model_len": self.settings.context_length or CONTEXT_LENGTH,
        }
        return {"object": "list", "data": [card]}


def _own_version() -> str:
    try:
        return metadata.version("tandem-pd")
    except metadata.PackageNotFoundError:
        return "0"
