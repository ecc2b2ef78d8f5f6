"""A host with GPUs that exists only in memory: the part of `pynvml` that is used, over real errors.

For: tests of the GPU source. Every call can be told to fail with an error of NVML, or to hang.
Not for: what a real driver does beyond its reference.
"""

# ruff: noqa: N802, N815 - the calls have the names that NVML gave them

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import pynvml


@dataclass
class Card:
    """One GPU; `errors` maps the name of a call to the NVML error that it ends with."""

    index: int = 0
    utilization: int = 0
    power_mw: int = 75_000
    used: int = 10 << 30
    total: int = 80 << 30
    clock: int = 1980
    reasons: int = 0
    mig: bool = False
    parts: dict = field(default_factory=dict)
    """MIG device number to the processes on it: pid to bytes."""
    processes: dict = field(default_factory=dict)
    mps_clients: dict = field(default_factory=dict)
    errors: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """A MIG device's handle."""

    card: int
    number: int


class FakeNvml:
    """Stands where the module `pynvml` would; `calls` are the names of what was asked."""

    NVMLError = pynvml.NVMLError
    NVMLError_GpuIsLost = pynvml.NVMLError_GpuIsLost
    NVMLError_LibRmVersionMismatch = pynvml.NVMLError_LibRmVersionMismatch
    NVMLError_LibraryNotFound = pynvml.NVMLError_LibraryNotFound
    NVMLError_DriverNotLoaded = pynvml.NVMLError_DriverNotLoaded
    NVMLError_NoPermission = pynvml.NVMLError_NoPermission
    NVMLError_NotFound = pynvml.NVMLError_NotFound
    NVMLError_Timeout = pynvml.NVMLError_Timeout
    NVML_CLOCK_SM = pynvml.NVML_CLOCK_SM
    nvmlEventTypeXidCriticalError = pynvml.nvmlEventTypeXidCriticalError

    def __init__(self, *cards):
        self.cards = {card.index: card for card in cards}
        self.init_error = None
        self.events_error = None
        self.wait_error = None
        self.xids = []
        self.calls = []
        self.opened = 0
        self.free = threading.Event()
        """Set, unless looks shall hang."""
        self.free.set()

    def _card(self, handle, call):
        self.calls.append(call)
        card = self.cards[handle]
        error = card.errors.get(call) or card.errors.get("*")
        if error is not None:
            raise pynvml.NVMLError(error)
        return card

    def nvmlInit(self):
        self.calls.append("nvmlInit")
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        self.opened += 1

    def nvmlShutdown(self):
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self):
        return "580.95.05"

    def nvmlDeviceGetCount(self):
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetIndex(self, handle):
        return handle

    def nvmlDeviceGetUUID(self, handle):
        self.free.wait()
        return f"GPU-{self._card(handle, 'uuid').index}"

    def nvmlDeviceGetName(self, handle):
        self._card(handle, "name")
        return "NVIDIA H200"

    def nvmlDeviceGetMigMode(self, handle):
        mode = int(self._card(handle, "mig").mig)
        return [mode, mode]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, number):
        if number not in self.cards[handle].parts:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return Part(handle, number)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        if isinstance(handle, Part):
            return _listed(self.cards[handle.card].parts[handle.number])
        return _listed(self._card(handle, "processes").processes)

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle):
        return _listed(self._card(handle, "mps").mps_clients)

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=self._card(handle, "utilization").utilization, memory=0)

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._card(handle, "power").power_mw

    def nvmlDeviceGetMemoryInfo(self, handle):
        card = self._card(handle, "memory")
        return SimpleNamespace(used=card.used, total=card.total)

    def nvmlDeviceGetClockInfo(self, handle, clock):
        assert clock == pynvml.NVML_CLOCK_SM
        return self._card(handle, "clock").clock

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return self._card(handle, "reasons").reasons

    def nvmlEventSetCreate(self):
        if self.events_error is not None:
            raise pynvml.NVMLError(self.events_error)
        return "events"

    def nvmlEventSetFree(self, events):
        assert events == "events"

    def nvmlDeviceRegisterEvents(self, handle, types, events):
        assert (types, events) == (pynvml.nvmlEventTypeXidCriticalError, "events")
        self._card(handle, "register")

    def nvmlEventSetWait_v2(self, events, timeout_ms):
        assert timeout_ms == 0
        if self.wait_error is not None:
            raise pynvml.NVMLError(self.wait_error)
        if not self.xids:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        card, number = self.xids.pop(0)
        return SimpleNamespace(device=card, eventData=number)


def _listed(processes):
    return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in processes.items()]
