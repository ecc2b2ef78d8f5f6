"""GPUs: what they do is told of whoever has them, and what cannot be known says why."""

import os
import subprocess
import sys
from inspect import signature

import pynvml
import pytest

from gpus import Card, FakeNvml
from tandem import nvml as nvml_module
from tandem.collect.gpu import ABSENT_EVERY_S, SAMPLES_MIN, SILENT, GpuSource, watts_known
from tandem.collect.incarnations import Incarnations
from tandem.facts import Facts
from tandem.nvml import MIG, MPS, Nvml
from tandem.records import Deployment, Incarnation, Member, Role
from tandem.records import vocabulary as v

PREFILL = Member(name="p", role=Role.PREFILL, url="http://127.0.0.1:1", engine="sglang")
DECODE = Member(name="d", role=Role.DECODE, url="http://127.0.0.1:2", engine="sglang")
MEMBERS = (PREFILL, DECODE)
LOST = pynvml.NVML_ERROR_GPU_IS_LOST
REFUSED = pynvml.NVML_ERROR_NO_PERMISSION
UNSUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
GIB = 1 << 30


class Bench:
    """A source over a fake host; this process, or another, is the member's."""

    def __init__(self, *cards, known=None, answer_s=5.0):
        self.host = FakeNvml(*cards)
        self.lives = Incarnations()
        self.at = 1000.0
        self.source = GpuSource(
            MEMBERS,
            self.lives,
            nvml=Nvml(self.host),
            known=known,
            answer_s=answer_s,
            now=lambda: self.at,
        )

    def member(self, name, pid):
        self.lives.saw(name, Incarnation(id=f"{pid}:7", started_at=1.0, pid=pid))

    async def look(self):
        """Rows by subject, name and label."""
        harvest = await self.source.collect()
        return {(one.subject, one.name, one.label): one for one in harvest.observations}


@pytest.fixture
async def bench_of():
    made = []

    def make(*cards, **how):
        made.append(Bench(*cards, **how))
        return made[-1]

    yield make
    for one in made:
        one.host.free.set()
        await one.source.close()


@pytest.fixture
def worker():
    """Give a real child of this process: a rank of the member that this process is."""
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as child:
        yield child.pid
        child.stdin.close()


class TestTold:
    """A GPU and whoever has it."""

    async def test_a_gpu_nobody_of_ours_has_is_the_hosts(self, bench_of):
        """Everything it does is told of the host, under its index."""
        bench = bench_of(Card(utilization=42, power_mw=310_400, reasons=0x4 | 0x40))
        seen = await bench.look()

        assert bench.source.present
        assert {(who, name): one.value for (who, name, _), one in seen.items()} == {
            ("host", v.GPU_COUNT): 1,
            ("host", v.GPU_DRIVER): "580.95.05",
            ("host", v.GPU_NAME): "NVIDIA H200 (GPU-0)",
            ("host", v.GPU_UTILIZATION): 0.42,
            ("host", v.GPU_POWER_W): 310.4,
            ("host", v.GPU_MEMORY_USED_BYTES): 10 * GIB,
            ("host", v.GPU_MEMORY_TOTAL_BYTES): 80 * GIB,
            ("host", v.GPU_SM_CLOCK_MHZ): 1980,
            ("host", v.GPU_SLOWDOWN): ("power-cap", "thermal"),
            ("host", v.GPU_XIDS_TOTAL): 0,
        }

    async def test_a_gpu_that_one_member_has_is_told_of_it(self, bench_of, worker):
        """The memory of its worker processes is the member's, and so is all the GPU does."""
        bench = bench_of(Card(index=0), Card(index=1, utilization=99))
        bench.host.cards[1].processes = {os.getpid(): GIB, worker: 2 * GIB}
        bench.member("p", os.getpid())
        seen = await bench.look()

        assert seen["p", v.GPU_MEMORY_BYTES, "1"].value == 3 * GIB
        assert seen["p", v.GPU_UTILIZATION, "1"].value == 0.99
        assert seen["p", v.GPU_UTILIZATION, "1"].incarnation == f"{os.getpid()}:7"
        assert ("host", v.GPU_UTILIZATION, "0") in seen
        assert ("host", v.GPU_UTILIZATION, "1") not in seen

    async def test_a_shared_gpu_says_nothing_of_one_member(self, bench_of, worker):
        """Two members on one GPU have their memory each; what it does is the host's alone."""
        bench = bench_of(Card(utilization=99))
        bench.host.cards[0].processes = {os.getppid(): GIB, worker: 2 * GIB}
        bench.member("p", os.getppid())
        bench.member("d", worker)
        seen = await bench.look()

        assert seen["host", v.GPU_UTILIZATION, "0"].value == 0.99
        assert seen["d", v.GPU_UTILIZATION, "0"].missing == "the GPU is shared with p"
        sizes = [seen[name, v.GPU_MEMORY_BYTES, "0"].value for name in ("p", "d")]
        assert sizes == [GIB, 2 * GIB]

    async def test_a_stranger_on_the_gpu_is_company(self, bench_of):
        """Somebody else's notebook on it makes its utilisation nobody's."""
        bench = bench_of(Card())
        bench.host.cards[0].processes = {os.getpid(): GIB, 1: None}
        bench.member("p", os.getpid())
        seen = await bench.look()

        assert "another process" in seen["p", v.GPU_UTILIZATION, "0"].missing

    async def test_driver_errors_are_told_once_and_counted(self, bench_of):
        """Each XID with its number, on the GPU it came from."""
        bench = bench_of(Card(index=0), Card(index=1))
        bench.host.xids = [(1, 79), (1, 48)]
        harvest = await bench.source.collect()
        later = await bench.look()

        told = [(one.label, one.value) for one in harvest.observations if one.name == v.GPU_XID]
        assert told == [("1", 79), ("1", 48)]
        assert later["host", v.GPU_XIDS_TOTAL, "1"].value == 2
        assert not [name for _, name, _ in later if name == v.GPU_XID]

    async def test_watts_are_learned_and_remembered(self, bench_of):
        """Idle is the usual power of no work, busy the high power of work; both outlive Tandem."""
        bench = bench_of(Card())
        card = bench.host.cards[0]
        for step in range(2 * SAMPLES_MIN):
            working = step >= SAMPLES_MIN
            card.utilization = 100 if working else 0
            # Spinning without work draws little: it must not pass for work.
            card.power_mw = (120_000 if step % 4 else 650_000) if working else 76_000
            seen = await bench.look()
        facts = Facts(Deployment(name="t", members=MEMBERS), seen.values(), now=1000.0)
        known = watts_known(facts)
        next_one = await bench_of(Card(), known=known).look()

        assert known == {"0": {v.GPU_IDLE_W: 76.0, v.GPU_BUSY_W: 650.0}}
        assert next_one["host", v.GPU_BUSY_W, "0"].value == 650.0


class TestUnknown:
    """What cannot be known."""

    async def test_mig_makes_utilisation_unknown(self, bench_of):
        """Never zero; the processes of its parts are found all the same."""
        bench = bench_of(Card(mig=True, utilization=50, parts={0: {os.getpid(): GIB}, 3: {}}))
        bench.host.cards[0].parts[3] = {os.getpid(): GIB}
        bench.member("p", os.getpid())
        seen = await bench.look()

        assert seen["host", v.GPU_UTILIZATION, "0"].missing == MIG
        assert seen["p", v.GPU_UTILIZATION, "0"].missing == MIG
        assert seen["p", v.GPU_MEMORY_BYTES, "0"].value == 2 * GIB

    async def test_mps_makes_utilisation_unknown(self, bench_of):
        """Its clients share the GPU, so that what it does is nobody's."""
        bench = bench_of(Card(utilization=50, mps_clients={os.getpid(): GIB}))
        bench.host.cards[0].processes = {os.getpid(): GIB}
        bench.member("p", os.getpid())
        seen = await bench.look()

        assert seen["host", v.GPU_UTILIZATION, "0"].missing == MPS
        assert seen["p", v.GPU_UTILIZATION, "0"].missing == MPS

    async def test_the_server_of_mps_gives_it_away(self, bench_of, monkeypatch):
        """Where the driver cannot list clients, the server among the processes can."""
        monkeypatch.setattr(nvml_module, "_command", lambda _: "nvidia-cuda-mps")
        bench = bench_of(Card(processes={7: GIB}, errors={"mps": UNSUPPORTED}))
        seen = await bench.look()

        assert seen["host", v.GPU_UTILIZATION, "0"].missing == MPS

    async def test_what_a_gpu_does_not_support_is_a_reason(self, bench_of):
        """Each value says why it is missing, and the others are told."""
        errors = {"mig": UNSUPPORTED, "power": UNSUPPORTED, "reasons": UNSUPPORTED}
        seen = await bench_of(Card(utilization=10, errors=errors)).look()

        assert seen["host", v.GPU_UTILIZATION, "0"].value == 0.1
        assert seen["host", v.GPU_POWER_W, "0"].missing == "the driver says: not supported"

    async def test_a_refusal_is_a_reason(self, bench_of):
        """A user who may not list processes still sees what the GPU does."""
        seen = await bench_of(Card(utilization=10, errors={"processes": REFUSED})).look()

        assert seen["host", v.GPU_UTILIZATION, "0"].value == 0.1

    async def test_memory_the_driver_does_not_tell_is_a_reason(self, bench_of):
        """A size of None is not zero."""
        bench = bench_of(Card(processes={os.getpid(): None}))
        bench.member("p", os.getpid())
        seen = await bench.look()

        assert "does not tell" in seen["p", v.GPU_MEMORY_BYTES, "0"].missing

    async def test_a_lost_gpu_is_a_reason_and_the_others_are_told(self, bench_of):
        """After the first refusal nothing more is asked of it, and the driver is opened anew."""
        bench = bench_of(Card(index=0, errors={"*": LOST}), Card(index=1, utilization=10))
        seen = await bench.look()
        bench.host.calls.clear()
        await bench.look()

        assert "the GPU is lost" in seen["host", v.GPU_UTILIZATION, "0"].missing
        assert seen["host", v.GPU_UTILIZATION, "1"].value == 0.1
        assert bench.host.calls.count("uuid") == 2
        assert (bench.host.opened, "nvmlInit" in bench.host.calls) == (1, False)

    @pytest.mark.parametrize("where", ["events_error", "wait_error"])
    async def test_driver_errors_that_cannot_be_heard_are_a_reason(self, bench_of, where):
        """The count is unknown and not zero; everything else is told."""
        bench = bench_of(Card(utilization=10))
        setattr(bench.host, where, UNSUPPORTED)
        seen = await bench.look()

        assert seen["host", v.GPU_XIDS_TOTAL, "0"].missing == "the driver says: not supported"
        assert seen["host", v.GPU_UTILIZATION, "0"].value == 0.1

    async def test_a_gpu_without_events_is_a_reason(self, bench_of):
        """Registering is refused for one GPU; the other is listened to."""
        bench = bench_of(Card(index=0, errors={"register": REFUSED}), Card(index=1))
        seen = await bench.look()

        assert "permissions" in seen["host", v.GPU_XIDS_TOTAL, "0"].missing
        assert seen["host", v.GPU_XIDS_TOTAL, "1"].value == 0


class TestAbsent:
    """No GPU, or a driver that does not answer."""

    @pytest.mark.parametrize(
        ("error", "wanted"),
        [
            (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no NVIDIA driver"),
            (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "no NVIDIA driver"),
            (REFUSED, "may not open the NVIDIA driver"),
            (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "was updated"),
            (pynvml.NVML_ERROR_UNKNOWN, "cannot be opened"),
        ],
    )
    async def test_no_driver_is_a_fact_told_now_and_then(self, bench_of, error, wanted):
        """One row that says why, then silence until it is looked for again."""
        bench = bench_of(Card())
        bench.host.init_error = error
        seen = await bench.look()
        bench.at += 2.0
        quiet = await bench.look()
        bench.at += ABSENT_EVERY_S
        bench.host.init_error = None
        back = await bench.look()

        assert [(key[1], wanted in one.missing) for key, one in seen.items()] == [
            (v.GPU_COUNT, True)
        ]
        assert quiet == {}
        assert back["host", v.GPU_COUNT, ""].value == 1

    async def test_a_driver_that_hangs_costs_a_bound(self, bench_of):
        """No second look is begun while the first has not ended; when it has, all is told again."""
        bench = bench_of(Card(), answer_s=0.05)
        bench.host.free.clear()
        hung = [await bench.look() for _ in range(3)]
        began = bench.host.calls.count("nvmlInit")
        bench.host.free.set()
        seen = {}
        while len(seen) < 2:
            seen = await bench.look()

        assert [one["host", v.GPU_COUNT, ""].missing for one in hung] == [SILENT] * 3
        assert began == 1
        assert seen["host", v.GPU_COUNT, ""].value == 1

    async def test_a_host_without_gpus_is_told(self, bench_of):
        """A driver that has none is a count of zero."""
        bench = bench_of()
        seen = await bench.look()

        assert (seen["host", v.GPU_COUNT, ""].value, bench.source.present) == (0, False)

    async def test_the_real_binding_is_loaded_when_first_asked(self):
        """On this machine the real library answers, or says that there is no driver."""
        source = GpuSource(MEMBERS, Incarnations())
        (first, *_) = (await source.collect()).observations
        await source.close()

        assert first.name == v.GPU_COUNT
        assert (first.value is None) == (first.missing is not None)

    def test_the_fake_is_like_the_binding(self):
        """Every call that the fake answers exists in the real one and takes as many arguments."""
        names = [name for name in dir(FakeNvml) if name.startswith("nvml") and "Type" not in name]
        host = FakeNvml()
        ours = {name: len(signature(getattr(host, name)).parameters) for name in names}
        real = {name: signature(getattr(pynvml, name)) for name in names}

        assert [name for name in names if not _takes(real[name], ours[name])] == []


def _takes(real, count):
    try:
        real.bind(*range(count))
    except TypeError:
        return False
    return True
