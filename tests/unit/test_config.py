"""`tandem.toml`: what is accepted becomes records, and every fault is named at once."""

import contextlib
import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.config import load
from tandem.errors import ConfigError
from tandem.records import Policy, Profile, ReportSettings, Role, Thresholds

PAIR = """
[deployment]
name = "laptop"
[[member]]
name = "prefill-0"
role = "prefill"
url = "http://127.0.0.1:30000/"
bootstrap_port = 8998
supervisor = "local"
argv = ["{python}", "-m", "tandem_engine", "prefill", "--log", "{root}/x.log"]
env = { SGLANG_X = "{root}" }
cwd = "work"
[[member]]
name = "decode-0"
role = "decode"
url = "http://127.0.0.1:30001"
[[member]]
name = "router"
role = "router"
url = "http://127.0.0.1:30002"
metrics_url = "http://127.0.0.1:29000/metrics"
"""


@pytest.fixture
def write(tmp_path):
    def make(text):
        path = tmp_path / "tandem.toml"
        path.write_text(text)
        return path

    return make


def refusal(path):
    with pytest.raises(ConfigError) as caught:
        load(path)
    return str(caught.value)


def edited(before, after):
    assert before in PAIR
    return PAIR.replace(before, after)


class TestAccepted:
    def test_members_become_records(self, write):
        """Roles, urls, ports and default adapters arrive as the records of a deployment."""
        members = load(write(PAIR)).deployment.members

        assert [(each.name, each.role, each.engine) for each in members] == [
            ("prefill-0", Role.PREFILL, "sglang"),
            ("decode-0", Role.DECODE, "sglang"),
            ("router", Role.ROUTER, "smg"),
        ]
        assert members[0].url == "http://127.0.0.1:30000"
        assert members[1].launch is None

    def test_placeholders_and_folders_are_filled_in(self, write, tmp_path):
        """`{python}` and `{root}` are replaced, and cwd is taken from the file's folder."""
        launch = load(write(PAIR)).deployment.members[0].launch

        assert launch.argv[0] == sys.executable
        assert launch.argv[-1] == f"{tmp_path}/x.log"
        assert launch.env == {"SGLANG_X": str(tmp_path)}
        assert launch.cwd == str(tmp_path / "work")

    def test_what_is_not_said_has_the_default_of_its_record(self, write, tmp_path):
        """A file without sections gives the defaults, and a document beside the file."""
        settings = load(write(PAIR))

        assert settings.policy == Policy()
        assert settings.detect == Thresholds()
        assert settings.verify == Profile()
        assert settings.report == ReportSettings(document=str(tmp_path / "INCIDENTS.md"))
        assert settings.root == str(tmp_path)

    def test_sections_are_the_fields_of_their_records(self, write):
        """Every section's keys arrive where the record has them; whole numbers are numbers."""
        settings = load(
            write(
                PAIR + '[policy]\nmode = "auto"\nauto_scopes = ["pair"]\ndrain_s = 2\n'
                '[evidence]\nenvironment = ["MY_FLAG"]\n[detect]\nflat_s = 3.5\n'
            )
        )

        assert settings.policy == Policy(mode="auto", auto_scopes=("pair",), drain_s=2.0)
        assert settings.evidence.environment == ("MY_FLAG",)
        assert settings.detect.flat_s == 3.5

    def test_who_runs_a_member_and_where_it_logs_arrive(self, write, tmp_path):
        """A unit has its type, and a log is taken from the file's folder."""
        text = PAIR.replace(
            'url = "http://127.0.0.1:30001"',
            'url = "http://127.0.0.1:30001"\nunit = "sglang-decode@0"\nlog = "logs/d.log"',
        ).replace(
            'url = "http://127.0.0.1:30002"',
            'url = "http://127.0.0.1:30002"\ncontainer = "smg"\nlog = "/var/log/smg.log"',
        )
        _, decode, router = load(write(text)).deployment.members

        assert (decode.unit, decode.log) == ("sglang-decode@0.service", f"{tmp_path}/logs/d.log")
        assert (router.container, router.log) == ("smg", "/var/log/smg.log")

    def test_a_deployment_may_have_no_router(self, write):
        """A bare pair is a deployment."""
        settings = load(write(PAIR[: PAIR.rindex("[[member]]")]))

        assert settings.deployment.of(Role.ROUTER) == ()

    def test_metrics_may_come_from_prometheus(self, write, tmp_path):
        """The server, its token beside the file, and whose series are whose."""
        text = edited(
            'url = "http://127.0.0.1:30001"',
            'url = "http://127.0.0.1:30001"\nmetrics_labels = { pod = "d-0" }',
        )
        watch = '[watch]\nprometheus = "https://h/prom"\nprometheus_token_file = "token"\n'
        settings = load(write(watch + text))

        assert settings.watch.prometheus == "https://h/prom"
        assert settings.watch.prometheus_token_file == str(tmp_path / "token")
        assert settings.deployment.members[1].metrics_labels == {"pod": "d-0"}

    def test_two_members_cannot_have_the_same_series(self, write):
        """Labels that fit two members are refused: their counts would be one member's."""
        same = 'metrics_labels = { job = "sglang" }\n'
        text = PAIR.replace('role = "decode"\n', f'role = "decode"\n{same}')
        text = text.replace('role = "prefill"\n', f'role = "prefill"\n{same}')

        assert "decode-0.metrics_labels: these are already those of prefill-0" in refusal(
            write(text)
        )

    def test_what_we_do_not_start_may_be_elsewhere(self, write):
        """A member without a supervisor may have any address."""
        settings = load(write(edited("http://127.0.0.1:30001", "http://10.1.2.3:30001")))

        assert settings.deployment.members[1].url == "http://10.1.2.3:30001"


TOKEN_VARIABLE = "prometheus_token_variable = 'X'"
REFUSED = [
    ("[policy]\nmode = 'auto2'", "policy.mode = 'auto2': is not one of its values; write 'obs"),
    ("[policy]\ndrain_s = '3'", "policy.drain_s = '3': must be a number; write it without quotes"),
    ("[policy]\ndrain_s = -1", "policy.drain_s = -1: is out of range; use a number at least 0"),
    ("[policy]\ndrain_s = nan", "policy.drain_s = nan: must be a finite number"),
    ("[policy]\nrepairs_per_hour = true", "policy.repairs_per_hour = True: must be a whole"),
    ("[policy]\nrepair_per_hour = 1", "no such key; did you mean `repairs_per_hour`?"),
    ("[policy]\nauto_scopes = 'pair'", "policy.auto_scopes = 'pair': must be a list"),
    ("[policy]\nauto_scopes = ['all']", "policy.auto_scopes = 'all': this is never done without"),
    ("[policy]\nauto_scopes = ['role']", "policy.auto_scopes = 'role': this is never done"),
    ("[policy]\nauto_scopes = ['pear']", "is no scope of a repair; did you mean `pair`?"),
    ("[watch]\nprometheus = 'here'", "watch.prometheus = 'here': must be http(s)://HOST:PORT"),
    ("[watch]\nprometheus = 'http://u:p@h:1'", "watch.prometheus: must hold no credentials"),
    ("[watch]\nprometheus_token_file = 'x'", "there is no Prometheus to show it to; remove it"),
    (
        "[watch]\nprometheus = 'http://h'\nprometheus_token_file = 'x'\n" + TOKEN_VARIABLE,
        "watch.prometheus_token_variable: prometheus_token_file is given too",
    ),
    ("[watch]\nmetrics_port = 65536", "is out of range; use a number at most 65535"),
    ("[watch]\ninterval_s = 0", "watch.interval_s = 0: is out of range; use a number above 0"),
    ("[verify]\nturns = 0", "verify.turns = 0: is out of range"),
    ("[verify]\nsessions = 99999999999999999999", "is out of range; use a number at most 100000"),
    ("[watch]\nkeep_hours = 1e300", "is out of range; use a number at most 10000000"),
    ("[probe]\nactive = 1", "probe.active = 1: must be true or false"),
    ("[probes]\nactive = true", "[probes]: there is no such section; did you mean `probe`?"),
    ("policy = 3", "policy = 3: must be a table"),
]

IMPOSSIBLE = [
    (
        'url = "http://127.0.0.1:30001"',
        'url = "http://127.0.0.1:30001"\nmetrics_labels = { "a-b" = "c" }',
        "member.decode-0.metrics_labels = 'a-b': is no label of Prometheus",
    ),
    (
        'url = "http://127.0.0.1:30001"',
        'url = "http://127.0.0.1:30001"\nunit = "a b"',
        "member.decode-0.unit = 'a b': is no usable name",
    ),
    (
        'url = "http://127.0.0.1:30001"',
        'url = "http://127.0.0.1:30001"\nunit = "d"\ncontainer = "d"',
        "member.decode-0.container = 'd': a member is a unit or a container; remove one",
    ),
    (
        'supervisor = "local"',
        'supervisor = "local"\ncontainer = "p"',
        "member.prefill-0.container = 'p': Tandem itself starts this; remove it, or remove sup",
    ),
    ('"decode"', '"prefil"', "member.decode-0.role = 'prefil': is not one of its values"),
    ('name = "decode-0"\n', "", "member.1.name: is missing; add it"),
    ('"decode-0"', '"prefill-0"', "member.prefill-0.name = 'prefill-0': two members have this"),
    ('"decode-0"', '"a>b"', "member.a>b.name = 'a>b': is no usable name"),
    ("bootstrap_port = 8998\n", "", "member.prefill-0.bootstrap_port: a prefill has a bootstrap"),
    (
        'url = "http://127.0.0.1:30001"',
        'url = "http://127.0.0.1:30001"\nbootstrap_port = 9',
        "member.decode-0.bootstrap_port = 9: a decode has no bootstrap server; remove the key",
    ),
    (":30001", ":30000", "decode-0.url = 30000: this port is already that of member.prefill-0.url"),
    (":30001", ":8998", "this port is already that of member.prefill-0.bootstrap_port"),
    ("127.0.0.1:30001", "localhost:30002", "this port is already that of member.decode-0.url"),
    (":29000", ":30001", "this port is already that of member.decode-0.url"),
    ("http://127.0.0.1:30000/", "http://0.0.0.0:30000", "listens on loopback only; use 127.0.0.1"),
    ("http://127.0.0.1:30001", "127.0.0.1:30001", "must be http(s)://HOST:PORT"),
    (":30001", ":99999", "must be http(s)://HOST:PORT"),
    ("//127.0.0.1:30001", "//me:secret@127.0.0.1:30001", "must hold no credentials"),
    ("http://127.0.0.1:30001", "http://127.0.0.1:30001/v1", "must be the root of the server"),
    ('supervisor = "local"', 'supervisor = "locl"', "is not known; did you mean `local`?"),
    ('supervisor = "local"\n', "", "nobody starts this member; add supervisor"),
    ('argv = ["{python}"', '# ["{python}"', "member.prefill-0.argv: the local supervisor needs it"),
    ('"-m"', "30", "member.prefill-0.argv.1 = 30: must be text; put it in quotes"),
    ('"{root}" }', "3 }", "member.prefill-0.env.SGLANG_X = 3: must be text"),
    ('cwd = "work"', 'engine = "vllm"', "member.prefill-0.engine = 'vllm': no adapter speaks to"),
]


class TestRefused:
    @pytest.mark.parametrize(("text", "said"), REFUSED)
    def test_a_faulty_section_is_named(self, write, text, said):
        """The key, the value and the fix are all in the one line."""
        path = write(f"{text}\n{PAIR}" if text.startswith("policy =") else f"{PAIR}\n{text}")

        assert said in refusal(path)

    @pytest.mark.parametrize(("before", "after", "said"), IMPOSSIBLE)
    def test_an_impossible_member_is_named(self, write, before, after, said):
        """What no deployment can be is refused with the member and the key."""
        assert said in refusal(write(edited(before, after)))

    @pytest.mark.parametrize("role", ["prefill", "decode"])
    def test_half_a_pair_is_refused(self, write, role):
        """A deployment without a prefill, or without a decode, says which is missing."""
        tables = PAIR.split("[[member]]")
        kept = [table for table in tables if f'role = "{role}"' not in table]

        assert f"the deployment has no {role}; add a [[member]]" in refusal(
            write("[[member]]".join(kept))
        )

    def test_every_fault_is_found_at_once(self, write):
        """Three faults give three lines, one each, and their number."""
        path = write(edited("bootstrap_port = 8998\n", "") + "[watch]\nkeep = 1\n[nothing]\n")

        lines = refusal(path).splitlines()

        assert lines[0] == f"{path}: 3 faults:"
        assert len(lines) == 4

    def test_a_secret_in_a_wrong_place_is_not_repeated(self, write):
        """A key that sounds secret is named without its value."""
        said = refusal(write(edited('cwd = "work"', 'api_key = "sk-very-secret"')))

        assert "member.prefill-0.api_key" in said
        assert "sk-very-secret" not in said

    def test_a_syntax_error_names_its_line(self, write):
        """What is no TOML is refused with the line."""
        assert "line 2" in refusal(write("[policy]\nmode = \n"))

    def test_a_file_that_is_not_there_is_named(self, tmp_path):
        """A missing file is the fault of the command, and says where it looked."""
        assert f"There is no {tmp_path}/tandem.toml" in refusal(tmp_path / "tandem.toml")

    def test_what_is_no_configuration_is_not_read_to_its_end(self, tmp_path):
        """A device, a pipe and a file of the wrong size are refused, not waited for."""
        pipe, huge = tmp_path / "pipe", tmp_path / "huge.toml"
        os.mkfifo(pipe)
        huge.write_bytes(b"#" * 1_000_001)

        assert "no ordinary file" in refusal(pipe)
        assert "no ordinary file" in refusal(Path("/dev/zero"))
        assert "more than 1000000 bytes" in refusal(huge)

    @pytest.mark.parametrize("content", [b"\xff\xfe", b"\x00" * 9, b'name = "\xc3"'])
    def test_bytes_that_are_no_text_are_refused(self, tmp_path, content):
        """A binary file named by mistake is not TOML, and that is what is said."""
        path = tmp_path / "tandem.toml"
        path.write_bytes(content)

        assert "is not TOML" in refusal(path)

    @pytest.mark.parametrize(
        "content", [f"x = {'[' * 2000}{']' * 2000}", f"[verify]\nsessions = {'9' * 5000}"]
    )
    def test_what_python_cannot_parse_is_refused(self, write, content):
        """Thousands of brackets or digits are refused with a sentence."""
        assert refusal(write(f"{PAIR}\n{content}\n"))

    def test_a_file_of_a_windows_editor_is_read(self, tmp_path):
        """A byte order mark before the first line is no part of it."""
        path = tmp_path / "tandem.toml"
        path.write_bytes(b"\xef\xbb\xbf" + PAIR.encode())

        assert load(path).deployment.of(Role.DECODE)

    def test_a_proof_of_nothing_is_refused(self, write):
        """A `[verify]` that asks for no request could never fail."""
        assert "proves nothing" in refusal(write(f"{PAIR}\n[verify]\nsequential = 0\nsessions = 0"))

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            (r'argv = ["a\u0000b"]', "member.prefill-0.argv"),
            (r'cwd = "a\u0000b"', "member.prefill-0.cwd"),
            (r'env = { A = "a\u0000b" }', "member.prefill-0.env.A"),
            ('env = { "A=B" = "x" }', "is no name of a variable"),
            ('env = { "" = "x" }', "is no name of a variable"),
        ],
    )
    def test_what_no_process_can_be_given_is_refused(self, write, line, said):
        """Zero characters and impossible variable names are found before a start breaks on them."""
        key = line.partition(" ")[0]
        lines = [one for one in PAIR.splitlines() if not one.startswith(f"{key} =")]
        place = lines.index('name = "prefill-0"')

        assert said in refusal(write("\n".join([*lines[:place], line, *lines[place:]])))

    @given(
        key=st.sampled_from(["url", "metrics_url", "engine", "cwd", "supervisor", "name"]),
        value=st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
        | st.from_regex(r"https?://[\[\]:.0-9a-z@%/]{0,20}"),
    )
    def test_no_text_of_a_member_is_a_crash(self, tmp_path_factory, key, value):
        """Whatever a member says in a text, it is accepted or refused with a sentence."""
        path = tmp_path_factory.mktemp("toml") / "tandem.toml"
        head, *members = PAIR.split("[[member]]\n")
        kept = [one for one in members[0].splitlines() if not one.startswith(f"{key} =")]
        # What JSON escapes TOML does too, but for characters outside the basic plane.
        line = f"{key} = {json.dumps(value, ensure_ascii=False)}"
        members[0] = "\n".join([line, *kept, ""])
        path.write_text("[[member]]\n".join([head, *members]), encoding="utf-8")

        with contextlib.suppress(ConfigError):
            load(path)

    @given(
        section=st.sampled_from(["policy", "detect", "probe", "watch", "evidence", "verify"]),
        key=st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=20),
        value=st.sampled_from(["1", "-1", '"x"', "true", "[]", "nan", "{}", "1979-05-27"]),
    )
    def test_no_content_of_a_section_is_a_crash(self, tmp_path_factory, section, key, value):
        """Whatever a section holds, it is either accepted or refused with a sentence."""
        path = tmp_path_factory.mktemp("toml") / "tandem.toml"
        path.write_text(f"{PAIR}\n[{section}]\n{key} = {value}\n")
        said = f"{section}.{key}"

        with contextlib.suppress(ConfigError):
            load(path)
            said = ""

        assert said in (refusal(path) if said else "")
