"""The log lines worth counting, by slug: what engines and routers write when something goes wrong.

For: `logs.py`; one expression per slug, searched in each new line. Not for: judging what they mean.
Sources: SGLang 0.5.23 `srt/disaggregation/`, `srt/managers/`, `srt/observability/`; smg 1.13.0;
systemd 252.
"""

import re
from collections.abc import Mapping

SIGNATURES: Mapping[str, re.Pattern[bytes]] = {
    slug: re.compile(pattern)
    for slug, pattern in {
        # The pair at work: their absence says as much as any error.
        "prefill-batch": rb"Prefill batch",
        "decode-batch": rb"Decode batch",
        # Hand-offs that fail.
        "transfer-failed": rb"(?:Prefill|Decode) transfer failed",
        "bootstrap-failed": rb"Prefill bootstrap failed",
        "handshake-failed": rb"Decode handshake failed",
        "bootstrapping-timeout": (
            rb"in KVPoll\.Bootstrapping|Some requests timed out when bootstrapping"
        ),
        "waiting-timeout": (
            rb"in KVPoll\.WaitingForInput|fail to receive KV Cache transfer done signal"
        ),
        "request-aborted": rb"Aborted by (?:AbortReq|decode-side abort)",
        "peer-lost": (
            rb"Lost connection with prefill instance|Decode instance could be dead|"
            rb"prefill instance, it might be dead|Attempting to reconnect to"
        ),
        "peer-invalidated": rb"invalidated remote agent",
        "bootstrap-info-missing": (
            rb"Could not fetch (?:bootstrap|prefill parallel) info|"
            rb"Failed to get prefill server info"
        ),
        "register-failed": rb"Prefill register attempt \d+/\d+ failed",
        "kv-mismatch": rb"KV (?:blob|header|cache) (?:does not|mismatch)|KvMismatch",
        "release-timeout": rb"Deferred KV release for room \d+ timed out",
        # Threads and processes that die.
        "foreign-traffic": rb"Foreign traffic\?",
        "bootstrap-thread-died": rb"bootstrap_thread died",
        "watchdog-timeout": rb"[Ww]atchdog timeout",
        "health-failed": rb"Health check failed\. Server",
        "subprocess-crashed": rb"Subprocess .* crashed with exit code",
        "traceback": rb"Traceback \(most recent call last\)",
        "out-of-memory": rb"[Oo]ut of memory|OutOfMemoryError|MemoryError",
        "address-in-use": rb"[Aa]ddress already in use",
        "disk-full": rb"No space left on device",
        "cuda-error": rb"CUDA error|NCCL error|NCCL WARN",
        # The unit, in systemd's words.
        "main-process-exited": rb"Main process exited, code=(?:exited|killed|dumped)",
        "oom-killed": rb"killed by the OOM killer|result 'oom-kill'|Out of memory: Killed process",
        # The kernel, where the host has GPUs.
        "gpu-xid": rb"NVRM: Xid",
        # The router.
        "router-prefill-failed": rb"Prefill server failed|prefill_(?:server|internal)_error",
        "router-decode-failed": (
            rb"Decode server returned error status|decode_(?:server|internal)_error"
        ),
        "router-no-pair": rb"Failed to select PD pair|server_selection_failed",
        "router-worker-unhealthy": rb"[Hh]ealth check failed for",
        "router-breaker-opened": rb"[Cc]ircuit breaker.*(?:open|Open)",
    }.items()
}

ANY = re.compile(b"|".join(b"(?:" + one.pattern + b")" for one in SIGNATURES.values()))
"""Whether any of them matches: most lines match none."""
