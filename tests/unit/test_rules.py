"""The alerting rules, evaluated by the real promtool over the series of healthy and sick nights."""

import json
import re
import subprocess

import pytest

from tandem.exports import prometheus_rules

WATCH = {"job": "tandem", "instance": "127.0.0.1:9464"}
PREFILL = {"job": "sglang", "instance": "10.0.0.1:30000", "model_name": "m"}
DECODE = {"job": "sglang", "instance": "10.0.0.2:30000", "model_name": "m"}
ROUTER = {"job": "smg", "instance": "10.0.0.3:29000"}
KINDS = ("silent-stall", "partial-stall", "member-down")
STEP_S = 15
EPOCH = "0+15x240"
"""`promtool` begins at the epoch: a clock that is right shows the time itself."""
UNTIL = 240
PATH = {"path": "/v1/chat/completions", "method": "POST"}


def series(name, labels, values):
    """One input series."""
    shown = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return {"series": f"{name}{{{shown}}}", "values": values}


def watched(**changed):
    """The series of a Tandem that watches and finds nothing."""
    values = {
        "up": "1x240",
        "tandem_watch_info": "1x240",
        "tandem_watch_last_turn_timestamp_seconds": EPOCH,
        "tandem_watch_turns_broken_total": "0x240",
        "failed": "0x240",
        **dict.fromkeys(KINDS, "0x240"),
        **changed,
    }
    found = []
    for name, given in values.items():
        if given is None:
            continue
        if name in KINDS:
            found.append(series("tandem_watch_findings_actionable", {**WATCH, "kind": name}, given))
        elif name == "failed":
            found.append(series("tandem_watch_incidents", {**WATCH, "state": "failed"}, given))
        elif name == "tandem_watch_info":
            found.append(series(name, {**WATCH, "deployment": "pair", "version": "1"}, given))
        else:
            found.append(series(name, WATCH, given))
    return found


def served(**changed):
    """The series of a pair behind its router under steady load: queues come and go."""
    values = {
        "inflight": "0 3 2 0 4 0 1 0 5 0 _x0 " + "0 2 " * 115,
        "transfers": "0+30x240",
        "failures": None,
        "prefill_tokens": "0+9000x240",
        "decode_tokens": "0+3000x240",
        "prefill_up": "1x240",
        "decode_up": "1x240",
        "requests": "0 30 60 90 120 150 180 210 240 270 " + counting(300, 30, 230),
        "responses": "0 28 60 87 120 148 180 209 240 265 " + counting(300, 30, 230),
        "active": "0 2 0 3 0 2 0 1 0 5 " + "0 3 " * 115,
        "breaker": "0x240",
        **changed,
    }
    ranks = {"tp_rank": "0", "pp_rank": "0"}
    names = {
        "inflight": ("sglang:num_prefill_inflight_queue_reqs", {**PREFILL, **ranks}),
        "transfers": ("sglang:kv_transfer_latency_ms_count", {**PREFILL, **ranks}),
        "failures": ("sglang:num_transfer_failed_reqs_total", {**PREFILL, **ranks}),
        "prefill_tokens": (
            "sglang:realtime_tokens_total",
            {**PREFILL, "engine_type": "prefill", "mode": "prefill_compute"},
        ),
        "decode_tokens": (
            "sglang:realtime_tokens_total",
            {**DECODE, "engine_type": "decode", "mode": "decode"},
        ),
        "prefill_up": ("up", {key: PREFILL[key] for key in ("job", "instance")}),
        "decode_up": ("up", {key: DECODE[key] for key in ("job", "instance")}),
        "requests": ("smg_http_requests_total", {**ROUTER, **PATH}),
        "responses": ("smg_http_responses_total", {**ROUTER, **PATH, "status_code": "200"}),
        "active": ("smg_worker_requests_active", {**ROUTER, "worker": "http://10.0.0.1:30000"}),
        "breaker": ("smg_worker_cb_state", {**ROUTER, "worker": "http://10.0.0.1:30000"}),
    }
    found = [series(*names[name], given) for name, given in values.items() if given is not None]
    for labels, up in ((PREFILL, values["prefill_up"]), (DECODE, values["decode_up"])):
        # A target that is not scraped shows nothing of its own.
        shown = up.replace("0x", "stale _x") if "0x" in up else "0x240"
        found.append(series("sglang:num_running_reqs", {**labels, **ranks}, shown))
    return found


def counting(first, step, count):
    """A counter's values in promtool's notation."""
    return f"{first}+{step}x{count}"


HEARTBEAT = {"TandemHeartbeat": [{**WATCH}]}
SCENES = {
    "healthy": (watched() + served(), 50, HEARTBEAT),
    "idle": (
        watched()
        + served(
            inflight="0x240", transfers="5x240", requests="9x240", responses="9x240",
            active="0x240", prefill_tokens="0+15x240", decode_tokens="0+15x240",
        ),
        50,
        HEARTBEAT,
    ),
    "before the first request": (
        watched()
        + served(
            inflight="0x240", transfers=None, requests=None, responses=None, active=None,
            prefill_tokens=None, decode_tokens=None,
        ),
        50,
        HEARTBEAT,
    ),
    "the watch is gone": (
        watched(
            up="1x40 0x200", tandem_watch_info="1x40 stale",
            tandem_watch_last_turn_timestamp_seconds="0+15x40 stale",
        )
        + served(),
        50,
        {"TandemIsNotWatching": [WATCH]},
    ),
    "the watch stands still": (
        watched(tandem_watch_last_turn_timestamp_seconds="0+15x40 600x200") + served(),
        60,
        {"TandemIsNotWatching": [WATCH]},
    ),
    "a finding": (
        watched(**{"silent-stall": "0x40 1x200"}) + served(),
        45,
        {**HEARTBEAT, "TandemFound": [{**WATCH, "kind": "silent-stall"}]},
    ),
    "an incident failed": (
        watched(failed="1x40 2x200") + served(),
        50,
        {**HEARTBEAT, "TandemNeedsAPerson": [{**WATCH, "state": "failed"}]},
    ),
    "looks break": (
        watched(
            tandem_watch_turns_broken_total="0x40 0+15x200",
            tandem_watch_last_turn_timestamp_seconds=EPOCH,
        )
        + served(),
        55,
        {**HEARTBEAT, "TandemIsBlind": [WATCH]},
    ),
    "a silent stall": (
        watched()
        + served(
            inflight="0 2 " * 20 + "6x200", transfers="0+30x40 1200x200",
            requests="0+30x40 1206x200", responses="0+30x40 1200x200",
            active="0 3 " * 20 + "6x200", decode_tokens="0+3000x40 120000+15x200",
        ),
        52,
        {
            **HEARTBEAT,
            "SglangHandOffsStandStill": [(PREFILL, "6")],
            "RouterAnswersNothing": [{key: ROUTER[key] for key in ("job", "instance")}],
        },
    ),
    "some hand-offs are left behind": (
        watched()
        + served(
            inflight="0 2 " * 20 + "3 5 " * 100,
            requests="0+30x40 " + counting(1207, 30, 199),
            responses="0+30x40 " + counting(1204, 30, 199),
        ),
        120,
        {
            **HEARTBEAT,
            "SglangHandOffsLeftBehind": [(PREFILL, "3")],
            "RouterRequestsMinusResponses": [(ROUTER, "3")],
        },
    ),
    "hand-offs fail": (
        watched() + served(failures="0x40 0+1x200"),
        60,
        {**HEARTBEAT, "SglangHandOffsFail": [(PREFILL, "19")]},
    ),
    "a decode restarted alone": (
        watched() + served(decode_tokens="0+3000x40 0+3000x200"),
        45,
        {**HEARTBEAT, "SglangDecodeRestartedAlone": [{"model_name": "m"}]},
    ),
    "the pair restarted": (
        watched()
        + served(decode_tokens="0+3000x40 0+3000x200", prefill_tokens="0+9000x40 0+9000x200"),
        45,
        HEARTBEAT,
    ),
    "an engine is gone": (
        watched() + served(decode_up="1x40 0x200"),
        50,
        {
            **HEARTBEAT,
            "SglangIsNotScraped": [{key: DECODE[key] for key in ("job", "instance")}],
        },
    ),
    "a breaker is open": (
        watched() + served(breaker="0x40 1x200"),
        50,
        {**HEARTBEAT, "RouterBreakerOpen": [{**ROUTER, "worker": "http://10.0.0.1:30000"}]},
    ),
}  # fmt: skip
"""A name: the series, the step at which one looks, and every alert that fires then."""


def rules():
    """Give each alert's severity and annotations, as the file has them."""
    found = {}
    for text in re.split(r"^ {6}- alert: ", prometheus_rules(), flags=re.MULTILINE)[1:]:
        name = text.split("\n")[0]
        severity = re.search(r"\{severity: (\w+)\}", text)[1]
        notes = re.findall(r'^ {10}(\w+): "(.*)"$', text, re.MULTILINE)
        found[name] = (severity, dict(notes))
    return found


def expected(alert, firing):
    """What promtool is to see of one firing alert."""
    labels, value = firing if isinstance(firing, tuple) else (firing, "")
    severity, notes = rules()[alert]

    def filled(text):
        for key, given in labels.items():
            text = text.replace(f"{{{{ $labels.{key} }}}}", given)
        return re.sub(r"\{\{ \$value[^}]*\}\}", value, text)

    return {
        "exp_labels": {**labels, "severity": severity},
        "exp_annotations": {key: filled(text) for key, text in notes.items()},
    }


@pytest.mark.needs("promtool")
@pytest.mark.timeout(60)
def test_the_real_promtool_fires_each_on_its_fault_alone(tmp_path):
    """In every scene exactly the named alerts fire: all others are asked for, and keep quiet."""
    (tmp_path / "rules.yml").write_text(prometheus_rules())
    tests = [
        {
            "name": name,
            "interval": f"{STEP_S}s",
            "input_series": given,
            "alert_rule_test": [
                {
                    "eval_time": f"{step * STEP_S}s",
                    "alertname": alert,
                    "exp_alerts": [expected(alert, one) for one in firing.get(alert, ())],
                }
                for alert in rules()
            ],
        }
        for name, (given, step, firing) in SCENES.items()
    ]
    document = {"rule_files": ["rules.yml"], "evaluation_interval": f"{STEP_S}s", "tests": tests}
    (tmp_path / "test.yml").write_text(json.dumps(document))
    checked = subprocess.run(
        ["promtool", "test", "rules", "test.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_rule_fires_somewhere():
    """No alert is without a scene in which it fires."""
    fired = {alert for _, _, firing in SCENES.values() for alert in firing}

    assert set(rules()) == fired
