"""The words in which observations and traits speak; adapters map their engine's names to these.

For: the names judgement may rely on, with unit and freshness. Not for: any engine's own names.
Reqs are counts of requests; `_total` are counters that only grow within one incarnation.
"""

# Live queue state of an engine (source `loads`: refreshed even in a total stall, by trait).
RUNNING_REQS = "running_reqs"
WAITING_REQS = "waiting_reqs"
BOOTSTRAP_QUEUE_REQS = "bootstrap_queue_reqs"  # prefill: waiting for the decode's metadata
INFLIGHT_QUEUE_REQS = "inflight_queue_reqs"  # prefill: computed, hand-off not yet acknowledged
PREALLOC_QUEUE_REQS = "prealloc_queue_reqs"  # decode: waiting for room to receive
TRANSFER_QUEUE_REQS = "transfer_queue_reqs"  # decode: waiting for the KV to arrive
RETRACTED_QUEUE_REQS = "retracted_queue_reqs"  # decode: pushed out, waiting to resume
TOKEN_USAGE = "token_usage"  # 0..1, share of the KV pool
LIVE_LOADS = "live_loads"  # the endpoint that gave them; `missing` says why none did

# Progress and failure counters of an engine (source `metrics`).
PROGRESS_TOKENS_TOTAL = "progress_tokens_total"  # every token computed, in any mode
REQUESTS_TOTAL = "requests_total"
PROMPT_TOKENS_TOTAL = "prompt_tokens_total"  # of finished requests, health checks not counted
GENERATION_TOKENS_TOTAL = "generation_tokens_total"
TRANSFERS_TOTAL = "transfers_total"  # hand-offs that completed, seen by the prefill
TRANSFER_SECONDS_TOTAL = "transfer_seconds_total"
TRANSFER_FAILED_TOTAL = "transfer_failed_total"
BOOTSTRAP_FAILED_TOTAL = "bootstrap_failed_total"
ABORTED_TOTAL = "aborted_total"
TTFT_P99_S = "ttft_p99_s"  # from the engine's own histogram, over its lifetime

ANSWER_S = "answer_s"  # label = endpoint: how long it took, told when it was slow

# Health endpoints (source `health`).
HEALTH_STATUS = "health_status"  # HTTP status
HEALTH_LATENCY_S = "health_latency_s"
BOOTSTRAP_READY = "bootstrap_ready"  # bool: the prefill's rendezvous has every rank

# Path probes (source `probe`; subject is a path, or the router's name for a routed one). Label
# `long`: of the long probe that follows a restart, beside the row without a label; see `LONG`.
# Paths that are pairs of data-parallel ranks speak for themselves and for their cell.
PROBE = "probe"  # completed | unproven (answered, no KV seen to move) | late | failed | off
# | stuck (an earlier one is still out, or ended without an answer and may hold its room still)
PROBE_LATENCY_S = "probe_latency_s"
PROBE_KV_MOVED = "probe_kv_moved"  # bool, None when nothing could show it
PROBE_TOKENS = "probe_tokens"
PROBE_ANSWERS = "probe_answers"  # token ids for the known prompt: first, last but one, last
PROBE_DETAIL = "probe_detail"  # why a probe failed, is late, or is off, as one clause
PROBES_SENT_TOTAL = "probes_sent_total"  # by this Tandem, since it started
PROBE_TOKENS_TOTAL = "probe_tokens_total"  # what they asked to be computed, prompts and answers
LONG = "long"

# The router (source `router`).
ROUTER_REQUESTS_TOTAL = "router_requests_total"
ROUTER_RESPONSES_TOTAL = "router_responses_total"  # label "" = all, else an HTTP status code
ROUTER_ACTIVE_REQS = "router_active_reqs"
ROUTER_REQUEST_AGE_S = "router_request_age_s"  # its oldest open request is older; 0: none is old
WORKER_STATUS = "worker_status"  # the router's own word for it, label = member
WORKER_HEALTHY = "worker_healthy"  # bool, label = member (or URL when no member matches)
WORKER_ACTIVE_REQS = "worker_active_reqs"  # label = member
WORKER_BREAKER_OPEN = "worker_breaker_open"  # bool, label = member

# Processes (source `process`).
ALIVE = "alive"
PID = "pid"
STARTED_AT = "started_at"
CPU_SECONDS_TOTAL = "cpu_seconds_total"
RSS_BYTES = "rss_bytes"
COMMAND_LINE = "command_line"  # tuple of words, secrets redacted
ENVIRONMENT = "environment"  # label = variable, allowlisted ones only
PROCESS_STATE = "process_state"  # R S D T Z
EXIT_CODE = "exit_code"  # of a member that ended, where visible; negative: by that signal
WAIT_CHANNEL = "wait_channel"  # where in the kernel its leading process waits, when readable
THREADS = "threads"  # of the member and its children
THREADS_BLOCKED = "threads_blocked"  # those of them in state D
SOCKETS = "sockets"  # TCP connections; label "" = all, else those it opened to that member
CHILDREN = "children"  # processes below the leading one; each has its rows, label = its pid
CHILD_ROLE = "child_role"  # scheduler_TP0, detokenizer, ...: by its title or what it runs
CHILD_STATE = "child_state"  # R S D T Z, or gone
CHILD_STARTED_AT = "child_started_at"
CHILD_CPU_SECONDS_TOTAL = "child_cpu_seconds_total"
CHILD_RSS_BYTES = "child_rss_bytes"
CHILD_THREADS = "child_threads"
CHILD_EXIT_CODE = "child_exit_code"
CHILD_WAIT_CHANNEL = "child_wait_channel"

# Logs and stacks.
LOG_LINES_TOTAL = "log_lines_total"
LOG_SIGNATURE = "log_signature"  # label = signature slug, value = count in this incarnation's log
LOG_LAST = "log_last"  # label = signature slug, value = last such line, redacted
LOG_FIRST_SEEN_AT = "log_first_seen_at"  # label = signature slug, value = unix seconds
LOG_LAST_SEEN_AT = "log_last_seen_at"  # label = signature slug, value = unix seconds
LOG_SKIPPED_BYTES_TOTAL = "log_skipped_bytes_total"  # written faster than it could be read
STACK = "stack"  # label = thread, value = frames, innermost first, one a line, never locals
STACK_STATE = "stack_state"  # label = thread, value = idle | active
STACK_RANKS = "stack_ranks"  # one sentence: which ranks are where, and who is elsewhere
STACK_CLUSTER = "stack_cluster"  # label = 1, 2, ... fullest first; value = ranks, `:`, the place

# Units (source `unit`): systemd's word on a member's service; kept once per change.
UNIT = "unit"  # its name; `user:` before it when a user's own systemd has it
UNIT_STATE = "unit_state"  # `active/running`, `activating/auto-restart`, `failed/failed`
UNIT_RESULT = "unit_result"  # success | exit-code | signal | oom-kill | timeout | watchdog | ...
UNIT_RESTARTS_TOTAL = "unit_restarts_total"  # the automatic ones, since systemd last forgot
UNIT_STARTED_AT = "unit_started_at"  # of the main process, unix seconds
UNIT_INVOCATION = "unit_invocation"  # systemd's own id of this life
UNIT_EXIT = "unit_exit"  # how a main process ended: `exit code 3`, `killed by SIGKILL`
UNIT_FILE_WRITTEN_AT = "unit_file_written_at"  # label = path of the unit file or a drop-in
UNIT_RELOAD_NEEDED = "unit_reload_needed"  # bool: files are newer than what systemd has read

# Containers (source `container`): the engine's word on a member's container; kept once per change.
CONTAINER = "container"  # its name and the start of its id
CONTAINER_STATE = "container_state"  # created | running | paused | restarting | exited | dead
CONTAINER_EXIT = "container_exit"  # how its main process ended: `exit code 137`
CONTAINER_OOM_KILLED = "container_oom_killed"  # bool
CONTAINER_RESTARTS_TOTAL = "container_restarts_total"  # by its restart policy
CONTAINER_STARTED_AT = "container_started_at"  # unix seconds
CONTAINER_FINISHED_AT = "container_finished_at"  # unix seconds, None before its first end
CONTAINER_HEALTH = "container_health"  # starting | healthy | unhealthy, None without a check
CONTAINER_IMAGE = "container_image"  # name and id

# GPUs (source `gpu`; subject is the one member that has the GPU for itself, else `host`;
# label = index of the GPU).
GPU_COUNT = "gpu_count"  # subject `host`; `missing` says why none can be seen
GPU_NAME = "gpu_name"  # model and UUID
GPU_DRIVER = "gpu_driver"  # subject `host`
GPU_UTILIZATION = "gpu_utilization"  # 0..1: share of time in which a kernel ran; unknown under MIG
GPU_POWER_W = "gpu_power_w"
GPU_IDLE_W = "gpu_idle_w"  # learned: usual power while no kernel ran
GPU_BUSY_W = "gpu_busy_w"  # learned: high power while kernels ran
GPU_MEMORY_USED_BYTES = "gpu_memory_used_bytes"  # of the whole GPU
GPU_MEMORY_TOTAL_BYTES = "gpu_memory_total_bytes"
GPU_MEMORY_BYTES = "gpu_memory_bytes"  # subject = member, by its own processes
GPU_SM_CLOCK_MHZ = "gpu_sm_clock_mhz"
GPU_SLOWDOWN = "gpu_slowdown"  # tuple: power-cap, thermal, power-brake, hardware; empty is none
GPU_XID = "gpu_xid"  # a driver error just reported: its number
GPU_XIDS_TOTAL = "gpu_xids_total"  # since Tandem began to listen

# Server information (source `server_info`).
SERVER_ARG = "server_arg"  # label = argument name, value = its value as text
MISSTATED = "misstated"  # label = key of a member in tandem.toml, value = how it is otherwise

# Collecting itself.
SOURCE_FAILED = "source_failed"  # subject `host`, label = the source; `missing` says why

# Traits.
T_ENGINE_FAMILY = "engine_family"
T_ENGINE_VERSION = "engine_version"
T_ACTIVE_PROBE_SAFE = "active_probe_safe"  # bool: an abandoned probe cannot hurt
T_DECODE_ALONE_RESTART_HURTS = "decode_alone_restart_hurts"  # bool
T_START_ORDER = "start_order"  # tuple of roles
T_STOP_ORDER = "stop_order"
T_WAITING_TIMEOUT_S = "waiting_timeout_s"
T_BOOTSTRAP_TIMEOUT_S = "bootstrap_timeout_s"
T_TOUCHES = "touches"  # label = flag or variable, value = component
T_SWITCHES_OFF = "switches_off"  # label = flag or VAR=value, value = mode it makes impossible
T_FREEZES_IN_STALL = "freezes_in_stall"  # label = our name of a gauge, value bool
T_HEALTH_RUNS_FORWARD = "health_runs_forward"  # bool: a 200 means a forward step just ran
