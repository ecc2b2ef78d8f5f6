"""`docs/measured.md` from the results of `make bench-watch`, its plot beside it.

`watch_page.py`: writes both; nothing is measured here and nothing is rounded up.
"""

import json
from collections import defaultdict
from pathlib import Path
from statistics import median

from bars import RESULTS, Figures
from watch_beside import OTHERS, TANDEM, plot
from watch_soak import CONFIDENCE, SLICES

DOCS = Path(__file__).parent.parent / "docs"


PAGE = """\
# Measured

`{command}` on {day}: {machine}; load {before:.1f} before and {after:.1f} after.
The raw results are in `benchmarks/results`; run it again and see.

Every fault is a mechanism of the embedded engine's switchboard.
The watch is a separate process that knows only `tandem.toml`.
Times are from the client's own log.
They begin with the first request that never completes, under saturation with the last thing any \
client got.

## Bars

{bars}

{soak}.

## Seconds to a finding

{stalls}

## Side by side

The same faults under light traffic, and what people use today:

- a Prometheus rule with `for: 2m` on the engines' queues and counters, by promtool over series \
recorded every five seconds;
- the router's health and its word on its workers, asked every five seconds;
- three failed `/health` of an engine in a row, ten seconds apart, with five seconds' patience.

{beside}

![seconds to notice, by fault and observer](measured.svg)

## By the number of members

Members are recorded pages (356 KB a prefill, 175 KB a decode) on the same machine.
Half of them are prefills and half decodes, and every pair is a path; behind Prometheus twenty are \
prefills.

{curve}
"""


def _bars(record: Figures) -> list[str]:
    lines = ["| what | measured | bar | n | |", "| --- | --- | --- | --- | --- |"]
    for name, one in record["bars"].items():
        figure = "not measured" if one["figure"] is None else f"{one['figure']:.4g}"
        bar = one["bar"] if one["bar"] not in ("stated", "not measured") else ""
        count, verdict = one.get("n", ""), one.get("verdict", one.get("why", "stated"))
        if not name.startswith(("looks a second", "cores at", "beside: ", "false alarms in")):
            lines.append(f"| {name} | {figure} | {bar} | {count} | {verdict} |")
    return lines


def _stalls(measured: dict[str, Figures]) -> list[str]:
    by: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for one in measured.values():
        if "mechanism" in one and "after_s" in one and "traffic" in one:
            said = "missed" if one["found"] is None else f"{one['after_s']:.1f}"
            by[f"{one['mechanism']} ({one['site']})"][one["traffic"]].append(said)
    lines = ["| mechanism (deployment) | idle | light | saturated |", "| --- | --- | --- | --- |"]
    for name in sorted(by):
        cells = [", ".join(by[name][word]) for word in ("idle", "light", "saturated")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _beside(measured: dict[str, Figures], slices: list[Figures]) -> list[str]:
    rows = [one for name, one in measured.items() if name.startswith("beside: ")]
    who_all = (TANDEM, *OTHERS)
    lines = [f"| fault, held for three minutes | {' | '.join(who_all)} |", "| --- |" + " --- |" * 4]
    for one in sorted(rows, key=lambda one: (one["site"], one["mechanism"])):
        said = [
            "never" if (after := one["after_s"].get(who)) is None else f"{after:.0f} s"
            for who in who_all
        ]
        lines.append(f"| {one['mechanism']} ({one['site']}) | {' | '.join(said)} |")
    noticed = [[t for one in rows if (t := one["after_s"].get(who)) is not None] for who in who_all]
    said = [
        f"{len(times)} of {len(rows)}" + (f", median {median(times):.0f} s" if times else "")
        for times in noticed
    ]
    lines.append(f"| noticed | {' | '.join(said)} |")
    hours = sum(one["hours"] for one in slices)
    false = [sum(len(one["false"]) for one in slices)]
    false += [sum(len(one["others"].get(who, ())) for one in slices) for who in OTHERS]
    alarms = " | ".join(map(str, false))
    lines.append(f"| false alarms in {hours:.1f} deployment-hours of soak | {alarms} |")
    return lines


def _curve(measured: dict[str, Figures]) -> list[str]:
    rows = [one for name, one in measured.items() if name.startswith("curve: ")]
    lines = [
        "| members | source | looks a second | cores | CPU-seconds per member-hour | memory, MB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {one['members']} | {one.get('source', 'scraped')} | {one['hz']:.2f} "
        f"| {one['cores']:.2f} | {one['cpu_s_per_member_hour']:.0f} | {one['rss_mb']:.0f} |"
        for one in sorted(rows, key=lambda one: (one.get("source", ""), one["members"]))
    ]
    return lines


def page(record: Figures, slices: list[Figures]) -> str:
    """The page."""
    measured, on = record["measured"], record["machine"]
    hours = sum(one["hours"] for one in slices)
    false = sum(len(one["false"]) for one in slices)
    soak = f"{hours:.2f} deployment-hours of real soak: {false} false findings"
    if not false and hours:
        soak += f", so at most {CONFIDENCE / hours:.2f} an hour (95 %)"
    return PAGE.format(
        command=record["command"],
        day=record["began"][:10],
        machine=f"{on['cores']} cores ({on['cpu']}), {on['memory_gb']:.0f} GB, "
        f"Python {on['python']}",
        before=record["load_before"],
        after=record.get("load_after", 0.0),
        bars="\n".join(_bars(record)),
        soak=soak,
        stalls="\n".join(_stalls(measured)),
        beside="\n".join(_beside(measured, slices)),
        curve="\n".join(_curve(measured)),
    )


if __name__ == "__main__":
    record = json.loads((RESULTS / "watch.json").read_text())
    soaked = json.loads(SLICES.read_text())["slices"] if SLICES.is_file() else []
    (DOCS / "measured.md").write_text(page(record, soaked))
    beside = [one for name, one in record["measured"].items() if name.startswith("beside: ")]
    (DOCS / "measured.svg").write_text(plot(beside))
