"""Everything `tandem.toml` says, checked and frozen (`config.py` makes it)."""

from tandem.records.deployment import Deployment
from tandem.records.finding import Thresholds
from tandem.records.plan import Policy
from tandem.records.record import Record
from tandem.records.verification import Profile

STATE_FOLDER = ".tandem"
"""What Tandem keeps of a deployment, beside its `tandem.toml`."""

ENGINE_VARIABLES = (
    "SGLANG_",
    "SGL_",
    "VLLM_",
    "NCCL_",
    "UCX_",
    "NIXL_",
    "MC_",
    "MOONCAKE_",
    "CUDA_",
    "NVIDIA_VISIBLE_DEVICES",
    "TANDEM_ENGINE_",
    "OMP_NUM_THREADS",
    "GLOO_",
)
"""Prefixes of the environment variables that steer an engine: evidence, and kept at a restart."""


class ProbeSettings(Record, frozen=True, kw_only=True):
    """Active path probes: whether, how often, how long to wait, how big."""

    active: bool = True
    interval_s: float = 5.0
    deadline_s: float = 5.0
    prompt_tokens: int = 24
    long_prompt_tokens: int = 256
    """Of the one long probe after a restart: four KV pages at least, half the context at most."""
    output_tokens: int = 2


class WatchSettings(Record, frozen=True, kw_only=True):
    """How often to look, and how long to remember."""

    interval_s: float = 1.0
    keep_hours: float = 48.0
    metrics_port: int = 0
    """Where the watch serves metrics of its own, on loopback; 0 serves none."""
    prometheus: str = ""
    """The root of a Prometheus server that scrapes the members, instead of scraping them."""
    prometheus_token_file: str = ""
    prometheus_token_variable: str = ""


class EvidenceSettings(Record, frozen=True, kw_only=True):
    """Bounds on evidence: seconds to collect, bytes to keep, incidents to keep."""

    seconds: float = 60.0
    megabytes: float = 200.0
    keep_incidents: int = 20
    window_s: float = 3600.0
    """How far back the sealed window of observations reaches; the ledger reaches further."""
    environment: tuple[str, ...] = ()
    """Further environment variables allowed into evidence, beside the built-in allowlist."""


class ReportSettings(Record, frozen=True, kw_only=True):
    """The living document and whether to commit it."""

    document: str = "INCIDENTS.md"
    commit: bool = True


class Settings(Record, frozen=True, kw_only=True):
    """The whole configuration of one deployment. `root` is the folder of `tandem.toml`."""

    root: str
    deployment: Deployment
    policy: Policy = Policy()
    detect: Thresholds = Thresholds()
    probe: ProbeSettings = ProbeSettings()
    watch: WatchSettings = WatchSettings()
    evidence: EvidenceSettings = EvidenceSettings()
    verify: Profile = Profile()
    report: ReportSettings = ReportSettings()
