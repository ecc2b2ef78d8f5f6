"""What is known of SGLang, by version and flag, as traits that judgement can seal and read.

For: which component a flag touches, what it switches off, version hazards, orders and time limits.
Not for: what a running member says of itself (`sglang_names.py`).
Sources: SGLang 0.5.23 `srt/server_args.py`, `srt/environ.py`, `srt/disaggregation/`; pull requests
and issues are named where a fact rests on one.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from tandem.records import Role, Trait, Value
from tandem.records import vocabulary as v

Version = tuple[int, int, int, int]

ABORT_BUG_FIRST: Version = (0, 5, 13, 0)
ABORT_BUG_LAST: Version = (0, 5, 15, 1)
"""NIXL: one ABORT from a decode kills the prefill's bootstrap thread (PR #27372, fixed #30352)."""

FLAGS: Mapping[str, tuple[str, ...]] = {
    "kv-transfer": (
        "--disaggregation-mode",
        "--disaggregation-transfer-backend",
        "--disaggregation-bootstrap-port",
        "--disaggregation-ib-device",
        "--disaggregation-decode-tp",
        "--disaggregation-decode-dp",
        "--disaggregation-prefill-pp",
        "--disaggregation-max-inflight",
        "--disaggregation-enable-kv-checksum",
        "--disaggregation-decode-retraction-backup",
        "--enable-pd-role-switch",
        "--kv-transfer-config",
        "--page-size",
        "--kv-cache-dtype",
        "--load-balance-method",
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
        "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL",
        "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE",
        "SGLANG_DISAGGREGATION_QUEUE_SIZE",
        "SGLANG_DISAGGREGATION_THREAD_POOL_SIZE",
        "SGLANG_DISAGGREGATION_BOOTSTRAP_ENTRY_CLEANUP_INTERVAL",
        "SGLANG_DISAGGREGATION_ENGINE_INIT_TIMEOUT",
        "SGLANG_DISAGGREGATION_ZMQ_SEND_TIMEOUT",
        "SGLANG_DISAGGREGATION_ZMQ_MAX_SOCKETS",
        "SGLANG_DISAGGREGATION_NIXL_BACKEND",
        "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS",
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE",
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT",
        "SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK",
        "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER",
        "SGLANG_DISAGG_STAGING_BUFFER",
        "SGLANG_DISAGG_STAGING_POOL_SIZE_MB",
        "SGLANG_ENABLE_FAILED_SESSION_PROBE",
        "SGLANG_FAILED_SESSION_PROBE_INTERVAL_S",
        "SGLANG_FAILED_SESSION_PROBE_MAX_INTERVAL_S",
        "SGLANG_FAILED_SESSION_IDLE_TIMEOUT_S",
        "SGLANG_MORI_TRANSFER_TIMEOUT_MS",
        "SGLANG_TEST_DISAGG_FAILURE_PROB",
        "DISAGGREGATION_TEST_FAILURE_PROB",
        "MC_FORCE_TCP",
        "MC_TE_METRIC",
        "NIXL_PLUGIN_DIR",
        "UCX_TLS",
        "UCX_NET_DEVICES",
    ),
    "scheduler": (
        "--disable-overlap-schedule",
        "--schedule-policy",
        "--schedule-conservativeness",
        "--disaggregation-decode-polling-interval",
        "--scheduler-recv-interval",
        "--enable-mixed-chunk",
        "--chunked-prefill-size",
        "--max-prefill-tokens",
        "--optimistic-prefill-attempts",
        "--watchdog-timeout",
        "--soft-watchdog-timeout",
        "SGLANG_REQ_WAITING_TIMEOUT",
        "SGLANG_REQ_RUNNING_TIMEOUT",
        "SGLANG_TEST_STUCK_DETOKENIZER",
        "SGLANG_TEST_STUCK_TOKENIZER",
        "SGLANG_TEST_STUCK_DP_CONTROLLER",
        "SGLANG_TEST_STUCK_SCHEDULER_INIT",
    ),
    "compute": (
        "--cuda-graph-max-bs",
        "--cuda-graph-max-bs-decode",
        "--cuda-graph-max-bs-prefill",
        "--cuda-graph-bs",
        "--disable-cuda-graph",
        "--disable-cuda-graph-padding",
        "--attention-backend",
        "--prefill-attention-backend",
        "--decode-attention-backend",
        "--sampling-backend",
        "--moe-runner-backend",
        "--moe-a2a-backend",
        "--deepep-mode",
        "--quantization",
        "--dtype",
        "--enable-torch-compile",
        "--torch-compile-max-bs",
        "--enable-two-batch-overlap",
        "--enable-single-batch-overlap",
        "--speculative-algorithm",
        "--speculative-num-steps",
        "--speculative-num-draft-tokens",
        "--triton-attention-num-kv-splits",
        "--num-warps",
        "--num-stages",
        "num_warps",
        "num_stages",
        "SGLANG_SM120_MMA_TARGET_CTAS",
        "SGLANG_OPT_USE_MULTI_STREAM_OVERLAP",
        "SGLANG_SM120_NUM_WARPS",
        "SGLANG_SM120_NUM_STAGES",
        "SGLANG_ENABLE_JIT_DEEPGEMM",
        "SGLANG_USE_CPU_ENGINE",
        "OMP_NUM_THREADS",
        "CUDA_LAUNCH_BLOCKING",
    ),
    "collective": (
        "--tp",
        "--tp-size",
        "--pp-size",
        "--dp-size",
        "--ep-size",
        "--enable-dp-attention",
        "--enable-dp-lm-head",
        "--disable-custom-all-reduce",
        "--enable-nccl-nvls",
        "--enable-symm-mem",
        "--nnodes",
        "--node-rank",
        "--dist-init-addr",
        "--dist-timeout",
        "NCCL_DEBUG",
        "NCCL_ALGO",
        "NCCL_PROTO",
        "NCCL_IB_HCA",
        "NCCL_SOCKET_IFNAME",
        "NCCL_P2P_DISABLE",
        "GLOO_SOCKET_IFNAME",
    ),
    "admission": (
        "--num-reserved-decode-tokens",
        "--max-running-requests",
        "--max-queued-requests",
        "--max-total-tokens",
        "--disaggregation-decode-extra-slots",
        "--disaggregation-decode-allocation-policy",
        "--context-length",
    ),
    "memory": (
        "--mem-fraction-static",
        "--disable-radix-cache",
        "--disaggregation-decode-enable-radix-cache",
        "--enable-hierarchical-cache",
        "--hicache-size",
        "--enable-memory-saver",
        "--cpu-offload-gb",
        "PYTORCH_CUDA_ALLOC_CONF",
    ),
    "logging": (
        "--decode-log-interval",
        "--log-level",
        "--log-level-http",
        "--log-requests",
        "--log-requests-level",
        "--enable-metrics",
        "--enable-metrics-for-all-schedulers",
        "--enable-cache-report",
        "--show-time-cost",
        "--crash-dump-folder",
        "--drain-timeout-s",
        "SGLANG_HEALTH_CHECK_TIMEOUT",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION",
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH",
        "SGLANG_LOG_LEVEL",
    ),
    "routing": (
        "--host",
        "--port",
        "--served-model-name",
        "--api-key",
        "--policy",
        "--prefill-policy",
        "--decode-policy",
        "--prefill",
        "--decode",
        "--pd-disaggregation",
        "--request-timeout-secs",
        "--retry-max-retries",
        "--disable-retries",
        "--cb-failure-threshold",
        "--cb-timeout-duration-secs",
        "--disable-circuit-breaker",
        "--health-check-interval-secs",
        "--health-check-timeout-secs",
        "--health-failure-threshold",
        "--health-success-threshold",
        "--shutdown-grace-period-secs",
    ),
    "model": (
        "--model-path",
        "--model",
        "--tokenizer-path",
        "--revision",
        "--chat-template",
    ),
}
"""Component: the flags and environment variables that touch it."""

SWITCHES_OFF: Mapping[str, str] = {"--disable-overlap-schedule": "collective-desync"}
"""Flag or `VAR=value`: the failure mode whose mechanism it makes impossible."""

QUEUES = (
    v.RUNNING_REQS,
    v.WAITING_REQS,
    v.BOOTSTRAP_QUEUE_REQS,
    v.INFLIGHT_QUEUE_REQS,
    v.PREALLOC_QUEUE_REQS,
    v.TRANSFER_QUEUE_REQS,
    v.RETRACTED_QUEUE_REQS,
    v.TOKEN_USAGE,
)

_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)(?:[.-]?post(\d+))?")


class _Known(Protocol):
    """Makes one trait of the member at hand."""

    def __call__(self, name: str, value: Value, because: str, label: str = "") -> Trait: ...


@dataclass(frozen=True, slots=True)
class Told:
    """What a member told of itself, as far as traits depend on it."""

    version: str | None = None
    backend: str | None = None
    frozen: frozenset[str] | None = None
    """Our names of the queue counts that no live endpoint gives, only the metrics page; None while
    none has answered yet."""


def parse(version: str) -> Version | None:
    """`0.5.15.post1` as (0, 5, 15, 1); None for what has no such beginning."""
    match = _VERSION.match(version)
    if match is None:
        return None
    major, minor, patch, post = match.groups(default="0")
    return int(major), int(minor), int(patch), int(post)


def traits(subject: str, role: Role, told: Told, at: float) -> tuple[Trait, ...]:
    """Everything known of one member of this family."""

    def known(name: str, value: Value, because: str, label: str = "") -> Trait:
        return Trait(subject=subject, name=name, at=at, label=label, value=value, because=because)

    safe, because = probe_safety(told)
    found = [
        known(v.T_ENGINE_FAMILY, "sglang", 'configured as `engine = "sglang"`'),
        known(v.T_ENGINE_VERSION, told.version, "`version` of /server_info"),
        known(v.T_ACTIVE_PROBE_SAFE, safe, because),
        known(
            v.T_HEALTH_RUNS_FORWARD,
            value=True,
            because="/health runs a one-token fake transfer (srt/entrypoints/http_server.py)",
        ),
        *_limits(known),
    ]
    if role is Role.DECODE:
        found.append(
            known(
                v.T_DECODE_ALONE_RESTART_HURTS,
                value=True,
                because="the prefill has no heartbeat toward its decodes and keeps what it knew of "
                "a dead one (srt/disaggregation/common/conn.py, nixl/conn.py)",
            )
        )
    for name in QUEUES:
        freezes, because = _freezes(role, name, told)
        found.append(known(v.T_FREEZES_IN_STALL, freezes, because, name))
    found += list(_catalogue(known))
    return tuple(found)


def _freezes(role: Role, name: str, told: Told) -> tuple[bool | None, str]:
    """Whether a queue count, as it reaches us, stands still while nothing moves; None: unknown."""
    if role is Role.PREFILL and name == v.RUNNING_REQS:
        return True, "the size of its last forward batch (srt/managers/scheduler_metrics_mixin.py)"
    if told.frozen is None:
        return None, "no live endpoint has answered yet"
    if name in told.frozen:
        return True, "written only after a batch or when fully idle (srt/observability)"
    return False, "asked for at every look (srt/managers/load_snapshot.py, get_load)"


def probe_safety(told: Told) -> tuple[bool | None, str]:
    """Whether an abandoned request is harmless to this member, and how that is known.

    None when it is unknown, which is treated as unsafe.
    """
    if told.backend is None:
        return None, "transfer backend unknown: /server_info did not answer"
    if told.backend != "nixl":
        return True, f"the {told.backend} backend survives aborts"
    version = parse(told.version or "")
    if version is None:
        return None, f"backend nixl with unknown version {told.version!r}"
    if ABORT_BUG_FIRST <= version <= ABORT_BUG_LAST:
        return False, (
            f"SGLang {told.version} with nixl: one abort kills the prefill's bootstrap thread "
            "(fixed in 0.5.16, PR #30352)"
        )
    return True, f"SGLang {told.version} with nixl handles aborts"


def _limits(known: _Known) -> Iterator[Trait]:
    """Orders and time limits."""
    yield known(
        v.T_START_ORDER,
        ("prefill", "decode", "router"),
        "a decode fetches the prefill's topology at its first request; a router needs both",
    )
    yield known(
        v.T_STOP_ORDER,
        ("router", "decode", "prefill"),
        "no new requests first, then the receiver, so that no hand-off loses its sender",
    )
    yield known(v.T_WAITING_TIMEOUT_S, 300.0, "default of SGLANG_DISAGGREGATION_WAITING_TIMEOUT")
    yield known(
        v.T_BOOTSTRAP_TIMEOUT_S, 300.0, "default of SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"
    )


def _catalogue(known: _Known) -> Iterator[Trait]:
    """What every known flag and variable touches and switches off."""
    for component, flags in FLAGS.items():
        because = f"read in SGLang's server arguments and environment: {component}"
        for flag in flags:
            yield known(v.T_TOUCHES, component, because, flag)
    for flag, mode in SWITCHES_OFF.items():
        because = f"{flag} takes the event loop without overlap (srt/managers/scheduler.py)"
        yield known(v.T_SWITCHES_OFF, mode, because, flag)
