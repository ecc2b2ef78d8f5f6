"""Log lines in SGLang's shape: `[YYYY-mm-dd HH:MM:SS] message`, batch lines with its fields.

Not for: what is worth a line (the phases decide).
"""

import logging
import sys
from collections.abc import Mapping


def set_up(level: str) -> None:
    """Send the engine's lines to stderr; libraries speak only when something is wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s", "%Y-%m-%d %H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("tandem_engine").setLevel(level.upper())


def batch_line(name: str, fields: Mapping[str, object]) -> str:
    """`Prefill batch, #new-seq: 1, ...`."""
    return ", ".join([name, *(f"{field}: {value}" for field, value in fields.items())])
