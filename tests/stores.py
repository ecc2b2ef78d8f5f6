"""A deployment, its records and a store filled with numbers, for the tests of the store."""

import resource

from tandem.ports import Harvest
from tandem.records import (
    Change,
    Deployment,
    Diagnosis,
    Finding,
    Incident,
    Launch,
    Member,
    Observation,
    Outcome,
    Plan,
    Role,
    Trait,
    Verification,
)
from tandem.records import vocabulary as v

T = 1_764_500_000.0

DEPLOYMENT = Deployment(
    name="test",
    members=(
        Member(
            name="prefill-0", role=Role.PREFILL, url="http://127.0.0.1:1", engine="sglang",
            bootstrap_port=2, supervisor="local",
            launch=Launch(argv=("python", "-m", "tandem_engine", "prefill"), cwd="/srv"),
        ),
    ),
)  # fmt: skip

FINDING = Finding(
    id="silent-stall@p>d@1", kind="silent-stall", subject="p>d", onset_at=T, found_at=T + 5,
    summary="silent", witnesses=(),
)  # fmt: skip
DIAGNOSIS = Diagnosis(
    knowledge_version="1", verdict="undetermined", cause=None, incident_class=None, mechanism=None,
    confidence_note="", modes=(), ruled_out=(), changes=(), hunch=None, next_observation="stacks",
)  # fmt: skip
PLAN = Plan(scope="nothing", steps=(), refused=(), kept=(), costs=(), because="undetermined")
OUTCOME = Outcome(step="stop:decode-0", status="done", started_at=T, ended_at=T + 1, detail="gone")
VERIFICATION = Verification(
    passed=True, sequential_passed=8, sequential_total=8, sequential_latency_s=0.1,
    sessions_passed=30, sessions_total=30, corrupted=0, rescored_tokens=36, rescored_gap_max=0.1,
    transfer_failed_delta=0, inflight_after=0, requests=(), lost=(), not_proven=(), started_at=T,
    ended_at=T + 20,
)  # fmt: skip


def incident_of(store, at=T, slug="silent stall", **fields):
    return Incident(
        id=store.new_incident_id(at, slug), opened_at=at, deployment=DEPLOYMENT, **fields
    )


def fill(store, seconds=100, size=1, since=T):
    """Numbers once a second, and one of everything else."""
    store.append(
        Harvest(
            observations=(
                Observation(
                    source="process", subject="prefill-0", name=v.COMMAND_LINE, at=since - 5000,
                    value=("python", "-m", "tandem_engine"), incarnation="1:1",
                ),
                *(
                    Observation(
                        source="loads", subject="prefill-0", name=v.INFLIGHT_QUEUE_REQS,
                        at=since + at, value=at, label=f"rank-{rank}",
                    )
                    for at in range(seconds)
                    for rank in range(size)
                ),
            ),
            traits=(Trait(subject="*", name=v.T_ENGINE_FAMILY, at=since, value="sglang"),),
            changes=(Change(at=since - 9000, subject="decode-0", kind="restart"),),
        )
    )  # fmt: skip


def sealed(store, seconds=100, **how):
    incident = incident_of(store)
    store.save(incident)
    seal = store.seal(incident, now=T + seconds, **{"deadline_s": 30.0, **how})
    return incident, seal


class files_of_at_most:  # noqa: N801 - reads as a word of the test
    """Within it the kernel refuses any file of this process to grow beyond a size."""

    def __init__(self, size_bytes):
        self.size_bytes = size_bytes

    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size_bytes, self.before[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)
