"""A stand-in for one SGLang member: real HTTP in this process, every answer set by the test.

For: adapter and collector tests. Not for: anything about how an engine behaves inside.
"""

import asyncio
import contextlib
from collections import defaultdict

from aiohttp import web

from tandem.records import Member, Role

MODEL = "stub"


def token_ids(text):
    """One id per word: small, and the same each time."""
    return [sum(word.encode()) for word in text.split()]


class StubEngine:
    """One member; start it with `async with`, then change its answers at will.

    `status` maps a path to the HTTP status it answers with; a path in `hanging` never answers until
    `release()`, one in `slow_s` after so many seconds. `received` keeps every JSON body by path,
    `reached` is set for a path when somebody asks, `hung_up` counts clients that left.
    """

    def __init__(self, role, **answers):
        self.role = role
        self.name = f"{role.value}-0"
        self.page = ""
        self.transfers = None
        self.loads = None
        self.info = {"version": "0.5.23", "disaggregation_transfer_backend": "mooncake"}
        self.status = {}
        self.hanging = set()
        self.received = defaultdict(list)
        self.asked = []
        self.hung_up = 0
        self.reached = defaultdict(asyncio.Event)
        self.left = asyncio.Event()
        self.finish = {"type": "length", "length": 1}
        self.gap_of = {}
        self.slow_s = {}
        self.kv_moves = True
        self._released = asyncio.Event()
        for name, value in answers.items():
            setattr(self, name, value)

    def release(self):
        """Let every hanging answer go."""
        self._released.set()

    async def __aenter__(self):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"
        # The rendezvous of a stub prefill answers on the same port.
        self.member = Member(
            name=self.name,
            role=self.role,
            url=self.url,
            engine="sglang",
            bootstrap_port=port if self.role is Role.PREFILL else None,
        )
        return self

    async def __aexit__(self, *exc_info):
        self.release()
        await self._runner.cleanup()

    async def _answer(self, request):
        path = request.path
        self.asked.append(path)
        body = await request.json() if request.method == "POST" else None
        if body is not None:
            self.received[path].append(body)
        self.reached[path].set()
        if path in self.hanging:
            try:
                await self._released.wait()
            except asyncio.CancelledError:
                self.hung_up += 1
                self.left.set()
                raise
        if path in self.slow_s:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._released.wait(), self.slow_s[path])
        if (status := self.status.get(path, 200)) != 200:
            return web.Response(status=status, text=f"stub says {status}")
        return self._reply(path, request, body)

    def _reply(self, path, request, body):
        replies = {
            "/health": lambda: web.Response(text="OK"),
            "/metrics": lambda: web.Response(text=self._metrics()),
            "/model_info": lambda: web.json_response({"model_path": MODEL}),
            "/route": lambda: web.json_response({"attn_tp_size": 1}),
            "/generate": lambda: web.json_response(self._generated(body)),
            "/v1/chat/completions": lambda: web.json_response(self._chatted(body)),
        }
        if path == "/v1/loads" and self.loads is not None:
            return web.json_response({"loads": self.loads})
        if path == "/server_info" and self.info is not None:
            return web.json_response({"disaggregation_mode": self.role.value, **self.info})
        if path not in replies:
            return web.Response(status=404)
        return replies[path]()

    def _metrics(self):
        page = self.page
        if self.transfers is not None:
            page += f'sglang:kv_transfer_latency_ms_count{{tp_rank="0"}} {self.transfers}\n'
        return page

    def _generated(self, body):
        if self.transfers is not None and self.kv_moves:
            self.transfers += 1
        ids = body.get("input_ids") or token_ids(body["text"])
        meta = {"prompt_tokens": len(ids), "finish_reason": self.finish}
        if body.get("return_logprob"):
            start = body["logprob_start_len"]
            meta["input_token_logprobs"] = [
                [None if at == start else -1.0 - self.gap_of.get(token, 0.0), token, None]
                for at, token in enumerate(ids)
                if at >= start
            ]
            meta["input_top_logprobs"] = [
                None if at == start else [[-1.0, 7, None]] for at in range(start, len(ids))
            ]
        count = body["sampling_params"]["max_new_tokens"]
        return {"text": " ok" * count, "output_ids": [1] * count, "meta_info": meta}

    def _chatted(self, body):
        message = {"role": "assistant", "content": "ok"}
        return {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": MODEL,
            "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
        }


@contextlib.asynccontextmanager
async def stub_pair(**both):
    """A prefill and a decode, started."""
    async with (
        StubEngine(Role.PREFILL, **both) as prefill,
        StubEngine(Role.DECODE, **both) as decode,
    ):
        yield prefill, decode


def rows(harvest):
    """The observations of a harvest by (name, label)."""
    return {(seen.name, seen.label): seen for seen in harvest.observations}
