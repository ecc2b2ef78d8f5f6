"""The metrics scanner against the official parser, on pages like SGLang's: `make bench-scan`.

Both read the same page in the same run, turn by turn, and CPU time is compared, so that whatever
else the machine does counts for neither. Ours finds the series that the SGLang adapter wants; the
official parser has to read every line to find the same ones, which is the whole difference. That
both find the same is checked first.

Not for: fetching pages, or what a page means.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from bars import Bench, Figures
from tandem.engines.sglang_names import COUNTERS, GAUGES, SCANNER

RATIO = 20.0
RANKS = {"one rank": 1, "8 ranks": 8, "64 ranks": 64}
HISTOGRAMS = (
    *("kv_transfer_latency_ms", "kv_transfer_total_mb", "kv_transfer_bootstrap_ms"),
    *("kv_transfer_alloc_ms", "kv_transfer_speed_gb_s", "queue_time_seconds"),
    *("inter_token_latency_seconds", "e2e_request_latency_seconds", "time_to_first_token_seconds"),
    *(f"per_stage_req_latency_seconds_{stage}" for stage in range(9)),
)
BUCKETS = 30
OTHERS = tuple(f"another_gauge_{number}" for number in range(20))


def page(ranks: int) -> str:
    """A page with SGLang's families, labels and buckets, every rank on it."""
    return "".join(_lines(ranks))


def _lines(ranks: int) -> Iterator[str]:
    labels = [
        f'model_name="org/model-7b",engine_type="prefill",tp_rank="{rank}",pp_rank="0",'
        f'moe_ep_rank="0"'
        for rank in range(ranks)
    ]
    plain = [*(name for names in GAUGES.values() for name in names), *OTHERS]
    plain += [name for names in COUNTERS.values() for name in names if name.endswith("_total")]
    for name in plain:
        kind = "counter" if name.endswith("_total") else "gauge"
        yield f"# HELP sglang:{name} What it counts.\n# TYPE sglang:{name} {kind}\n"
        for rank, own in enumerate(labels):
            yield f"sglang:{name}{{{own}}} {rank * 1.5}\n"
    for name in HISTOGRAMS:
        yield f"# HELP sglang:{name} What it counts.\n# TYPE sglang:{name} histogram\n"
        for own in labels:
            for bucket in range(BUCKETS):
                yield f'sglang:{name}_bucket{{le="{bucket * 0.5}",{own}}} {bucket * 10}.0\n'
            yield f'sglang:{name}_bucket{{le="+Inf",{own}}} 300.0\n'
            yield f"sglang:{name}_sum{{{own}}} 1234.5\nsglang:{name}_count{{{own}}} 300.0\n"


def official(text: str) -> int:
    """Samples that the official parser finds."""
    return sum(len(family.samples) for family in text_string_to_metric_families(text))


def agree(text: str) -> bool:
    """Whether both find the same wanted samples."""
    ours = sorted((one.name, sorted(one.labels.items()), one.value)
                  for one in SCANNER.scan(text.encode()))  # fmt: skip
    names = {name for name, _, _ in ours}
    theirs = sorted(
        (one.name, sorted(one.labels.items()), one.value)
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if one.name in names
    )
    return ours == theirs


def seconds(work: Callable[[], object]) -> float:
    """The CPU time that it took once."""
    began = time.process_time()
    work()
    return time.process_time() - began


async def measure(ranks: int, turns: int) -> Figures:
    """Both on one page, turn by turn; medians, and the least ratio of any turn."""
    text = page(ranks)
    body = text.encode()
    if not agree(text):
        raise SystemExit("the scanner and the official parser disagree on the page of the bench")
    pairs = [
        (
            seconds(lambda: official(text)),
            seconds(lambda: SCANNER.scan(body)),
        )
        for _ in range(turns)
    ]
    return {
        "page_bytes": len(body),
        "official_ms": 1e3 * statistics.median(pair[0] for pair in pairs),
        "scanner_ms": 1e3 * statistics.median(pair[1] for pair in pairs),
        "ratio": statistics.median(pair[0] / pair[1] for pair in pairs),
        "ratio_min": min(pair[0] / pair[1] for pair in pairs),
        "turns": turns,
    }


async def main() -> int:
    """Measure and print; the exit status."""
    bench = Bench("scan")
    for name, ranks in RANKS.items():
        turns = max(3, (20 if bench.quick else 60) // ranks)
        found = await bench.step(name, lambda ranks=ranks, turns=turns: measure(ranks, turns))
        size = f"{found['page_bytes'] / 1e3:.0f} kB, {found['scanner_ms']:.2f} ms a page"
        bench.bar(
            f"scanner, {name} ({size}): times faster than prometheus_client",
            found["ratio"],
            RATIO,
            found["turns"],
            least=True,
        )
    return bench.finish()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
