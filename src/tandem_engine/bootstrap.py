"""The rendezvous a prefill runs: its ranks register here, decodes ask here where they are.

For: SGLang's bootstrap routes on their own port (protocol reference section 2). The state is in
memory only and registrations never expire, as in SGLang. Not for: anything per room but the dp-rank
rows, and nothing of the transfer itself: `/health` here is an unconditional 200 and says nothing of
the scheduler.
"""

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tandem_engine.replies import HANDLERS, RequestError, error, json_reply
from tandem_engine.wire import DpRankQuery, DpRankRow, Endpoint, Registration, Topology

ROOM_ROWS_MAX = 65_536
QUERY_FIELDS = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
BODY_BYTES_MAX = 1 << 20

Rank = tuple[int, int, int, int]


class Bootstrap:
    """The table of ranks and the routes over it."""

    def __init__(self) -> None:
        """Empty: 503 until every rank of the first registration's layout is there."""
        self._first: Registration | None = None
        self._ranks: dict[Rank, Registration] = {}
        self._registered = 0
        self._dp_rank_of: dict[int, int] = {}
        self.app = Starlette(
            routes=[
                Route("/route", self._register, methods=["PUT"]),
                Route("/route", self._route, methods=["GET"]),
                Route("/register_dp_rank", self._register_dp_rank, methods=["POST"]),
                Route("/query_dp_ranks", self._query_dp_ranks, methods=["POST"]),
                Route("/health", self._health, methods=["GET"]),
            ],
            exception_handlers=HANDLERS,
        )

    @property
    def ready(self) -> bool:
        """Whether every rank registered."""
        first = self._first
        if first is None:
            return False
        wanted = first.attn_dp_size * first.attn_cp_size * first.attn_tp_size * first.pp_size
        return self._registered >= wanted

    def register(self, row: Registration) -> str | None:
        """Take one rank's row; what is inconsistent with the first one, or None."""
        first = self._first or row
        for field in ("attn_tp_size", "attn_cp_size", "attn_dp_size", "pp_size", "page_size",
                      "kv_cache_dtype", "decode_allocation_policy"):  # fmt: skip
            if getattr(row, field) != getattr(first, field):
                return (
                    f"{field} is {getattr(row, field)!r} here and {getattr(first, field)!r} there"
                )
        self._first = first
        rank = (row.attn_dp_rank, row.attn_cp_rank, row.attn_tp_rank, row.pp_rank)
        self._ranks[rank] = row
        self._registered += 1
        return None

    async def _register(self, request: HttpRequest) -> Response:
        row = msgspec.json.decode(await _body(request), type=Registration)
        inconsistent = self.register(row)
        if inconsistent is not None:
            return error(400, f"the registration does not fit the first one: {inconsistent}")
        return PlainTextResponse("OK")

    async def _route(self, request: HttpRequest) -> Response:
        try:
            query = tuple(int(request.query_params[field]) for field in QUERY_FIELDS)
        except (KeyError, ValueError):
            return error(400, f"GET /route needs the integers {', '.join(QUERY_FIELDS)}")
        first = self._first
        if first is None or not self.ready:
            return error(503, "the prefill has not registered yet; ask again in a second")
        if query == (-1, -1, -1, -1):
            return json_reply(_topology(first))
        row = self._ranks.get((query[0], query[1], query[2], query[3]))
        if row is None:
            return error(404, f"no prefill rank {query} is registered")
        return json_reply(Endpoint(row.rank_ip, row.rank_port))

    async def _register_dp_rank(self, request: HttpRequest) -> Response:
        row = msgspec.json.decode(await _body(request), type=DpRankRow)
        if len(self._dp_rank_of) >= ROOM_ROWS_MAX:
            # The oldest row goes: a bound instead of SGLang's periodic clean-up.
            del self._dp_rank_of[next(iter(self._dp_rank_of))]
        self._dp_rank_of[row.bootstrap_room] = row.dp_rank
        return PlainTextResponse("OK")

    async def _query_dp_ranks(self, request: HttpRequest) -> Response:
        query = msgspec.json.decode(await _body(request), type=DpRankQuery)
        known = {
            str(room): self._dp_rank_of[room]
            for room in query.bootstrap_rooms
            if room in self._dp_rank_of
        }
        return json_reply(known)

    async def _health(self, request: HttpRequest) -> Response:
        return PlainTextResponse("OK")


def _topology(first: Registration) -> Topology:
    return Topology(
        attn_tp_size=first.attn_tp_size,
        attn_cp_size=first.attn_cp_size,
        dp_size=first.attn_dp_size,
        pp_size=first.pp_size,
        page_size=first.page_size,
        kv_cache_dtype=first.kv_cache_dtype,
        follow_bootstrap_room=first.load_balance_method == "follow_bootstrap_room",
        prefill_http_port=first.prefill_http_port,
        decode_allocation_policy=first.decode_allocation_policy,
    )


async def _body(request: HttpRequest) -> bytes:
    chunks = bytearray()
    async for chunk in request.stream():
        chunks += chunk
        if len(chunks) > BODY_BYTES_MAX:
            raise RequestError(f"a body may have at most {BODY_BYTES_MAX} bytes", 413)
    return bytes(chunks)
