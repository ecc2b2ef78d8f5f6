"""The frozen records in which the stages meet: one file per stage's nouns.

For: data only. Not for: behaviour, I/O or defaults that depend on the world.
"""

from tandem.records.aftermath import Aftermath, Milestone, Tally
from tandem.records.change import Change
from tandem.records.deployment import (
    Deployment,
    Incarnation,
    Launch,
    Member,
    Path,
    Role,
    life_name,
)
from tandem.records.diagnosis import (
    ChangeVerdict,
    Diagnosis,
    HunchAnswer,
    ModeVerdict,
    RuledOut,
    TestResult,
)
from tandem.records.event import Event
from tandem.records.finding import Finding, Thresholds, Witness
from tandem.records.incident import Incident, Rendered, ReportRef, Seal
from tandem.records.observation import Observation, Trait, Value
from tandem.records.outcome import Intent, Outcome
from tandem.records.plan import Plan, Policy, RefusedRung, Step
from tandem.records.record import Record
from tandem.records.settings import (
    ENGINE_VARIABLES,
    STATE_FOLDER,
    EvidenceSettings,
    ProbeSettings,
    ReportSettings,
    Settings,
    WatchSettings,
)
from tandem.records.status import MemberStatus, Status
from tandem.records.verification import (
    LostRequest,
    Profile,
    RequestRecord,
    Verification,
)

__all__ = [
    "ENGINE_VARIABLES",
    "STATE_FOLDER",
    "Aftermath",
    "Change",
    "ChangeVerdict",
    "Deployment",
    "Diagnosis",
    "Event",
    "EvidenceSettings",
    "Finding",
    "HunchAnswer",
    "Incarnation",
    "Incident",
    "Intent",
    "Launch",
    "LostRequest",
    "Member",
    "MemberStatus",
    "Milestone",
    "ModeVerdict",
    "Observation",
    "Outcome",
    "Path",
    "Plan",
    "Policy",
    "ProbeSettings",
    "Profile",
    "Record",
    "RefusedRung",
    "Rendered",
    "ReportRef",
    "ReportSettings",
    "RequestRecord",
    "Role",
    "RuledOut",
    "Seal",
    "Settings",
    "Status",
    "Step",
    "Tally",
    "TestResult",
    "Thresholds",
    "Trait",
    "Value",
    "Verification",
    "WatchSettings",
    "Witness",
    "life_name",
]
