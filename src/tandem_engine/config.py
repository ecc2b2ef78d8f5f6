"""How a worker is started: SGLang's flags, and timeouts from SGLang's environment variables.

For: reading and refusing a command line before anything heavy is imported.
Not for: what a running worker decides.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, NoReturn, get_args

EXIT_WORLD = 4
"""The machine said no: a port in use, a missing model, a missing wheel."""
EXIT_CONFIG = 3
"""The command line said something impossible."""

Mode = Literal["prefill", "decode"]
Era = Literal["0.5.6", "0.5.23"]
"""Which SGLang a worker looks like from outside: metrics, log lines, routes, version."""
CHUNK_TOKENS_MAX = 256
"""A longer `llama_decode` call runs for seconds without a counter moving."""


class ConfigError(Exception):
    """A flag or an environment variable is wrong; the message names it, the value and the fix."""


class StartError(Exception):
    """The worker cannot start on this machine; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds; the environment variables are SGLang's (protocol reference section 1)."""

    bootstrap_s: float = 300.0
    """`SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT`: a room at the prefill without metadata."""
    waiting_s: float = 300.0
    """`SGLANG_DISAGGREGATION_WAITING_TIMEOUT`: a room at the decode without KV."""
    heartbeat_s: float = 5.0
    """`SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL`; may be a fraction (SGLang's least is 2)."""
    heartbeat_misses_max: int = 2
    """`SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE`."""
    health_s: float = 20.0
    """`SGLANG_HEALTH_CHECK_TIMEOUT`: how long `/health` waits for any output of the scheduler."""

    @property
    def lease_s(self) -> float:
        """How long an agent lives without a renewal."""
        return self.heartbeat_s * (self.heartbeat_misses_max + 1)


_TIMEOUT_VARIABLES = {
    "bootstrap_s": "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",
    "waiting_s": "SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
    "heartbeat_s": "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL",
    "heartbeat_misses_max": "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE",
    "health_s": "SGLANG_HEALTH_CHECK_TIMEOUT",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One worker's settings; the names are SGLang's server arguments."""

    disaggregation_mode: Mode
    model_path: str
    served_model_name: str
    host: str = "127.0.0.1"
    port: int = 30000
    disaggregation_bootstrap_port: int = 8998
    disaggregation_transfer_backend: Literal["shm", "tcp"] = "shm"
    disable_overlap_schedule: bool = False
    max_running_requests: int = 8
    max_total_tokens: int = 8192
    context_length: int | None = None
    chunked_prefill_size: int = CHUNK_TOKENS_MAX
    decode_log_steps: int = 40
    """`--decode-log-interval`."""
    num_reserved_decode_tokens: int = 512
    cuda_graph_max_bs: int | None = None
    disaggregation_max_inflight: int = 16
    ranks: int = 1
    watchdog_s: float = 300.0
    """`--watchdog-timeout`."""
    drain_timeout_s: float = 5.0
    enable_metrics: bool = True
    metrics_era: Era = "0.5.23"
    enable_faults: str | None = None
    log_level: str = "info"

    def described(self) -> dict[str, object]:
        """The server arguments as `/server_info` and the start line give them."""
        shown: dict[str, object] = {field.name: getattr(self, field.name) for field in fields(self)}
        shown["decode_log_interval"] = shown.pop("decode_log_steps")
        shown["watchdog_timeout"] = shown.pop("watchdog_s")
        # SGLang has no such argument: the version says it.
        del shown["metrics_era"]
        shown |= {
            "tp_size": shown.pop("ranks"),
            "dp_size": 1,
            "pp_size": 1,
            "page_size": 1,
            "tokenizer_path": self.model_path,
            "load_balance_method": "follow_bootstrap_room",
            "device": "cpu",
        }
        return shown


class _Parser(argparse.ArgumentParser):
    """Bad flags are a `ConfigError`, not argparse's exit status 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def _at_least(least: int, most: int | None = None) -> "argparse._ActionType":
    bound = f"at least {least}" if most is None else f"{least} to {most}"

    def convert(text: str) -> int:
        value = int(text)
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{value} is out of range; give {bound}")
        return value

    convert.__name__ = f"integer, {bound}"
    return convert


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= 3600.0:
        raise argparse.ArgumentTypeError(f"{value} is out of range; give 0 to 3600 seconds")
    return value


def parser_of(mode: Mode, prog: str) -> argparse.ArgumentParser:
    """The flags of one role."""
    parser = _Parser(
        prog=prog, allow_abbrev=False, description=f"Serve the {mode} side of a PD pair."
    )
    add = parser.add_argument
    add("--model-path", "--model", required=True, metavar="smollm2|toy|PATH",
        help="the SmolLM2 wheel, the hash model, or a GGUF file")  # fmt: skip
    add("--served-model-name", help="name in replies and metrics (default: the model's)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=_at_least(0, 65535), default=30000, help="HTTP API (default: %(default)s)")
    add("--disaggregation-bootstrap-port", type=_at_least(0, 65535), default=8998,
        help="the rendezvous: served by a prefill, asked by a decode when a request names no port "
        "(default: %(default)s)")  # fmt: skip
    if mode == "prefill":
        add("--disaggregation-max-inflight", type=_at_least(1, 4096), default=16,
            help="hand-offs at a time: a room holds a slot from the end of bootstrapping until it "
            "is acknowledged or failed (default: %(default)s)")  # fmt: skip
    add("--disaggregation-transfer-backend", choices=("shm", "tcp"), default="shm",
        help="how KV lands on the decode; the decode decides (default: %(default)s)")  # fmt: skip
    add("--disable-overlap-schedule", action="store_true",
        help="do not prepare and process batches while another one computes")  # fmt: skip
    add("--max-running-requests", type=_at_least(1, 128), default=8,
        help="sequences in one step (default: %(default)s)")  # fmt: skip
    add("--max-total-tokens", type=_at_least(64), default=8192,
        help="KV cells (default: %(default)s)")  # fmt: skip
    add(
        "--context-length",
        type=_at_least(16),
        help="longest sequence, tokens; KV for all "
        "--max-running-requests of them is allocated at start (default: 1024)",
    )
    add("--chunked-prefill-size", type=_at_least(1, CHUNK_TOKENS_MAX), default=CHUNK_TOKENS_MAX,
        help="prompt tokens in one step (default: %(default)s)")  # fmt: skip
    add("--decode-log-interval", dest="decode_log_steps", type=_at_least(1), default=40,
        help="decode steps between log lines and gauge updates (default: %(default)s)")  # fmt: skip
    add("--num-reserved-decode-tokens", type=_at_least(1), default=512,
        help="cells a new sequence is admitted with beyond its prompt, at most (default: "
        "%(default)s)")  # fmt: skip
    add("--ranks", "--tp-size", type=_at_least(1, 16), default=1,
        help="processes that compute every step in lock step, as tensor-parallel ranks do: rank 0 "
        "serves, the others hold a shard of the hash model's (default: %(default)s)")  # fmt: skip
    add("--watchdog-timeout", dest="watchdog_s", type=_seconds, default=300.0,
        help="end the worker when one step takes longer, seconds; 0 never does (default: "
        "%(default)s)")  # fmt: skip
    add("--cuda-graph-max-bs", type=_at_least(1), help="accepted and shown; there is no GPU here")
    add("--drain-timeout-s", type=_seconds, default=5.0,
        help="how long SIGTERM waits for what still moves (default: %(default)s)")  # fmt: skip
    add("--enable-metrics", action=argparse.BooleanOptionalAction, default=True,
        help="serve /metrics (default: on)")  # fmt: skip
    add("--metrics-era", choices=get_args(Era), default="0.5.23",
        help="which SGLang to look like: metrics, log lines, routes, version (default: "
        "%(default)s)")  # fmt: skip
    add("--enable-faults", metavar="FILE",
        help="fault switchboard: settings kept in FILE, changed at /faults")  # fmt: skip
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info",
        help="(default: %(default)s)")  # fmt: skip
    return parser


def settings_of(mode: Mode, arguments: Sequence[str], prog: str) -> Settings:
    """Settings from a command line; raises `ConfigError`."""
    given = vars(parser_of(mode, prog).parse_args(arguments))
    given["served_model_name"] = given["served_model_name"] or given["model_path"]
    return Settings(disaggregation_mode=mode, **given)


def timeouts_of(environment: Mapping[str, str] = os.environ) -> Timeouts:
    """Timeouts from the environment; raises `ConfigError` for what is not a number above 0."""
    given: dict[str, float] = {}
    for field, variable in _TIMEOUT_VARIABLES.items():
        text = environment.get(variable)
        if text is None:
            continue
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0.0 < value < 1e7:
            raise ConfigError(f"{variable} is {text!r}; give a number of seconds above 0")
        given[field] = int(value) if field == "heartbeat_misses_max" else value
    return Timeouts(**given)  # type: ignore[arg-type]
