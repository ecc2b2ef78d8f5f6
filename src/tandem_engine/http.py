"""The HTTP API of a worker: SGLang's routes.

For: reading bodies within a bound, answering in JSON whatever goes wrong, and the routes that only
look. Not for: what a generation asks for and replies (`generate.py`, `openai.py`).
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tandem_engine.generate import GenerateReply, open_generate
from tandem_engine.host import Host
from tandem_engine.info import load_of, model_info, models, old_load_of, server_info
from tandem_engine.openai import OpenAiReply, open_chat, open_completion
from tandem_engine.replies import (
    CLIENT_LEFT,
    HANDLERS,
    RequestError,
    encode,
    error,
    json_reply,
)
from tandem_engine.request import Output
from tandem_engine.serving import Live
from tandem_engine.wire import (
    AbortBody,
    Bootstrapped,
    ChatBody,
    CompletionBody,
    GenerateBody,
    Load,
)

B = TypeVar("B", bound=Bootstrapped)

BODY_BYTES_MAX = 8 << 20
SECTIONS = {
    "memory": "memory",
    "spec": None,
    "lora": None,
    "disagg": "disaggregation",
    "queues": "queues",
}
"""`include` token of `/v1/loads` -> section; None for what this engine does not have."""


class Reply(Protocol):
    """What the native and the OpenAI replies have in common."""

    def add(self, output: Output) -> None:
        """Take one output."""
        ...

    def complete(self) -> object:
        """The whole reply."""
        ...

    def chunk(self, output: Output) -> list[object]:
        """The events of one output in a stream."""
        ...


class EventStream(Response):
    """Server-sent events of one request; the client leaving aborts it."""

    media_type = "text/event-stream"

    def __init__(self, live: Live, reply: Reply) -> None:
        """Nothing is sent or submitted yet."""
        self.status_code = 200
        self.background = None
        self._live = live
        self._reply = reply
        self.init_headers({"cache-control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head at once, then an event per chunk, then `[DONE]`."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for output in self._live.outputs(receive):
            events = [b"data: " + encode(event) + b"\n\n" for event in self._reply.chunk(output)]
            if output.finish is not None:
                events.append(b"data: [DONE]\n\n")
            body = b"".join(events)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Api:
    """The routes over one worker."""

    def __init__(self, worker: Host) -> None:
        """Build the application."""
        self._worker = worker
        routes = [
            Route("/generate", self._generate, methods=["POST", "PUT"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._completion, methods=["POST"]),
            Route("/abort_request", self._abort, methods=["POST", "GET"]),
            Route("/flush_cache", self._flush, methods=["POST", "GET"]),
            Route("/health", self._health),
            Route("/health_generate", self._health),
            Route("/server_info", self._server_info),
            Route("/get_server_info", self._server_info),
            Route("/model_info", self._model_info),
            Route("/get_model_info", self._model_info),
            Route("/v1/models", self._models),
            Route("/get_load", self._load),
        ]
        if worker.settings.metrics_era != "0.5.6":
            # 0.5.6 has /get_load alone, and is not /ready but /health.
            routes += [Route("/v1/loads", self._loads), Route("/ready", self._ready)]
        if worker.settings.enable_metrics:
            routes += [Route("/metrics", self._metrics), Route("/metrics/", self._metrics)]
        if worker.switchboard.enabled:
            routes.append(Route("/faults", self._faults, methods=["GET", "PUT"]))
        self.app = Starlette(routes=routes, exception_handlers=HANDLERS)

    def _open(self, opening: Callable[[Host, B], Live], body: B) -> Live:
        """A request, or `RequestError`; the other side must not wait for one that is refused."""
        try:
            return opening(self._worker, body)
        except RequestError as refused:
            self._worker.refused(body, refused.message)
            raise

    async def _generate(self, http: HttpRequest) -> Response:
        body = msgspec.json.decode(await _body(http), type=GenerateBody)
        live = self._open(open_generate, body)
        reply = GenerateReply(self._worker, live.request, texts=body.return_text_in_logprobs)
        return await _respond(http, live, reply, stream=bool(body.stream))

    async def _chat(self, http: HttpRequest) -> Response:
        body = msgspec.json.decode(await _body(http), type=ChatBody)
        live = self._open(open_chat, body)
        reply = OpenAiReply(self._worker, live.request, body)
        return await _respond(http, live, reply, stream=bool(body.stream))

    async def _completion(self, http: HttpRequest) -> Response:
        body = msgspec.json.decode(await _body(http), type=CompletionBody)
        live = self._open(open_completion, body)
        reply = OpenAiReply(self._worker, live.request, body)
        return await _respond(http, live, reply, stream=bool(body.stream))

    async def _abort(self, http: HttpRequest) -> Response:
        body = msgspec.json.decode(await _body(http) or b"{}", type=AbortBody)
        if not body.rid and not body.abort_all:
            raise RequestError("give rid, or abort_all: true")
        self._worker.abort(body.rid, everything=body.abort_all)
        return Response()

    async def _flush(self, http: HttpRequest) -> Response:
        self._worker.flush_cache()
        return PlainTextResponse("Cache flushed.\n")

    async def _health(self, http: HttpRequest) -> Response:
        return Response(status_code=200 if await self._worker.healthy() else 503)

    async def _ready(self, http: HttpRequest) -> Response:
        return Response(status_code=200 if self._worker.state == "ready" else 503)

    async def _server_info(self, http: HttpRequest) -> Response:
        return json_reply(server_info(self._worker))

    async def _model_info(self, http: HttpRequest) -> Response:
        return json_reply(model_info(self._worker))

    async def _models(self, http: HttpRequest) -> Response:
        return json_reply(models(self._worker))

    async def _metrics(self, http: HttpRequest) -> Response:
        return PlainTextResponse(
            self._worker.exposed_metrics(),
            media_type="text/plain; version=0.0.4; charset=utf-8",
        )

    async def _load(self, http: HttpRequest) -> Response:
        return json_reply(old_load_of(self._worker))

    async def _loads(self, http: HttpRequest) -> Response:
        include = http.query_params.get("include")
        wanted = {part.strip() for part in include.split(",")} if include else {"all"}
        unknown = wanted - SECTIONS.keys() - {"core", "all"}
        if unknown:
            known = sorted({*SECTIONS, "core", "all"})
            raise RequestError(
                f"Invalid include sections: {sorted(unknown)}. Valid options: {known}"
            )
        load = _sections(load_of(self._worker), wanted)
        if http.query_params.get("format") == "prometheus":
            return PlainTextResponse(
                _as_prometheus(load), media_type="text/plain; version=0.0.4; charset=utf-8"
            )
        return json_reply(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": self._worker.version,
                "accelerator": None,
                "num_accelerators": 1,
                "loads": [load],
            }
        )

    async def _faults(self, http: HttpRequest) -> Response:
        switchboard = self._worker.switchboard
        if http.method == "PUT":
            body = await _body(http)
            try:
                switchboard.change(body)
            except OSError as problem:
                return error(500, f"the faults file cannot be written: {problem}")
        return json_reply(switchboard.on())


async def _respond(http: HttpRequest, live: Live, reply: Reply, *, stream: bool) -> Response:
    if stream:
        return EventStream(live, reply)
    finish = None
    async for output in live.outputs(http.receive):
        reply.add(output)
        finish = output.finish
    if finish is None:
        return Response(status_code=CLIENT_LEFT)
    if finish.kind == "abort" and finish.status >= 400:
        return error(finish.status, finish.message)
    return json_reply(reply.complete())


async def _body(http: HttpRequest) -> bytes:
    """The body, refused as soon as it is known to be too large."""
    too_large = RequestError(f"a body may have at most {BODY_BYTES_MAX} bytes", 413)
    length = http.headers.get("content-length", "")
    if length.isdecimal() and int(length) > BODY_BYTES_MAX:
        raise too_large
    chunks = bytearray()
    async for chunk in http.stream():
        chunks += chunk
        if len(chunks) > BODY_BYTES_MAX:
            raise too_large
    return bytes(chunks)


def _sections(load: Load, wanted: set[str]) -> dict[str, object]:
    shown: dict[str, object] = msgspec.to_builtins(load)
    for token, section in SECTIONS.items():
        if section is not None and token not in wanted and "all" not in wanted:
            del shown[section]
    return shown


def _as_prometheus(load: dict[str, object]) -> str:
    """SGLang's `format=prometheus`: `sglang_NAME`, `sglang_disagg_NAME` for that section."""
    lines: list[str] = []
    rank = load.pop("dp_rank")
    flat: dict[str, object] = {}
    for key, value in load.items():
        prefix = {"disaggregation": "disagg"}.get(key, key)
        flat |= (
            {f"{prefix}_{name}": number for name, number in value.items()}
            if isinstance(value, dict)
            else {key: value}
        )
    for name, number in flat.items():
        if isinstance(number, int | float):
            lines.append(f"# TYPE sglang_{name} gauge")
            lines.append(f'sglang_{name}{{dp_rank="{rank}"}} {number}')
    return "\n".join(lines) + "\n"
