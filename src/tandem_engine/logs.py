"""Log lines in SGLang's shape: `[YYYY-mm-dd HH:MM:SS] message`, batch lines with its fields.

Not for: what is worth a line (the phases decide).
"""

import logging
import sys
from dataclasses import dataclass

from tandem_engine.config import Era


def set_up(level: str) -> None:
    """Send the engine's lines to stderr; libraries speak only when something is wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s", "%Y-%m-%d %H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("tandem_engine").setLevel(level.upper())


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLine:
    """What a prefill says of one batch."""

    new_seqs: int
    new_tokens: int
    cached_tokens: int
    token_usage: float
    running: int
    queued: int
    pending_tokens: int
    bootstrap: int
    inflight: int
    throughput: float
    """Tokens a second."""

    def text(self, era: Era) -> str:
        """The line as that SGLang writes it (`metrics_reporter.py`, `scheduler_metrics_mixin.py`).

        0.5.6 knows fewer fields, and its lines end in a comma.
        """
        old = era == "0.5.6"
        said = (
            f"Prefill batch, #new-seq: {self.new_seqs}, #new-token: {self.new_tokens}, "
            f"#cached-token: {self.cached_tokens}, token usage: {self.token_usage:.2f}, "
            f"#running-req: {self.running}, #queue-req: {self.queued}, "
        )
        if old:
            said += f"#prealloc-req: {self.bootstrap}, #inflight-req: {self.inflight}, "
        else:
            said += (
                f"#pending-token: {self.pending_tokens}, #bootstrap-req: {self.bootstrap}, "
                f"#inflight-req: {self.inflight}, #optimistic-req: 0, cuda graph: False, "
            )
        return said + f"input throughput (token/s): {self.throughput:.2f}" + ", " * old


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLine:
    """What a decode says every `decode_log_interval` steps."""

    running: int
    tokens: int
    token_usage: float
    preallocated_usage: float
    prealloc: int
    transfer: int
    retracted: int
    throughput: float
    """Tokens a second."""
    queued: int

    def text(self, era: Era) -> str:
        """The line as that SGLang writes it; a line of 0.5.6 ends in a comma."""
        return (
            f"Decode batch, #running-req: {self.running}, #token: {self.tokens}, "
            f"token usage: {self.token_usage:.2f}, "
            f"pre-allocated usage: {self.preallocated_usage:.2f}, "
            f"#prealloc-req: {self.prealloc}, #transfer-req: {self.transfer}, "
            f"#retracted-req: {self.retracted}, cuda graph: False, "
            f"gen throughput (token/s): {self.throughput:.2f}, #queue-req: {self.queued}"
        ) + ", " * (era == "0.5.6")
