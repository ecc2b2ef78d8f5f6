"""Measurements that survive an interruption, and the bars they are held to.

A bench measures step by step; each step's figures are in its results file as soon as they are
known, and a run that was cut short goes on after the last one. A finished file begins anew. Every
bar is printed once, and the exit status is 1 when one falls short.

For: every `benchmarks/*.py`.
Not for: what is measured.
"""

import json
import os
import platform
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path(__file__).parent / "results"
Figures = dict[str, Any]


def quick() -> bool:
    """Whether a shortened run was asked for: `QUICK=1`."""
    return os.environ.get("QUICK", "") not in ("", "0")


class Bench:
    """One run of one bench: its measurements, its bars, its results file."""

    def __init__(self, name: str) -> None:
        """Go on with an unfinished run of the same kind, or begin."""
        self.quick = quick()
        self._path = RESULTS / f"{name}{'-quick' if self.quick else ''}.json"
        self._short = False
        self._record: dict[str, Any] = {}
        if self._path.is_file():
            self._record = json.loads(self._path.read_text())
        if self._record.get("finished", True):
            self._record = {
                "command": f"{'QUICK=1 ' if self.quick else ''}make bench-{name}",
                "machine": machine(),
                "began": _now(),
                "load_before": os.getloadavg()[0],
                "finished": False,
                "measured": {},
                "bars": {},
            }
        else:
            say(f"going on with the run that began at {self._record['began']}")

    async def step(self, name: str, measure: Callable[[], Awaitable[Figures]]) -> Figures:
        """The figures of one step: from the file, or measured now and kept."""
        measured: dict[str, Figures] = self._record["measured"]
        if name not in measured:
            say(f"  measuring: {name} (load {os.getloadavg()[0]:.1f})")
            measured[name] = await measure()
            self.save()
        return measured[name]

    def bar(self, name: str, figure: float, bar: float, count: int, *, least: bool = False) -> None:
        """Print one bar; `least` when the figure must reach it, else it must stay within it."""
        holds = figure >= bar if least else figure <= bar
        self._short |= not holds
        sign, verdict = (">=" if least else "<="), ("holds" if holds else "falls short")
        say(f"{name}: {figure:.4g} ({sign} {bar:g}, n={count}) {verdict}")
        self._record["bars"][name] = {
            "figure": figure, "bar": f"{sign} {bar:g}", "n": count, "verdict": verdict,
        }  # fmt: skip

    def note(self, name: str, figure: float, count: int) -> None:
        """Print a figure that is stated and held to nothing."""
        say(f"{name}: {figure:.4g} (stated, n={count})")
        self._record["bars"][name] = {"figure": figure, "bar": "stated", "n": count}

    def missing(self, name: str, why: str) -> None:
        """Print a bar that could not be measured here: it falls short, unless the run is quick."""
        self._short |= not self.quick
        say(f"{name}: not measured ({why}) {'skipped' if self.quick else 'falls short'}")
        self._record["bars"][name] = {"figure": None, "bar": "not measured", "why": why}

    @property
    def measured(self) -> dict[str, Figures]:
        """Every step's figures so far."""
        measured: dict[str, Figures] = self._record["measured"]
        return measured

    def finish(self) -> int:
        """Close the results file; the exit status."""
        self._record |= {"finished": True, "ended": _now(), "load_after": os.getloadavg()[0]}
        self.save()
        return int(self._short)

    def save(self) -> None:
        """Keep what is known now."""
        RESULTS.mkdir(exist_ok=True)
        scratch = self._path.with_suffix(".new")
        scratch.write_text(json.dumps(self._record, indent=2, sort_keys=True) + "\n")
        scratch.replace(self._path)


def machine() -> dict[str, object]:
    """What the figures were measured on; no names of hosts or people."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "python": platform.python_version(),
    }


def say(line: str) -> None:
    """One line, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
