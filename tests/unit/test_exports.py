"""What is handed to systemd, Prometheus and Grafana is accepted by the real ones."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import tidy
from tandem.__main__ import main
from tandem.exports import grafana_dashboard, prometheus_rules, watch_unit
from tandem.exports.unit import TEMPORARY
from tandem.records import Deployment, Member, ReportSettings, Role, Settings, WatchSettings


def settings_of(root="/srv/pair", *, supervisor="none", members=2, **fields):
    """Settings of a deployment with so many members."""
    found = tuple(
        Member(
            name=f"m{number}",
            role=Role.DECODE if number else Role.PREFILL,
            url=f"http://127.0.0.1:{20000 + number}",
            engine="sglang",
            supervisor=supervisor,
        )
        for number in range(members)
    )
    fields.setdefault("report", ReportSettings(document=f"{root}/INCIDENTS.md"))
    return Settings(root=root, deployment=Deployment(name="pair", members=found), **fields)


def unit(settings, **how):
    """The unit as text, with this interpreter."""
    how.setdefault("config", Path(settings.root) / "tandem.toml")
    return watch_unit(settings, python=sys.executable, **how)


def lines(text, key):
    """The values that a unit gives a key."""
    return re.findall(rf"^{key}=(.*)$", text, re.MULTILINE)


def ran(*argv, **how):
    """Run a program to its end."""
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, **how)


class TestUnit:
    """`tandem export watch-unit`."""

    @pytest.mark.needs("systemd")
    @pytest.mark.parametrize(
        ("manager", "supervisor", "folder"),
        [
            ("system", "none", "pair"),
            ("system", "local", "pair"),
            ("system", "none", "with blank"),
            ("system", "none", '100% $HOME "q" \\x'),
            ("user", "none", '100% $HOME "q" \\x'),
        ],
    )
    def test_the_real_systemd_accepts_it(self, tmp_path, supervisor, folder, manager):
        """`systemd-analyze verify` says nothing, whatever the folder is called."""
        root = tmp_path / folder
        root.mkdir()
        place = tmp_path / "tandem-watch.service"
        text = unit(settings_of(str(root), supervisor=supervisor), manager=manager)
        place.write_text(text)
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
        who = ["--user"] if manager == "user" else []
        checked = ran("systemd-analyze", *who, "verify", str(place), env=environment)

        assert (checked.returncode, checked.stderr) == (0, "")

    def test_it_is_restarted_when_a_turn_hangs(self):
        """The watchdog is longer than several turns, and a wrong configuration is not retried."""
        slow = unit(settings_of(watch=WatchSettings(interval_s=20.0)))

        assert lines(unit(settings_of()), "Type") == ["notify"]
        assert lines(unit(settings_of()), "WatchdogSec") == ["30"]
        assert lines(slow, "WatchdogSec") == ["100"]
        assert lines(slow, "Restart") == ["on-failure"]
        assert lines(slow, "RestartPreventExitStatus") == ["2 3"]

    def test_what_members_would_inherit_is_left_alone(self):
        """Where a repair starts members from the watch they outlive it, unbounded and unhidden."""
        text = unit(settings_of(supervisor="local"))

        assert lines(text, "KillMode") == ["process"]
        assert lines(text, "OOMPolicy") == ["continue"]
        assert lines(text, "MemoryMax") + lines(text, "ProtectSystem") == []

    def test_alone_it_is_bounded_and_hardened(self):
        """It may write its state and its reports, read processes, and keeps ptrace and the GPUs."""
        text = unit(settings_of(members=100), user="sglang", writable=(Path("/srv/reports"),))

        assert lines(text, "MemoryMax") == ["912M"]
        assert lines(text, "ProtectSystem") == ["strict"]
        assert lines(text, "ReadWritePaths") == ["/srv/pair", "/srv/reports"]
        assert lines(text, "User") == ["sglang"]
        assert lines(text, "SystemCallFilter") == ["@system-service ptrace"]
        for hidden in ("PrivateDevices", "PrivateUsers", "ProtectProc", "ProtectClock"):
            assert lines(text, hidden) == []

    @pytest.mark.parametrize(("log", "own"), [(None, ["yes"]), (f"{TEMPORARY[0]}/d.log", [])])
    def test_a_log_that_all_see_is_not_hidden(self, log, own):
        """A /tmp of its own would hide the log that a member writes there."""
        settings = settings_of()
        members = tuple(
            msgspec.structs.replace(one, log=log) for one in settings.deployment.members
        )
        deployment = msgspec.structs.replace(settings.deployment, members=members)

        assert (
            lines(unit(msgspec.structs.replace(settings, deployment=deployment)), "PrivateTmp")
            == own
        )

    def test_the_manager_of_a_user_needs_no_root(self):
        """It has no user to become and no file system to hide."""
        text = unit(settings_of(), manager="user")

        assert lines(text, "User") + lines(text, "ProtectSystem") == []
        assert lines(text, "WantedBy") == ["default.target"]

    def test_the_word_names_this_tandem_and_this_configuration(self, tmp_path, capsys):
        """The printed unit starts the interpreter that printed it, with the file it was given."""
        example = tidy.ROOT / "examples" / "laptop" / "tandem.toml"
        place = tmp_path / "tandem.toml"
        place.write_text(example.read_text())

        assert main(["export", "watch-unit", "--config", str(place)]) == 0
        (command,) = lines(capsys.readouterr().out, "ExecStart")
        assert shlex.split(command) == [
            *(sys.executable, "-m", "tandem", "watch", "--config", str(place))
        ]

    def test_a_commit_may_be_made(self, tmp_path, capsys):
        """The git repository that the document is in may be written."""
        (tmp_path / ".git").mkdir()
        folder = tmp_path / "deploy" / "pair"
        folder.mkdir(parents=True)
        (folder / "tandem.toml").write_text(
            '[[member]]\nname = "p"\nrole = "prefill"\nurl = "http://127.0.0.1:1"\n'
            'bootstrap_port = 2\n[[member]]\nname = "d"\nrole = "decode"\n'
            'url = "http://127.0.0.1:3"\n'
        )

        assert main(["export", "watch-unit", "--config", str(folder / "tandem.toml")]) == 0
        assert lines(capsys.readouterr().out, "ReadWritePaths") == [str(tmp_path)]

    def test_another_manager_is_no_manager(self, capsys):
        """A word that is neither is wrong usage."""
        assert main(["export", "watch-unit", "--manager", "openrc"]) == 2
        assert "`system` or `user`" in capsys.readouterr().err


class TestRules:
    """`tandem export prometheus-rules`."""

    @pytest.mark.needs("promtool")
    def test_the_real_promtool_accepts_them(self, tmp_path):
        """`promtool check rules` finds every rule and no fault."""
        place = tmp_path / "tandem.yml"
        place.write_text(prometheus_rules())
        checked = ran("promtool", "check", "rules", "--lint=all", "--lint-fatal", str(place))
        count = prometheus_rules().count("- alert:")

        assert checked.returncode == 0, checked.stderr
        assert f"SUCCESS: {count} rules found" in checked.stdout

    def test_every_rule_says_what_it_cannot_see(self):
        """In its comment, and in an annotation that reaches whoever is paged."""
        rules = re.split(r"^ {6}- alert: ", prometheus_rules(), flags=re.MULTILINE)
        before = [re.findall(r"# Cannot see: ", text) for text in rules[:-1]]

        assert all(before)
        assert [text.split("\n")[0] for text in rules[1:] if "cannot_see: " not in text] == []

    def test_no_metric_is_invented(self):
        """Every metric of the rules and the dashboard is one that somebody shows."""
        ours = (tidy.ROOT / "src/tandem/service/counts.py").read_text()
        text = prometheus_rules() + grafana_dashboard()
        unknown = []
        for name in set(re.findall(r"\btandem_watch_\w+", text)):
            bare = re.sub(r"_total$|_info$", "", name).removeprefix("tandem_watch").lstrip("_")
            if bare and f"{{_WATCH}}_{bare}" not in ours:
                unknown.append(name)

        assert unknown == []


class Anything(msgspec.Struct, forbid_unknown_fields=True):
    """A part of Grafana's dashboard: only fields it publishes."""


class Source(Anything):
    type: str
    uid: str


class Target(Anything):
    refId: str  # noqa: N815 - Grafana's
    datasource: Source
    expr: str
    legendFormat: str = ""  # noqa: N815
    range: bool = True
    instant: bool = False


class Place(Anything):
    h: int
    w: int
    x: int
    y: int


class Panel(Anything):
    id: int
    type: str
    title: str
    gridPos: Place  # noqa: N815
    description: str = ""
    datasource: Source | None = None
    targets: list[Target] = []
    fieldConfig: dict[str, object] = {}  # noqa: N815
    options: dict[str, object] = {}
    collapsed: bool = False
    panels: list[object] = []


class Annotation(Anything):
    name: str
    datasource: Source
    enable: bool
    iconColor: str  # noqa: N815
    expr: str
    hide: bool = False
    step: str = ""
    titleFormat: str = ""  # noqa: N815
    textFormat: str = ""  # noqa: N815
    tagKeys: str = ""  # noqa: N815


class Variable(Anything):
    name: str
    type: str
    query: str
    label: str = ""
    hide: int = 0
    includeAll: bool = False  # noqa: N815
    multi: bool = False
    refresh: int = 1


class Annotations(Anything):
    list: list[Annotation]


class Variables(Anything):
    list: list[Variable]


class Dashboard(Anything):
    """The fields of a dashboard as Grafana's documentation of its JSON model gives them."""

    uid: str
    title: str
    schemaVersion: int  # noqa: N815
    version: int
    panels: list[Panel]
    time: dict[str, str]
    annotations: Annotations
    templating: Variables
    description: str = ""
    tags: list[str] = []
    timezone: str = ""
    editable: bool = True
    graphTooltip: int = 0  # noqa: N815
    refresh: str = ""
    timepicker: dict[str, object] = {}
    links: list[object] = []


class TestDashboard:
    """`tandem export grafana-dashboard`."""

    def dashboard(self):
        """The dashboard as Grafana would read it."""
        return msgspec.json.decode(grafana_dashboard(), type=Dashboard)

    def test_it_has_only_fields_that_grafana_knows(self):
        """It decodes strictly into the published fields, and each panel has an id of its own."""
        panels = self.dashboard().panels

        assert len({panel.id for panel in panels}) == len(panels)
        assert {panel.type for panel in panels} == {"row", "timeseries"}

    def test_no_panel_covers_another(self):
        """Every panel has cells of its own within the 24 columns."""
        cells = [
            (x, y)
            for panel in self.dashboard().panels
            for x in range(panel.gridPos.x, panel.gridPos.x + panel.gridPos.w)
            for y in range(panel.gridPos.y, panel.gridPos.y + panel.gridPos.h)
        ]

        assert len(set(cells)) == len(cells)
        assert max(x for x, _ in cells) == 23

    def test_it_shows_what_the_night_needed(self):
        """Inflight floor, requests minus responses, transfers, probes, findings as marks."""
        found = self.dashboard()
        titles = {panel.title for panel in found.panels}

        assert {"Inflight floor", "Requests minus responses", "Transfers", "Probes"} <= titles
        assert "tandem_watch_findings_open" in found.annotations.list[0].expr

    @pytest.mark.needs("promtool")
    def test_the_real_promtool_parses_every_query(self, tmp_path):
        """Each expression is one that Prometheus evaluates."""
        found = self.dashboard()
        queries = [target.expr for panel in found.panels for target in panel.targets]
        queries += [one.expr for one in found.annotations.list]
        rules = "groups:\n- name: x\n  rules:\n" + "".join(
            f"  - record: x:{number}\n    expr: {msgspec.json.encode(query).decode()}\n"
            for number, query in enumerate(queries)
        )
        (tmp_path / "queries.yml").write_text(rules)
        checked = ran("promtool", "check", "rules", str(tmp_path / "queries.yml"))

        assert checked.returncode == 0, checked.stderr + checked.stdout


class TestWords:
    """The word `export` itself."""

    def test_it_lists_what_there_is(self, capsys):
        """Alone it names every export."""
        assert main(["export"]) == 0
        shown = capsys.readouterr().out

        assert shown.count("tandem export ") == 3

    @pytest.mark.parametrize("name", ["prometheus-rules", "grafana-dashboard"])
    def test_the_text_is_a_record_as_well(self, name, capsys):
        """With --json a file's name and its text."""
        assert main(["export", name]) == 0
        text = capsys.readouterr().out
        assert main(["export", name, "--json"]) == 0
        record = msgspec.json.decode(capsys.readouterr().out)

        assert set(record) == {"name", "text"}
        assert record["text"] == text
