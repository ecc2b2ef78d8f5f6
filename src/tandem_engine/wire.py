"""Every type that crosses a process boundary, in one place.

For: the JSON bodies of the HTTP API (`/generate`, `/v1/...`), the bootstrap routes, `/v1/loads`,
and the framed msgpack messages of the control protocol between a decode and a prefill rank. Not
for: what a request becomes inside a worker (`request.py`), or KV bytes (`handoff/`).

Field names are SGLang's where SGLang has the field (0.5.23).
"""

import asyncio
from typing import Annotated, Any, Literal

import msgspec

FAKE_BOOTSTRAP_HOST = "2.2.2.2"
"""A room on this host moves no KV: SGLang's fake transfer, used by `/health`."""

ROOM_MAX = 2**63 - 1
FRAME_BYTES_MAX = 1 << 20
"""No control message is near this; a longer frame is a stranger on the port."""

Count = Annotated[int, msgspec.Meta(ge=0)]
Temperature = Annotated[float, msgspec.Meta(ge=0.0, le=100.0)]
Probability = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Room = Annotated[int, msgspec.Meta(ge=0, le=ROOM_MAX)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
TopLogprobs = Annotated[int, msgspec.Meta(ge=0, le=20)]
Zero = Annotated[float, msgspec.Meta(ge=0.0, le=0.0)]
One = Annotated[float, msgspec.Meta(ge=1.0, le=1.0)]
Stops = str | Annotated[list[str], msgspec.Meta(max_length=64)] | None


class WireError(Exception):
    """A frame or a body does not say what it must; the message names the field."""


# --- HTTP requests ---


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """SGLang's `sampling_params`; what would change the answer and is not done here is refused."""

    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    stop: Stops = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: Seed | None = None
    sampling_seed: Seed | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    repetition_penalty: One | None = None
    min_p: Zero | None = None
    json_schema: None = None
    regex: None = None
    ebnf: None = None


class Bootstrapped(msgspec.Struct, frozen=True, kw_only=True):
    """What the router adds to every body: where the KV of this request meets."""

    bootstrap_host: str | None = None
    bootstrap_port: Port | None = None
    bootstrap_room: Room | None = None
    stream: bool | None = None
    rid: str | None = None


class GenerateBody(Bootstrapped, frozen=True, kw_only=True):
    """`POST /generate`."""

    text: str | None = None
    input_ids: list[Count] | None = None
    sampling_params: SamplingParams | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    top_logprobs_num: TopLogprobs | None = None
    return_text_in_logprobs: bool = False


class StreamOptions(msgspec.Struct, frozen=True):
    """OpenAI's `stream_options`."""

    include_usage: bool = False


class ResponseFormat(msgspec.Struct, frozen=True):
    """OpenAI's `response_format`: there are no grammars here."""

    type: Literal["text"]


class OpenAiBody(Bootstrapped, frozen=True, kw_only=True):
    """What the two OpenAI bodies share."""

    model: str | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    stop: Stops = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: Seed | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=1)] | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    repetition_penalty: One | None = None
    min_p: Zero | None = None
    regex: None = None
    ebnf: None = None
    response_format: ResponseFormat | None = None


class CompletionBody(OpenAiBody, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[Count]
    logprobs: TopLogprobs | None = None
    echo: bool = False


class ChatBody(OpenAiBody, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`; messages and tools go to the model's template."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class AbortBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /abort_request`."""

    rid: str = ""
    abort_all: bool = False


# --- Bootstrap routes ---


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """`PUT /route`: one prefill rank says where it is and how its KV looks."""

    rank_ip: str
    rank_port: Port
    attn_tp_size: int = 1
    attn_tp_rank: int = 0
    attn_cp_size: int = 1
    attn_cp_rank: int = 0
    attn_dp_size: int = 1
    attn_dp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    system_dp_size: int = 1
    system_dp_rank: int = 0
    page_size: int = 1
    kv_cache_dtype: str = "auto"
    load_balance_method: str = "follow_bootstrap_room"
    prefill_http_port: Port = 0
    decode_allocation_policy: str = "early"


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to the `-1` query of `GET /route`."""

    attn_tp_size: int
    attn_cp_size: int
    dp_size: int
    pp_size: int
    page_size: int
    kv_cache_dtype: str
    follow_bootstrap_room: bool
    prefill_http_port: int
    decode_allocation_policy: str
    enable_dsa_cache_layer_split: bool = False
    enable_kv_cache_sharding: bool = False
    target_tp_rank: int | None = None
    target_tp_ranks: list[int] | None = None
    target_cp_ranks: list[int] | None = None
    target_pp_ranks: list[int] | None = None
    required_dst_info_num: int | None = None
    required_prefill_response_num: int | None = None


class Endpoint(msgspec.Struct, frozen=True):
    """Reply to a rank query of `GET /route`: where that rank listens."""

    rank_ip: str
    rank_port: Port


class DpRankRow(msgspec.Struct, frozen=True):
    """`POST /register_dp_rank`."""

    bootstrap_room: Room
    dp_rank: Count


class DpRankQuery(msgspec.Struct, frozen=True):
    """`POST /query_dp_ranks`."""

    bootstrap_rooms: list[Room]


# --- Control protocol between ranks ---


class KvLayout(msgspec.Struct, frozen=True):
    """What must be equal on both sides before anything is handed off."""

    model_hash: str
    library_build: str
    kv_dtype: str
    page_size: int
    context_length: int

    def differs(self, other: "KvLayout") -> str:
        """The first field that differs, with both values; empty when none does."""
        for field in self.__struct_fields__:
            there, here = getattr(other, field), getattr(self, field)
            if there != here:
                return f"{field} is {there!r} there and {here!r} here"
        return ""


class Announce(msgspec.Struct, frozen=True, tag=True):
    """Decode to prefill, once per connection: who I am and where KV may land.

    `agent` is fresh per process; `started_s` (wall clock) orders the incarnations of one `address`
    (host and HTTP port of the decode); `landing` is the address its KV slots are reached by.
    """

    agent: str
    address: str
    started_s: float
    lease_s: float
    landing: str
    layout: KvLayout | None = None


class Announced(msgspec.Struct, frozen=True, tag=True):
    """Prefill to decode: the announcement is taken, or (`layout` differs) refused.

    A refused decode stays connected: it says which rooms it refuses in turn, with `Abort`.
    """

    engine: str
    layout: KvLayout | None = None


class Renew(msgspec.Struct, frozen=True, tag=True):
    """Decode to prefill: I live; keep my lease."""

    agent: str
    beat: int


class Renewed(msgspec.Struct, frozen=True, tag=True):
    """Prefill to decode: so do I."""

    beat: int


class RoomMetadata(msgspec.Struct, frozen=True, tag=True):
    """Decode to prefill: the KV of this room goes to this slot."""

    agent: str
    room: Room
    slot: Count
    generation: Count


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Decode to prefill: nobody wants this room any more."""

    agent: str
    room: Room


class AbortAck(msgspec.Struct, frozen=True, tag=True):
    """Prefill to decode: nothing will be written for this room from now on."""

    room: Room


class RoomFailed(msgspec.Struct, frozen=True, tag=True):
    """Prefill to decode: no KV will come for this room."""

    room: Room
    reason: str


ToPrefill = Announce | Renew | RoomMetadata | Abort
ToDecode = Announced | Renewed | AbortAck | RoomFailed
_to_prefill: msgspec.msgpack.Decoder[ToPrefill] = msgspec.msgpack.Decoder(ToPrefill)
_to_decode: msgspec.msgpack.Decoder[ToDecode] = msgspec.msgpack.Decoder(ToDecode)
_encoder = msgspec.msgpack.Encoder()


def frame(message: ToPrefill | ToDecode) -> bytes:
    """One message as it goes over the socket: four bytes of length, then msgpack."""
    payload = _encoder.encode(message)
    return len(payload).to_bytes(4, "big") + payload


async def _payload(reader: asyncio.StreamReader) -> bytes:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if not 0 < size <= FRAME_BYTES_MAX:
        raise WireError(f"a control frame of {size} bytes is not one of ours")
    return await reader.readexactly(size)


async def read_at_prefill(reader: asyncio.StreamReader) -> ToPrefill:
    """The next message of a decode.

    Raises `WireError` for a bad frame and `asyncio.IncompleteReadError` at the end of the stream.
    """
    try:
        return _to_prefill.decode(await _payload(reader))
    except msgspec.MsgspecError as error:
        raise WireError(f"a control frame does not decode: {error}") from error


async def read_at_decode(reader: asyncio.StreamReader) -> ToDecode:
    """The next message of a prefill; raises as `read_at_prefill` does."""
    try:
        return _to_decode.decode(await _payload(reader))
    except msgspec.MsgspecError as error:
        raise WireError(f"a control frame does not decode: {error}") from error


# --- /v1/loads ---


class MemoryLoad(msgspec.Struct, frozen=True):
    """The `memory` section, GB."""

    weight_gb: float
    kv_cache_gb: float
    graph_gb: float
    token_capacity: int


class DisaggregationLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The `disaggregation` section."""

    mode: str
    prefill_bootstrap_queue_reqs: int = 0
    prefill_inflight_queue_reqs: int = 0
    decode_prealloc_queue_reqs: int = 0
    decode_transfer_queue_reqs: int = 0
    decode_retracted_queue_reqs: int = 0
    kv_transfer_speed_gb_s: float = 0.0
    kv_transfer_latency_ms: float = 0.0


class QueueLoad(msgspec.Struct, frozen=True):
    """The `queues` section."""

    waiting: int
    grammar: int = 0
    paused: int = 0
    retracted: int = 0


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of `/v1/loads`; sections that were not asked for are left out (`http.py`)."""

    dp_rank: int = 0
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_uncached_tokens: int
    num_used_tokens: int
    num_total_tokens: int
    max_total_num_tokens: int
    max_running_requests: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    utilization: float
    memory: MemoryLoad
    disaggregation: DisaggregationLoad
    queues: QueueLoad
