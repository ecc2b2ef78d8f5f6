"""Redaction: no credential of any shape, and no prompt, is ever remembered."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.ports import Harvest
from tandem.records import (
    Change,
    Deployment,
    Finding,
    Incident,
    Launch,
    Member,
    Observation,
    Outcome,
    Role,
    Settings,
    Trait,
    Witness,
)
from tandem.records import vocabulary as v
from tandem.store import Store, redact

KEY = "sk-proj-9aF2kLm4Qx7Tz1Wb8Rd3Vn6Yc5Hj0Pg"
HF = "hf_QwErTyUiOpAsDfGhJkLzXcVbNm12345678"
JWT = (
    "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0"
    ".dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
)
AWS_ID = "AKIAIOSFODNN7EXAMPLE"
AWS_SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
GITHUB = "ghp_16C7e42F292c6912E7710c838347Ae178B4a"
PASSWORD = "hunter2-correct-horse"
OPAQUE = "Zm9vYmFyYmF6cXV4MTIzNDU2Nzg5MGFiY2RlZg"
PEM = "MIIEowIBAAKCAQEAx8Qm"
PROMPT = "my ex-wife Jane Doe of 12 Elm Street has diabetes"

SECRETS = (KEY, HF, JWT, AWS_ID, AWS_SECRET, GITHUB, PASSWORD, OPAQUE, PEM, PROMPT)

TEXTS = (
    f"401 from https://api.example.com/v1?key={PASSWORD}&x=1",
    f"could not connect to postgres://admin:{PASSWORD}@db.example.com:5432/prod",
    f"could not connect to redis://:{PASSWORD}@cache:6379",
    f"Authorization: Bearer {OPAQUE}",
    f"authorization: Basic {OPAQUE}=",
    f'{{"authorization": "Bearer {JWT}", "x-api-key": "{PASSWORD}"}}',
    f"using key {KEY} for the judge",
    f"login with {HF} failed",
    f"token={JWT}",
    f"session {JWT} expired",
    f"AWS_ACCESS_KEY_ID={AWS_ID} AWS_SECRET_ACCESS_KEY={AWS_SECRET}",
    f"credentials {AWS_ID} {AWS_SECRET}",
    f"remote: invalid credentials for https://{GITHUB}@github.com/x/y.git",
    f"git push {GITHUB}",
    f"started with --api-key {PASSWORD} --port 30000",
    f"started with --api-key={PASSWORD} --port 30000",
    f"started with --admin-token {OPAQUE}",
    f"password: {PASSWORD}",
    f"secret='{PASSWORD}'",
    f'"hf_token": "{PASSWORD}"',
    f"a blob {OPAQUE} appeared",
    f"-----BEGIN RSA PRIVATE KEY-----\n{PEM}\n-----END RSA PRIVATE KEY-----",
    f"-----BEGIN OPENSSH PRIVATE KEY-----\n{PEM}",
    f"Receive: obj=GenerateReqInput(rid='a1', text='{PROMPT}', input_ids=None)",
    f'Receive: obj=GenerateReqInput(rid="a1", text="{PROMPT}", input_ids=None)',
    f'POST /v1/chat/completions {{"messages": [{{"role": "user", "content": "{PROMPT}"}}]}}',
    f"prompt: {PROMPT}",
    f"text={PROMPT!r}",
    f"Input: '{PROMPT}\nand {PROMPT}'",
)

COMMAND_LINES = (
    ("python", "-m", "sglang.launch_server", "--api-key", PASSWORD, "--port", "30000"),
    ("python", "-m", "sglang.launch_server", f"--api-key={PASSWORD}"),
    ("python", "-m", "sglang.launch_server", "--admin-api-key", OPAQUE),
    ("python", "-m", "sglang.launch_server", "--some-new-flag", PASSWORD),
    ("python", "-c", f"login('{PASSWORD}')"),
    ("env", f"HF_TOKEN={HF}", f"PLAIN={PASSWORD}", "python", "serve.py"),
    ("serve", PASSWORD),
    ("serve", "--model-path", f"https://me:{PASSWORD}@host/model?sig={OPAQUE}"),
    (f"sglang::server --api-key {PASSWORD} --port 1",),
    ("smg", "launch", "--worker-urls", f"http://u:{PASSWORD}@h:1", "http://h:2"),
)


def survivors(data):
    text = data.decode("utf-8", "replace") if isinstance(data, bytes) else data
    return [secret for secret in SECRETS if secret in text]


class TestText:
    @pytest.mark.parametrize("said", TEXTS)
    def test_no_secret_survives(self, said):
        """Every shape of credential and every quoted prompt is taken out of free text."""
        assert survivors(redact.text(said)) == []

    @pytest.mark.parametrize("said", TEXTS)
    def test_scrubbing_again_changes_nothing(self, said):
        """What was scrubbed once is stable."""
        assert redact.text(redact.text(said)) == redact.text(said)

    @pytest.mark.parametrize(
        "said",
        [
            "Prefill batch. #new-seq: 1, #new-token: 32, #cached-token: 0, token usage: 0.03",
            "Decode batch. #running-req: 2, #token: 96, gen throughput (token/s): 52.1",
            "Could not fetch prefill parallel info from 127.0.0.1:8998 after 15 attempts",
            "Lost connection with prefill instance (bootstrap_addr: 127.0.0.1:8998)",
            "connect to http://127.0.0.1:30000/health timed out after 2.0 s",
            "event_loop_overlap_disagg_decode (sglang/srt/disaggregation/decode.py:1042)",
            "KVTransferError(bootstrap_room=8124051238957123): Failed to send kv chunk",
            "sha256 deca49e29df2239629e69d4dad2b2d6206fa71d00322238460beec8b41583f2a",
            "commit 1a2b3c4d5e6f708192a3b4c5d6e7f8091a2b3c4d on main",
            "[Errno 111] Connect call failed ('127.0.0.1', 30000)",
            "prefill-0>decode-0: 17 requests computed, hand-off not acknowledged for 94 s",
            "/usr/lib/python3/dist-packages/Foo1/Bar2/x.py",
        ],
    )
    def test_what_diagnosis_needs_stays(self, said):
        """Log lines, errors and stack frames without secrets are kept to the letter."""
        assert redact.text(said) == said

    def test_a_url_keeps_where(self):
        """Host, port and path stay; who asks and what is asked go."""
        assert redact.text("GET http://u:p@10.0.0.1:30000/generate?x=1#y failed") == (
            "GET http://10.0.0.1:30000/generate failed"
        )

    def test_a_long_text_is_cut(self):
        """A text beyond the bound says how much is missing."""
        assert redact.text("a " * 40_000).endswith("... (14464 characters more)")

    @pytest.mark.parametrize(
        "piece", ["a", "a.", "a-token", "'", "' ", "text=", "eyJ.", "://@", "A1a"]
    )
    def test_a_hostile_text_ends(self, piece):
        """No pattern goes quadratic on a long repetition (the test's timeout is the bound)."""
        assert len(redact.text(piece * (redact.TEXT_MAX // len(piece)))) <= redact.TEXT_MAX

    @given(st.text(max_size=400))
    def test_no_text_is_a_crash(self, said):
        """Any text is scrubbed, and scrubbing is stable in what it shows of secrets."""
        assert survivors(redact.text(f"{said} --api-key {PASSWORD}x {KEY}")) == []


class TestCommandLine:
    @pytest.mark.parametrize("words", COMMAND_LINES)
    def test_no_secret_survives(self, words):
        """Flags with a space or an equals sign, code, positional words and assignments."""
        assert survivors(" ".join(redact.command_line(words))) == []

    def test_harmless_flags_stay(self):
        """What diagnosis reads of an engine and a router is kept word for word."""
        words = (
            *("/opt/venv/bin/python3", "-m", "sglang.launch_server"),
            *("--model-path", "/models/DeepSeek-V4-Flash", "--port", "30001", "--tp-size=8"),
            *("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "nixl"),
            *("--disable-overlap-schedule", "--cuda-graph-max-bs", "96", "--max-total-tokens"),
            *("65536", "--new-flag", "true", "--cuda-graph-bs", "1", "2", "4"),
        )

        assert redact.command_line(words) == words

    def test_a_router_stays(self):
        """The router's workers, ports and policies are kept."""
        words = (
            *("/venv/bin/smg", "launch", "--host", "127.0.0.1", "--pd-disaggregation"),
            *("--prefill", "http://127.0.0.1:30000", "8998", "--decode", "http://127.0.0.1:30001"),
            *("--policy", "random", "--shutdown-grace-period-secs", "1"),
        )

        assert redact.command_line(words) == words

    def test_an_unknown_value_is_hidden_and_its_flag_is_not(self):
        """That a flag is there can be seen; what a flag we do not know says cannot."""
        assert redact.command_line(("x", "--new-thing", "words", "--other=words")) == (
            *("x", "--new-thing", "<redacted>"),
            "--other=<redacted>",
        )


class TestVariables:
    @pytest.mark.parametrize("name", ["HOME", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PATH"])
    def test_what_is_not_an_engine_variable_is_not_kept(self, name):
        """Outside the allowlist not even the name is remembered."""
        assert redact.variable(name, "x") is None

    @pytest.mark.parametrize("name", ["SGLANG_API_KEY", "VLLM_HF_TOKEN", "MC_PASSWORD"])
    def test_an_engine_variable_that_sounds_secret_has_no_value(self, name):
        """Inside the allowlist a name like a credential keeps its name alone."""
        assert redact.variable(name, PASSWORD) == "<redacted>"

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("SGLANG_SM120_MMA_TARGET_CTAS", "512"),
            ("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "4096"),
            ("NCCL_SOCKET_IFNAME", "eth0"),
            ("CUDA_VISIBLE_DEVICES", "0,1"),
        ],
    )
    def test_an_engine_variable_stays(self, name, value):
        """What steers an engine is evidence."""
        assert redact.variable(name, value) == value

    def test_a_deployment_may_allow_more(self):
        """`[evidence] environment` adds names."""
        assert redact.variable("MY_SWITCH", "on", ("MY_SWITCH",)) == "on"

    def test_that_nothing_may_be_shown_is_kept(self):
        """A row without a label says that somebody looked, or why not; it names no variable."""
        looked = Observation(source="process", subject="d", name=v.ENVIRONMENT, at=1.0)
        failed = msgspec.structs.replace(looked, missing="access denied")

        assert redact.observation(looked) == looked
        assert redact.observation(failed) == failed


class TestChanges:
    @pytest.mark.parametrize(
        ("kind", "what", "before", "after", "kept"),
        [
            ("flag", "--disable-overlap-schedule", None, "", (None, "")),
            ("flag", "--cuda-graph-max-bs", "64", "96", ("64", "96")),
            ("flag", "argv", "python -m x", f"python -m y {PASSWORD}",
             ("python -m x", "python -m y <redacted>")),
            ("flag", "--api-key", None, PASSWORD, (None, "<redacted>")),
            ("env", "SGLANG_X", "0", "1", ("0", "1")),
            ("env", "HF_TOKEN", None, HF, (None, "<redacted>")),
            ("restart", "", "12:34", "13:35", ("12:34", "13:35")),
        ],
    )  # fmt: skip
    def test_that_something_changed_stays(self, kind, what, before, after, kept):
        """The row and its name stay; its values follow the rule of their kind."""
        row = Change(at=1.0, subject="d", kind=kind, what=what, before=before, after=after)

        shown = redact.change(row)

        assert (shown.what, (shown.before, shown.after)) == (what, kept)


class TestServerArguments:
    @pytest.mark.parametrize(
        ("name", "value", "kept"),
        [
            ("model_path", "/models/x", "/models/x"),
            ("disaggregation_transfer_backend", "nixl", "nixl"),
            ("max_running_requests", 96, 96),
            ("some_new_switch", "True", "True"),
            ("some_new_name", "words", "<redacted>"),
            ("api_key", PASSWORD, "<redacted>"),
            ("admin_pin_secret", 1234, "<redacted>"),
            ("skip_tokenizer_init", False, False),
        ],
    )
    def test_by_the_names_we_know(self, name, value, kept):
        """Known names, numbers and switches stay; the rest is hidden."""
        seen = Observation(
            source="server_info", subject="decode-0", name=v.SERVER_ARG, label=name, at=1.0,
            value=value,
        )  # fmt: skip

        assert redact.observation(seen).value == kept


def deployment():
    return Deployment(
        name="corpus",
        members=tuple(
            Member(
                name=f"decode-{number}",
                role=Role.DECODE,
                url="http://127.0.0.1:1",
                engine="sglang",
                supervisor="local",
                launch=Launch(argv=words, env={"HF_TOKEN": HF, "SGLANG_API_KEY": PASSWORD}),
            )
            for number, words in enumerate(COMMAND_LINES)
        ),
    )


def harvest():
    def seen(name, value, label="", missing=None):
        return Observation(
            source="log", subject="decode-0", name=name, label=label, at=100.0, value=value,
            missing=missing,
        )  # fmt: skip

    return Harvest(
        observations=(
            *(seen(v.LOG_LAST, said, f"line-{at}") for at, said in enumerate(TEXTS)),
            *(seen(v.STACK, said, f"thread-{at}") for at, said in enumerate(TEXTS)),
            *(seen(v.HEALTH_STATUS, None, missing=said) for said in TEXTS),
            *(seen("plug-in", (said, said)) for said in TEXTS),
            *(seen(v.COMMAND_LINE, words) for words in COMMAND_LINES),
            *(seen(v.ENVIRONMENT, HF, name) for name in ("HF_TOKEN", "SGLANG_TOKEN", "X")),
            seen(v.ENVIRONMENT, f"http://u:{PASSWORD}@proxy", "SGLANG_PROXY"),
            *(seen(v.SERVER_ARG, PASSWORD, name) for name in ("api_key", "new", "json_model")),
            seen(v.WORKER_HEALTHY, True, f"http://u:{PASSWORD}@h:1"),
        ),
        traits=tuple(
            Trait(subject="*", name="t", label=str(at), at=1.0, value=said, because=said)
            for at, said in enumerate(TEXTS)
        ),
        changes=(
            Change(at=1.0, subject="d", kind="env", what="HF_TOKEN", before=HF, after=PASSWORD),
            Change(at=1.0, subject="d", kind="flag", what="--api-key", after=PASSWORD),
            *(Change(at=1.0, subject="d", kind="config", after=s, how_known=s) for s in TEXTS),
        ),
    )


class TestStoreKeepsNoSecret:
    def test_none_survives_on_the_disk(self, tmp_path):
        """After append, events, findings, journal, save and seal no byte of a secret is there."""
        settings = Settings(root=str(tmp_path), deployment=deployment())
        with Store.open(tmp_path, settings) as store:
            store.append(harvest())
            for said in TEXTS:
                store.event("step", said, at=1.0, data={"said": said})
            seen_by = tuple(Witness(side="client", statement=said, evidence=()) for said in TEXTS)
            finding = Finding(
                id="f@1", kind="silent-stall", subject="d", onset_at=1.0, found_at=2.0,
                summary=TEXTS[0], witnesses=seen_by,
            )  # fmt: skip
            store.keep([finding])
            incident = msgspec.structs.replace(
                make_incident(store), finding=finding, hunch=f"it is the key {KEY}"
            )
            store.save(incident)
            for said in TEXTS:
                store.journal_for(incident.id).append(
                    Outcome(step="s", status="done", started_at=1.0, ended_at=2.0, detail=said)
                )
            store.seal(incident, now=200.0, deadline_s=30.0)

        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert {path.name for path in files} >= {"state.sqlite", "records.jsonl", "evidence.sqlite"}
        assert {path.name: survivors(path.read_bytes()) for path in files} == {
            path.name: [] for path in files
        }

    def test_what_append_returns_is_what_it_kept(self, tmp_path):
        """The caller gets the redacted records back, and none that may not be kept."""
        settings = Settings(root=str(tmp_path), deployment=deployment())
        with Store.open(tmp_path, settings) as store:
            kept = store.append(harvest())

        assert survivors(repr(kept)) == []
        assert [seen.label for seen in kept.observations if seen.name == v.ENVIRONMENT] == [
            "SGLANG_TOKEN",
            "SGLANG_PROXY",
        ]


def make_incident(store):
    return Incident(
        id=store.new_incident_id(100.0, "silent stall"),
        opened_at=100.0,
        deployment=store.settings.deployment,
    )
