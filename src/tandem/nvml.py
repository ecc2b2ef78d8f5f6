"""The GPUs of this host as NVIDIA's driver tells of them, through NVML.

For: the source of GPUs; every value that cannot be had comes with the reason why.
Not for: what a value means, or which GPU is whose. Calls block, and may hang with a lost GPU: make
them in a thread that nobody has to wait for.
Source: NVML API reference; under MIG a whole GPU has no utilisation, and its processes are listed
by its parts.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, TypeVar

from tandem.errors import WorldError

GPUS_MAX = 64
PARTS_MAX = 16
"""MIG devices of one GPU; seven is the most there are."""
XIDS_MAX = 64
"""Driver errors taken in one look."""
LOST = "lost"
MPS_SERVER = "nvidia-cuda-mps"
"""How the kernel cuts the name of MPS's server and daemon."""

# `nvmlDeviceGetCurrentClocksEventReasons`: those that mean the GPU is held back.
_SLOWDOWNS = {
    "power-cap": 0x4,
    "thermal": 0x20 | 0x40,
    "power-brake": 0x80,
    "hardware": 0x8,
}

T = TypeVar("T")


class Use(NamedTuple):
    """A process on a GPU; `memory_bytes` is None where the driver does not tell."""

    pid: int
    memory_bytes: int | None


class Xid(NamedTuple):
    """One driver error: the index of its GPU, and its number."""

    gpu: int
    number: int


@dataclass(slots=True)
class Gpu:
    """One GPU as it is now. What is None has its reason in `problems`, under the same name."""

    index: int
    uuid: str | None = None
    name: str | None = None
    mig: bool = False
    mps: bool = False
    utilization: float | None = None
    """0..1, the share of the last period in which a kernel ran."""
    power_w: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    sm_clock_mhz: int | None = None
    slowdown: tuple[str, ...] | None = None
    uses: tuple[Use, ...] | None = None
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def lost(self) -> bool:
        """Whether it fell off the bus; its handle stays dead until NVML is closed and opened."""
        return LOST in self.problems


class Nvml:
    """NVML, opened when first asked; `library` is the module `pynvml`, or one like it."""

    def __init__(self, library: ModuleType | None = None) -> None:
        """Nothing is loaded before the first look."""
        self._library = library
        self._open = False
        self._handles: list[object] = []
        self._events: object | None = None
        self._unheard: dict[int, str] = {}

    def look(self) -> list[Gpu]:
        """Every GPU as it is now.

        Raises `WorldError` when there is no driver, or it refuses altogether: that is looked for
        anew each time, because a driver may be loaded later.
        """
        library = self._opened()
        return [self._gpu(library, index, handle) for index, handle in enumerate(self._handles)]

    def driver(self) -> str | None:
        """The driver's version."""
        with contextlib.suppress(self._opened().NVMLError):
            return str(self._opened().nvmlSystemGetDriverVersion())
        return None

    def xids(self) -> tuple[list[Xid], dict[int, str]]:
        """Driver errors since the last look, and for each GPU not listened to the reason why."""
        library = self._opened()
        found: list[Xid] = []
        while self._events is not None and len(found) < XIDS_MAX:
            try:
                told = library.nvmlEventSetWait_v2(self._events, 0)
                number = int(told.eventData)
                found.append(Xid(int(library.nvmlDeviceGetIndex(told.device)), number))
            except library.NVMLError_Timeout:
                break
            except library.NVMLError as error:
                # The event set is of no use after this (NVML reference); the GPUs still are.
                self._events = None
                self._unheard = dict.fromkeys(range(len(self._handles)), _said(error))
        return found, self._unheard

    def close(self) -> None:
        """Let go of the library."""
        if self._open and self._library is not None:
            self._open = False
            with contextlib.suppress(self._library.NVMLError):
                if self._events is not None:
                    self._library.nvmlEventSetFree(self._events)
                self._library.nvmlShutdown()
            self._events = None

    def _opened(self) -> ModuleType:
        if self._library is None:
            import pynvml  # noqa: PLC0415 - only a host with a driver needs it

            self._library = pynvml
        library = self._library
        if self._open:
            return library
        try:
            library.nvmlInit()
            self._open = True
            count = min(int(library.nvmlDeviceGetCount()), GPUS_MAX)
            self._handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        except library.NVMLError as error:
            self.close()
            raise _no_driver(library, error) from None
        self._listen(library)
        return library

    def _listen(self, library: ModuleType) -> None:
        """Ask to be told of driver errors from now on; those before are only in the kernel log."""
        self._unheard = {}
        try:
            self._events = library.nvmlEventSetCreate()
        except library.NVMLError as error:
            self._events = None
            self._unheard = dict.fromkeys(range(len(self._handles)), _said(error))
            return
        for index, handle in enumerate(self._handles):
            try:
                library.nvmlDeviceRegisterEvents(
                    handle, library.nvmlEventTypeXidCriticalError, self._events
                )
            except library.NVMLError as error:
                self._unheard[index] = _said(error)

    def _gpu(self, library: ModuleType, index: int, handle: object) -> Gpu:
        gpu = Gpu(index)

        def ask(name: str, call: Callable[[], T]) -> T | None:
            if gpu.lost:
                gpu.problems[name] = gpu.problems[LOST]
                return None
            try:
                return call()
            except library.NVMLError_GpuIsLost as error:
                gpu.problems[LOST] = gpu.problems[name] = f"the GPU is lost: {_said(error)}"
            except library.NVMLError as error:
                gpu.problems[name] = _said(error)
            return None

        gpu.uuid = ask("uuid", lambda: str(library.nvmlDeviceGetUUID(handle)))
        gpu.name = ask("name", lambda: str(library.nvmlDeviceGetName(handle)))
        gpu.mig = ask("mig", lambda: int(library.nvmlDeviceGetMigMode(handle)[0]) == 1) or False
        gpu.uses = ask("uses", lambda: _uses(library, handle, mig=gpu.mig))
        gpu.mps = ask("mps", lambda: _shared(library, handle, gpu.uses or ())) or False
        if gpu.mig or gpu.mps:
            gpu.problems["utilization"] = MIG if gpu.mig else MPS
        else:
            gpu.utilization = ask(
                "utilization", lambda: library.nvmlDeviceGetUtilizationRates(handle).gpu / 100
            )
        gpu.power_w = ask("power_w", lambda: library.nvmlDeviceGetPowerUsage(handle) / 1000)
        memory = ask("memory_used_bytes", lambda: library.nvmlDeviceGetMemoryInfo(handle))
        if memory is not None:
            gpu.memory_used_bytes, gpu.memory_total_bytes = int(memory.used), int(memory.total)
        gpu.sm_clock_mhz = ask(
            "sm_clock_mhz",
            lambda: int(library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM)),
        )
        gpu.slowdown = ask("slowdown", lambda: _slowdown(library, handle))
        return gpu


MIG = "MIG is on: the driver gives no utilisation of the whole GPU"
MPS = "MPS is on: the utilisation is that of all its clients together"


def _uses(library: ModuleType, handle: object, *, mig: bool) -> tuple[Use, ...]:
    """The processes on a GPU, or on its parts: a whole one does not list those to everybody."""
    handles = [handle]
    if mig:
        handles = []
        count = min(int(library.nvmlDeviceGetMaxMigDeviceCount(handle)), PARTS_MAX)
        for part in range(count):
            # Parts need not be numbered without gaps.
            with contextlib.suppress(library.NVMLError_NotFound):
                handles.append(library.nvmlDeviceGetMigDeviceHandleByIndex(handle, part))
    found: dict[int, Use] = {}
    for one in handles:
        for process in library.nvmlDeviceGetComputeRunningProcesses(one):
            pid, memory_bytes = int(process.pid), process.usedGpuMemory
            before = found.get(pid)
            if before is not None and before.memory_bytes is not None and memory_bytes is not None:
                memory_bytes += before.memory_bytes
            found[pid] = Use(pid, None if memory_bytes is None else int(memory_bytes))
    return tuple(found.values())


def _shared(library: ModuleType, handle: object, uses: tuple[Use, ...]) -> bool:
    """Whether MPS serves this GPU: its server works there, or it has clients there."""
    if any(_command(use.pid).startswith(MPS_SERVER) for use in uses):
        return True
    try:
        return bool(library.nvmlDeviceGetMPSComputeRunningProcesses(handle))
    except library.NVMLError:
        return False  # a driver that cannot tell has no clients of it to list


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def _slowdown(library: ModuleType, handle: object) -> tuple[str, ...]:
    bits = int(library.nvmlDeviceGetCurrentClocksEventReasons(handle))
    return tuple(name for name, mask in _SLOWDOWNS.items() if bits & mask)


def _said(error: BaseException) -> str:
    """The driver's own words, in lower case as part of a sentence."""
    return f"the driver says: {str(error).rstrip('.').lower()}"


def _no_driver(library: ModuleType, error: BaseException) -> WorldError:
    if isinstance(error, library.NVMLError_LibraryNotFound | library.NVMLError_DriverNotLoaded):
        return WorldError(
            "There is no NVIDIA driver on this host.",
            next_step="Install it where there is such a GPU.",
        )
    if isinstance(error, library.NVMLError_NoPermission):
        return WorldError(
            "This user may not open the NVIDIA driver.",
            next_step="Give it /dev/nvidiactl and /dev/nvidia*, or run Tandem as root.",
        )
    if isinstance(error, library.NVMLError_LibRmVersionMismatch):
        return WorldError(
            "The NVIDIA driver was updated and the old one is still loaded.",
            next_step="Reboot, or load the new one, when the members may stop.",
        )
    return WorldError(
        f"NVML cannot be opened: {_said(error)}.", next_step="See whether nvidia-smi works."
    )


__all__ = ["MIG", "MPS", "Gpu", "Nvml", "Use", "Xid"]
