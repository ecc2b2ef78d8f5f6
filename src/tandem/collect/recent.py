"""What the last seconds of harvests say to the probes: is probing safe, and is it needed at all.

For: the newest word on safety of every member, sizes that it told, real traffic that stands in
for a probe, and queues that were seen empty.
Not for: judging; where nothing can be said for sure, the answer is the one that probes.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from tandem.ports import Harvest
from tandem.records import Deployment, Observation, Path, Role, Trait
from tandem.records import vocabulary as v

WITHIN_S = 2.5
"""Completions this fresh prove a path; older ones may be from before it went silent."""

ZERO_S = 4.0
"""Every queue of the path must have been empty once within this."""

COMPLETIONS_MIN = 2
"""Beyond our own probes: one more may be another Tandem's."""

LOADED_S = 10.0
"""Over how long the tokens that a loaded path computes are counted."""
HEALTH_TOKENS_PER_S = 2.5
"""What health checks alone may compute on one engine."""

SAMPLES_MAX = 16
ANSWERED = frozenset({"completed", "unproven"})
"""What a probe says when engines have counted it."""
SIZES = frozenset({"page_size", "context_length"})
"""Server arguments that a probe's length depends on."""

_QUEUES = {
    Role.PREFILL: (v.BOOTSTRAP_QUEUE_REQS, v.INFLIGHT_QUEUE_REQS),
    Role.DECODE: (v.PREALLOC_QUEUE_REQS, v.TRANSFER_QUEUE_REQS),
}

Key = tuple[str, str, str]


class Recent:
    """Reads every harvest and remembers a few samples of what its answers need."""

    def __init__(self, deployment: Deployment, now: Callable[[], float]) -> None:
        """`now` is the clock of the harvests."""
        self._deployment = deployment
        self._now = now
        self._safety: dict[str, Trait] = {}
        self._samples: dict[Key, deque[tuple[float, float]]] = defaultdict(
            lambda: deque(maxlen=SAMPLES_MAX)
        )
        self._zero_at: dict[Key, float] = {}
        self._sizes: dict[tuple[str, str], int] = {}
        self._probed_at: deque[tuple[float, str]] = deque(maxlen=256)

    def read(self, harvest: Harvest) -> None:
        """Learn from one harvest."""
        for trait in harvest.traits:
            if trait.name == v.T_ACTIVE_PROBE_SAFE:
                self._safety[trait.subject] = trait
        for seen in harvest.observations:
            if seen.name == v.PROBE and not seen.label and seen.value in ANSWERED:
                self._probed_at.append((seen.at, seen.subject))
            elif seen.name == v.SERVER_ARG and seen.label in SIZES:
                self._size(seen)
            elif isinstance(seen.value, int | float) and seen.name in _NUMBERS:
                self._number(seen, float(seen.value))

    def _number(self, seen: Observation, value: float) -> None:
        key = (seen.subject, seen.name, seen.label)
        if seen.name in _COUNTERS:
            self._samples[key].append((seen.at, value))
        elif value == 0 and seen.source == "loads":
            self._zero_at[key] = seen.at

    def _size(self, seen: Observation) -> None:
        if isinstance(seen.value, str) and seen.value.isdecimal():
            self._sizes[seen.subject, seen.label] = int(seen.value)

    def page_tokens(self, member: str) -> int | None:
        """Tokens in one KV page of a member; None before it told."""
        return self._sizes.get((member, "page_size"))

    def context_tokens(self, member: str) -> int | None:
        """The longest sequence of a member; None where it does not tell."""
        return self._sizes.get((member, "context_length"))

    def released(self, members: Sequence[str], since: float) -> bool:
        """Whether every hand-off queue of these members was seen empty after a time."""
        return self._emptied(members, since)

    def safety(self, member: str) -> Trait | None:
        """The newest `T_ACTIVE_PROBE_SAFE` of a member, None before its adapter told."""
        return self._safety.get(member) or self._safety.get("*")

    def recently_completed(self, subject: str) -> bool:
        """Whether real requests just completed on a path, or through a router, with nothing held.

        Only where completions can be told apart by path: a cell whose prefill or decode has no
        other partner. Queues that stay above zero anywhere on the path say no.
        """
        if self._deployment.member(subject) is not None:
            everyone = [one.name for one in self._deployment.members]
            grown = self._grown((subject, v.ROUTER_RESPONSES_TOTAL, "200"), {subject})
            return grown >= COMPLETIONS_MIN and self._emptied(everyone, self._now() - ZERO_S)
        cell = next((one for one in self._deployment.cells() if one.subject == subject), None)
        if cell is None:
            return False
        counter = self._counter_of(cell)
        return (
            counter is not None
            and self._grown(counter, self._probes_counted_in(counter[0])) >= COMPLETIONS_MIN
            and self._emptied([cell.prefill, cell.decode], self._now() - ZERO_S)
        )

    def tokens_per_s(self, subject: str) -> float:
        """Tokens a second that a path, or all behind a router, computed lately for others.

        0.0 where none of them was completed lately, where nothing was computed in the last seconds
        beyond health checks, and in a matrix whose cells cannot be told apart.
        """
        members = [one.name for one in self._deployment.members if one.role is not Role.ROUTER]
        if self._deployment.member(subject) is not None:
            counter: Key | None = (subject, v.ROUTER_RESPONSES_TOTAL, "200")
            own = {subject}
        else:
            cell = next((one for one in self._deployment.cells() if one.subject == subject), None)
            counter = None if cell is None else self._counter_of(cell)
            # The partner that has no other: what it computes is computed on this cell.
            members = [] if counter is None else [counter[0]]
            own = set() if counter is None else self._probes_counted_in(counter[0])
        if counter is None or self._grown(counter, own, LOADED_S) < 1:
            return 0.0
        return sum(
            self._rate(one, LOADED_S) for one in members if self._rate(one, WITHIN_S + 0.5) > 0
        )

    def _rate(self, member: str, within_s: float) -> float:
        since = self._now() - within_s
        samples = [
            one
            for one in self._samples.get((member, v.PROGRESS_TOKENS_TOTAL, ""), ())
            if one[0] >= since
        ]
        if len(samples) < 2 or samples[-1][0] <= samples[0][0]:
            return 0.0
        grown = samples[-1][1] - samples[0][1]
        return max(0.0, grown / (samples[-1][0] - samples[0][0]) - HEALTH_TOKENS_PER_S)

    def _counter_of(self, cell: Path) -> Key | None:
        """A counter that counts what completed on this cell and on no other."""
        if len(self._deployment.of(Role.PREFILL)) == 1:
            return (cell.decode, v.REQUESTS_TOTAL, "")
        if len(self._deployment.of(Role.DECODE)) == 1:
            return (cell.prefill, v.TRANSFERS_TOTAL, "")
        return None

    def _probes_counted_in(self, member: str) -> set[str]:
        """The probes that a member's counters may have counted."""
        cells = [one for one in self._deployment.paths() if member in (one.prefill, one.decode)]
        routers = self._deployment.of(Role.ROUTER)
        return {one.subject for one in cells} | {one.name for one in routers}

    def _grown(self, key: Key, own: set[str], within_s: float = WITHIN_S) -> float:
        """How much a counter grew in the last seconds beyond our own probes."""
        since = self._now() - within_s
        samples = [one for one in self._samples.get(key, ()) if one[0] >= since]
        if len(samples) < 2:
            return 0.0
        probes = sum(1 for at, subject in self._probed_at if at >= since and subject in own)
        # A counter that began anew is a restart, not traffic.
        return max(0.0, samples[-1][1] - samples[0][1] - probes)

    def _emptied(self, members: Sequence[str], since: float) -> bool:
        """Whether every hand-off queue of these members was seen empty at or after a time."""
        return all(
            self._zero_at.get((member.name, queue, ""), float("-inf")) >= since
            for member in self._deployment.members
            if member.name in members
            for queue in _QUEUES.get(member.role, ())
        )


_COUNTERS = frozenset(
    {v.REQUESTS_TOTAL, v.TRANSFERS_TOTAL, v.ROUTER_RESPONSES_TOTAL, v.PROGRESS_TOKENS_TOTAL}
)
_NUMBERS = _COUNTERS | {queue for queues in _QUEUES.values() for queue in queues}

__all__ = ["Recent"]
