"""How SGLang's metrics, loads and server arguments read in Tandem's vocabulary.

For: pure mapping of pages and replies of a member to observations, one function per source.
Not for: fetching them (`sglang.py`) or what is known of versions and flags (`sglang_traits.py`).
Names are those of SGLang 0.5.6 to 0.5.23 (`srt/observability/metrics_collector.py`,
`srt/entrypoints/v1_loads.py`, `srt/managers/load_snapshot.py`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from tandem.records import Member, Observation, Role, Value
from tandem.records import vocabulary as v
from tandem.scan import Sample, Scanner, quantile, total

Seen = Callable[..., Observation]

COUNTERS: Mapping[str, tuple[str, ...]] = {
    v.PROGRESS_TOKENS_TOTAL: ("realtime_tokens_total",),
    v.REQUESTS_TOTAL: ("num_requests_total",),
    v.PROMPT_TOKENS_TOTAL: ("prompt_tokens_total",),
    v.GENERATION_TOKENS_TOTAL: ("generation_tokens_total",),
    v.TRANSFERS_TOTAL: ("kv_transfer_latency_ms_count", "kv_transfer_total_mb_count"),
    v.TRANSFER_FAILED_TOTAL: ("num_transfer_failed_reqs_total",),
    v.BOOTSTRAP_FAILED_TOTAL: ("num_bootstrap_failed_reqs_total",),
    v.ABORTED_TOTAL: ("num_aborted_requests_total",),
}
"""Our counter: SGLang's names for it, the first on the page counts."""

GAUGES: Mapping[str, tuple[str, ...]] = {
    v.RUNNING_REQS: ("num_running_reqs",),
    v.WAITING_REQS: ("num_queue_reqs",),
    v.BOOTSTRAP_QUEUE_REQS: (
        "num_prefill_bootstrap_queue_reqs",
        "num_prefill_prealloc_queue_reqs",  # 0.5.6
    ),
    v.INFLIGHT_QUEUE_REQS: ("num_prefill_inflight_queue_reqs",),
    v.PREALLOC_QUEUE_REQS: ("num_decode_prealloc_queue_reqs",),
    v.TRANSFER_QUEUE_REQS: ("num_decode_transfer_queue_reqs",),
    v.TOKEN_USAGE: ("token_usage",),
}
"""Queue gauges of the page; used only where `/v1/loads` does not give them, because they freeze."""

_PREFILL_ONLY = frozenset({v.BOOTSTRAP_QUEUE_REQS, v.INFLIGHT_QUEUE_REQS, v.TRANSFERS_TOTAL})
_DECODE_ONLY = frozenset({v.PREALLOC_QUEUE_REQS, v.TRANSFER_QUEUE_REQS, v.RETRACTED_QUEUE_REQS})

_PREFIX = "sglang:"
_LATENCY_SUM = "sglang:kv_transfer_latency_ms_sum"
_TTFT = "sglang:time_to_first_token_seconds"
METRIC_NAMES = (
    *(_PREFIX + name for names in (*COUNTERS.values(), *GAUGES.values()) for name in names),
    _LATENCY_SUM,
    f"{_TTFT}_bucket",
)
SCANNER = Scanner(METRIC_NAMES)
_UNCOUNTED = _PREFIX + "num_prefill_prealloc_queue_reqs"
"""A gauge of those versions (0.5.6) that count no hand-offs at all."""
TRANSFER_SCANNER = Scanner([_UNCOUNTED, *(_PREFIX + name for name in COUNTERS[v.TRANSFERS_TOTAL])])

SERVER_ARGS = (
    "chunked_prefill_size",
    "context_length",
    "cuda_graph_max_bs",
    "cuda_graph_max_bs_decode",
    "cuda_graph_max_bs_prefill",
    "decode_log_interval",
    "device",
    "disable_cuda_graph",
    "disable_overlap_schedule",
    "disable_radix_cache",
    "disaggregation_bootstrap_port",
    "disaggregation_decode_allocation_policy",
    "disaggregation_decode_enable_radix_cache",
    "disaggregation_decode_polling_interval",
    "disaggregation_max_inflight",
    "disaggregation_mode",
    "disaggregation_transfer_backend",
    "dp_size",
    "enable_dp_attention",
    "enable_metrics",
    "enable_two_batch_overlap",
    "kv_cache_dtype",
    "load_balance_method",
    "max_running_requests",
    "max_total_num_tokens",
    "max_total_tokens",
    "mem_fraction_static",
    "model_path",
    "num_reserved_decode_tokens",
    "page_size",
    "pp_size",
    "quantization",
    "schedule_policy",
    "served_model_name",
    "soft_watchdog_timeout",
    "speculative_algorithm",
    "tp_size",
    "version",
    "watchdog_timeout",
)
"""Allowlist: what `/server_info` says beyond these (keys, certificates) is left out."""


def wanted(names: Iterable[str], role: Role) -> list[str]:
    """Those of our names that a member of this role can have."""
    other = _DECODE_ONLY if role is Role.PREFILL else _PREFILL_ONLY
    return [name for name in names if name not in other]


def counters(page: bytes, member: Member, seen: Seen, *, cut: bool = False) -> list[Observation]:
    """Progress and failure counters of a metrics page; an absent one says so.

    SGLang writes no line for a labelled counter that never counted, so absence is no zero. `cut`
    says that the page goes on beyond these bytes.
    """
    samples, beyond = SCANNER.scan_page(page, cut=cut)
    absent = beyond or "not on the metrics page: it never counted, or is not wired"
    found = []
    for ours in wanted(COUNTERS, member.role):
        value = _first(samples, COUNTERS[ours])
        found.append(seen(ours, _whole(value)) if value is not None else seen(ours, missing=absent))
    spent_ms = total(samples, _LATENCY_SUM)
    if spent_ms is not None and member.role is Role.PREFILL:
        found.append(seen(v.TRANSFER_SECONDS_TOTAL, spent_ms / 1000.0))
    ttft_s = quantile(samples, _TTFT, 0.99)
    if ttft_s is not None:
        found.append(seen(v.TTFT_P99_S, ttft_s))
    return found


def gauges(
    page: bytes, reasons: Mapping[str, str], seen: Seen, *, cut: bool = False
) -> list[Observation]:
    """Queue gauges of a metrics page, by our name; `reasons` say why each is looked for here."""
    samples, beyond = SCANNER.scan_page(page, cut=cut)
    found = []
    for ours, why in reasons.items():
        value = _first(samples, GAUGES.get(ours, ()))
        absent = f"{why}; {beyond or 'nor is it on the metrics page'}"
        found.append(seen(ours, _whole(value)) if value is not None else seen(ours, missing=absent))
    return found


def transfers(page: bytes, *, cut: bool = False) -> float | None:
    """How many hand-offs a prefill's metrics page has counted.

    0 before the first, when the counter is not there yet; None where this version has no such
    counter, or the page was cut before it.
    """
    samples, beyond = TRANSFER_SCANNER.scan_page(page, cut=cut)
    counted = _first(samples, COUNTERS[v.TRANSFERS_TOTAL])
    if beyond:
        return counted
    if counted is None and total(samples, _UNCOUNTED) is None:
        return 0.0
    return counted


def _first(samples: Sequence[Sample], names: Sequence[str]) -> float | None:
    found = (total(samples, _PREFIX + name) for name in names)
    return next((value for value in found if value is not None), None)


def _whole(value: float) -> int | float:
    return int(value) if value.is_integer() else value


class _Disaggregation(msgspec.Struct):
    prefill_bootstrap_queue_reqs: float | None = None
    prefill_inflight_queue_reqs: float | None = None
    decode_prealloc_queue_reqs: float | None = None
    decode_transfer_queue_reqs: float | None = None
    decode_retracted_queue_reqs: float | None = None


class _Load(msgspec.Struct):
    """One data-parallel rank of `/v1/loads`."""

    num_running_reqs: float | None = None
    num_waiting_reqs: float | None = None
    token_usage: float | None = None
    disaggregation: _Disaggregation | None = None


class _Loads(msgspec.Struct):
    loads: list[_Load]


class _OldLoad(msgspec.Struct):
    """One data-parallel rank of `/get_load` (0.5.6)."""

    num_reqs: float
    num_waiting_reqs: float = 0.0


_LOAD_NAMES = (
    v.RUNNING_REQS,
    v.WAITING_REQS,
    v.BOOTSTRAP_QUEUE_REQS,
    v.INFLIGHT_QUEUE_REQS,
    v.PREALLOC_QUEUE_REQS,
    v.TRANSFER_QUEUE_REQS,
    v.RETRACTED_QUEUE_REQS,
    v.TOKEN_USAGE,
)


def load_names(role: Role) -> list[str]:
    """What live loads may say of a member of this role."""
    return wanted(_LOAD_NAMES, role)


class Live(NamedTuple):
    """What live loads give: our names with their numbers, and names that they give by halves."""

    numbers: Mapping[str, int | float] = {}
    halves: Mapping[str, str] = {}
    """Why a number is not given though some rank has one: the sum over the others would be low."""


def loads(body: bytes) -> Live:
    """Queue counts of a `/v1/loads` reply, summed over data-parallel ranks (usage: the highest).

    Raises `msgspec.DecodeError` when the reply has another shape.
    """
    parsed = msgspec.json.decode(body, type=_Loads | list[_Load])
    ranks = parsed.loads if isinstance(parsed, _Loads) else parsed
    columns: dict[str, list[float | None]] = {
        v.RUNNING_REQS: [rank.num_running_reqs for rank in ranks],
        v.WAITING_REQS: [rank.num_waiting_reqs for rank in ranks],
    }
    sections = [rank.disaggregation or _Disaggregation() for rank in ranks]
    columns[v.BOOTSTRAP_QUEUE_REQS] = [one.prefill_bootstrap_queue_reqs for one in sections]
    columns[v.INFLIGHT_QUEUE_REQS] = [one.prefill_inflight_queue_reqs for one in sections]
    columns[v.PREALLOC_QUEUE_REQS] = [one.decode_prealloc_queue_reqs for one in sections]
    columns[v.TRANSFER_QUEUE_REQS] = [one.decode_transfer_queue_reqs for one in sections]
    columns[v.RETRACTED_QUEUE_REQS] = [one.decode_retracted_queue_reqs for one in sections]
    found: dict[str, int | float] = {}
    halves: dict[str, str] = {}
    for name, column in columns.items():
        known = [value for value in column if value is not None]
        if len(known) == len(column) and known:
            found[name] = _whole(float(sum(known)))
        elif known:
            halves[name] = f"only {len(known)} of {len(column)} ranks gave it"
    usage = [rank.token_usage for rank in ranks if rank.token_usage is not None]
    if usage:
        found[v.TOKEN_USAGE] = max(usage)
    return Live(found, halves)


def old_loads(body: bytes) -> Live:
    """The same from a `/get_load` reply, which knows no hand-off queues.

    Raises `msgspec.DecodeError` when the reply has another shape.
    """
    ranks = msgspec.json.decode(body, type=list[_OldLoad])
    waiting = sum(rank.num_waiting_reqs for rank in ranks)
    running = sum(rank.num_reqs for rank in ranks) - waiting
    if not ranks:
        return Live()
    counts = {v.RUNNING_REQS: _whole(float(running)), v.WAITING_REQS: _whole(float(waiting))}
    return Live(counts)


def server_args(body: bytes) -> dict[str, str]:
    """The allowlisted server arguments of a `/server_info` reply, as text.

    Raises `msgspec.DecodeError` when the reply is no JSON object.
    """
    info = msgspec.json.decode(body, type=dict[str, object])
    return {name: _text(info[name]) for name in SERVER_ARGS if info.get(name) is not None}


def _text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def witness(source: str, subject: str, at: float) -> Seen:
    """Makes a maker of observations of one subject: `seen(name, value, label=, missing=)`."""

    def seen(
        name: str, value: Value = None, *, label: str = "", missing: str | None = None
    ) -> Observation:
        return Observation(
            source=source,
            subject=subject,
            name=name,
            at=at,
            label=label,
            value=value,
            missing=missing,
        )

    return seen
