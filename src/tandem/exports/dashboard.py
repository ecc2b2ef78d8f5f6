"""The Grafana dashboard: on one page what a bad night needs to be seen beside each other.

For: the JSON that Grafana imports. Not for: alerting (`prometheus-rules.yml`).
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

SCHEMA_VERSION = 39
"""Of Grafana 10.3; later ones migrate it."""
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
BY = "job, instance"
PATHS = '{path=~"/generate|/v1/.*completions"}'
REQUESTS = f"sum by ({BY}) (smg_http_requests_total{PATHS})"
RESPONSES = f"sum by ({BY}) (smg_http_responses_total{PATHS})"
FIRST_TOKENS = f"sum by (le, {BY}) (rate(sglang:time_to_first_token_seconds_bucket[5m]))"


class Panel(NamedTuple):
    """One graph: what it shows, why one looks at it, its unit, and (legend, expression) pairs."""

    title: str
    about: str
    unit: str
    queries: tuple[tuple[str, str], ...]


HAND_OFFS = (
    Panel(
        "Inflight floor",
        "The least number of hand-offs waiting on a prefill over two minutes. Above zero without "
        "load, or never zero again after a restart, is how a stall begins.",
        "short",
        (
            (
                "{{instance}}",
                f"min by ({BY}) (min_over_time(sglang:num_prefill_inflight_queue_reqs[2m]))",
            ),
        ),
    ),
    Panel(
        "Requests minus responses",
        "What the router took in and has not answered. It returns to zero when nothing is stuck.",
        "short",
        (
            ("{{instance}}", f"{REQUESTS} - {RESPONSES}"),
            ("in hand, {{worker}}", "max by (worker) (smg_worker_requests_active)"),
        ),
    ),
    Panel(
        "Transfers",
        "Hand-offs that completed and that failed, a second. SGLang shows no failure counter "
        "before the first failure.",
        "ops",
        (
            (
                "completed, {{instance}}",
                f"sum by ({BY}) (rate(sglang:kv_transfer_latency_ms_count[1m]))",
            ),
            (
                "failed, {{instance}}",
                f"sum by ({BY}) (rate(sglang:num_transfer_failed_reqs_total[1m]))",
            ),
        ),
    ),
    Panel(
        "Tokens computed",
        "All tokens by role. About one a second per health check is no progress.",
        "short",
        (
            (
                "{{engine_type}} {{instance}}",
                f"sum by (engine_type, {BY}) (rate(sglang:realtime_tokens_total[1m]))",
            ),
        ),
    ),
    Panel(
        "Queues",
        "Where requests wait. A decode's gauges freeze while nothing moves: a flat line is no "
        "zero, and no proof of anything.",
        "short",
        (
            (
                "bootstrap, {{instance}}",
                f"max by ({BY}) (sglang:num_prefill_bootstrap_queue_reqs)",
            ),
            ("inflight, {{instance}}", f"max by ({BY}) (sglang:num_prefill_inflight_queue_reqs)"),
            ("transfer, {{instance}}", f"max by ({BY}) (sglang:num_decode_transfer_queue_reqs)"),
            ("prealloc, {{instance}}", f"max by ({BY}) (sglang:num_decode_prealloc_queue_reqs)"),
        ),
    ),
    Panel(
        "Time to first token, p99",
        "Of requests that got one: a request that hangs is not in it.",
        "s",
        (("{{instance}}", f"histogram_quantile(0.99, {FIRST_TOKENS})"),),
    ),
)
WATCH = (
    Panel(
        "Probes",
        "Tandem's tiny requests over every path, by what was last seen of them.",
        "ops",
        (
            ("sent", "sum (rate(tandem_watch_probes_total[1m]))"),
            ("{{result}}", "sum by (result) (rate(tandem_watch_probe_looks_total[1m]))"),
        ),
    ),
    Panel(
        "Findings",
        "What stands, by kind.",
        "short",
        (("{{kind}}", "sum by (kind) (tandem_watch_findings_open) > 0"),),
    ),
    Panel(
        "Since the last turn",
        "Seconds since Tandem last looked and judged. Growing: nobody watches.",
        "s",
        (("{{instance}}", "time() - tandem_watch_last_turn_timestamp_seconds"),),
    ),
    Panel(
        "Cost of watching",
        "CPU of the watch as a share of one core, and tokens of its probes a second.",
        "short",
        (
            (
                "cores, {{instance}}",
                "rate(process_cpu_seconds_total[5m]) and on (job, instance) tandem_watch_info",
            ),
            ("probe tokens/s, {{instance}}", "rate(tandem_watch_probe_tokens_total[5m])"),
        ),
    ),
    Panel(
        "Breakers",
        "1 is open: the router sends that worker nothing, and calls it healthy.",
        "short",
        (("{{worker}}", "max by (worker) (smg_worker_cb_state)"),),
    ),
    Panel(
        "Incidents",
        "Incident folders kept, by state.",
        "short",
        (("{{state}}", "sum by (state) (tandem_watch_incidents)"),),
    ),
)


def grafana_dashboard() -> str:
    """The dashboard as JSON, ready to be imported; the same text every time."""
    panels: list[dict[str, object]] = []
    for title, group in (("Hand-offs", HAND_OFFS), ("The watch", WATCH)):
        panels.append(_row(title, len(panels) + 1, _bottom(panels)))
        panels += _placed(group, len(panels) + 1, _bottom(panels))
    text = msgspec.json.format(msgspec.json.encode(_whole(panels)), indent=2).decode()
    return text + "\n"


def _whole(panels: list[dict[str, object]]) -> dict[str, object]:
    return {
        "uid": "tandem-pd",
        "title": "Tandem: prefill and decode",
        "description": "Whether hand-offs flow, and what Tandem found.",
        "tags": ["tandem", "sglang"],
        "timezone": "utc",
        "editable": True,
        "graphTooltip": 1,
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "links": [],
        "annotations": {"list": [_findings()]},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                    "hide": 0,
                    "includeAll": False,
                    "multi": False,
                    "refresh": 1,
                }
            ]
        },
        "panels": panels,
    }


def _findings() -> dict[str, object]:
    """Findings as marks over every graph."""
    expression = "sum by (kind) (tandem_watch_findings_open) > 0"
    return {
        "name": "Findings",
        "enable": True,
        "hide": False,
        "iconColor": "red",
        "datasource": SOURCE,
        "expr": expression,
        "step": "15s",
        "titleFormat": "{{kind}}",
        "textFormat": "Tandem found {{kind}}",
        "tagKeys": "kind",
    }


def _bottom(panels: Iterable[dict[str, object]]) -> int:
    places = (one["gridPos"] for one in panels)
    return max((place["y"] + place["h"] for place in places if isinstance(place, dict)), default=0)


def _row(title: str, number: int, y: int) -> dict[str, object]:
    return {
        "id": number,
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": {"h": 1, "w": 24, "x": 0, "y": y},
        "panels": [],
    }


def _placed(group: tuple[Panel, ...], first: int, y: int) -> list[dict[str, object]]:
    """Two graphs beside each other, row by row."""
    return [
        {
            "id": first + place,
            "type": "timeseries",
            "title": panel.title,
            "description": panel.about,
            "datasource": SOURCE,
            "gridPos": {"h": 8, "w": 12, "x": 12 * (place % 2), "y": y + 8 * (place // 2)},
            "fieldConfig": {
                "defaults": {"unit": panel.unit, "min": 0, "custom": {"lineWidth": 1}},
                "overrides": [],
            },
            "options": {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                "tooltip": {"mode": "multi", "sort": "desc"},
            },
            "targets": [
                {
                    "refId": chr(ord("A") + number),
                    "datasource": SOURCE,
                    "expr": expression,
                    "legendFormat": legend,
                    "range": True,
                }
                for number, (legend, expression) in enumerate(panel.queries)
            ],
        }
        for place, panel in enumerate(group)
    ]


__all__ = ["grafana_dashboard"]
