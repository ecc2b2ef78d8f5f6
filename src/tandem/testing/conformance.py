"""Suites that hold an adapter to its port: for whoever writes one, here or elsewhere.

`check_engine` and `check_supervisor` take an adapter and members that really run, and return what
it does not keep of the port, one sentence each; nothing means that it conforms. They need no test
framework: `assert await check_engine(...) == ()` is a test.

For: truths of `ports.Engine` and `ports.Supervisor`. Not for: what only one adapter promises.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from tandem.ports import Completion, Engine, Harvest, Supervisor
from tandem.records import Member, Observation, Role
from tandem.records import vocabulary as v

MARGIN_S = 2.0
"""How much longer than its timeout a look may take."""
KNOWN = frozenset(
    value for name, value in vars(v).items() if name.isupper() and isinstance(value, str)
)
PROGRESS = (v.PROGRESS_TOKENS_TOTAL, v.REQUESTS_TOTAL)
QUEUES = {
    Role.PREFILL: (v.INFLIGHT_QUEUE_REQS, v.BOOTSTRAP_QUEUE_REQS),
    Role.DECODE: (v.TRANSFER_QUEUE_REQS, v.PREALLOC_QUEUE_REQS),
    Role.ROUTER: (),
}
PROMPT = "bank tree cold word ship lamp rain gold five door card film host pond tall quiz"


async def check_engine(
    engine: Engine, prefill: Member, decode: Member, *, timeout_s: float = 10.0
) -> tuple[str, ...]:
    """What an engine adapter does not keep of its port, asked of a pair that runs and is idle.

    Looks twice at each member, sends two requests of a few tokens through the pair, and tries
    members that are not there or never answer. Takes some seconds; leaves nothing behind.
    """
    found = list(_of_port(engine, Engine))
    if found:
        return tuple(found)
    before = {one.name: await engine.observe(one, timeout_s) for one in (prefill, decode)}
    for member in (prefill, decode):
        found += _looked(member, before[member.name])
        found += _told(member, before[member.name])
        found += _healthy(member, await engine.health(member, timeout_s))
        if not await engine.ready(member, timeout_s):
            found.append(f"ready() is not true of {member.name}, which runs")
    if not await engine.bootstrap_ready(prefill, timeout_s):
        found.append(f"bootstrap_ready() is not true of {prefill.name}, which runs")
    ended = [
        await engine.complete_direct(
            prefill, decode, prompt=PROMPT, output_tokens=4, timeout_s=timeout_s
        )
        for _ in range(2)
    ]
    found += [said for end in ended for said in _completed(end)]
    for member in (prefill, decode):
        after = await engine.observe(member, timeout_s)
        found += _looked(member, after)
        found += _moved(member, before[member.name], after)
    scores = await engine.score(
        prefill, decode, prompt=PROMPT, output_ids=ended[0].token_ids, timeout_s=timeout_s
    )
    if scores is not None and len(scores) != len(ended[0].token_ids):
        found.append("score() gives another number of gaps than there are output tokens")
    found += await _without(engine, prefill, decode)
    return tuple(dict.fromkeys(found))


async def check_engine_unreachable(
    engine: Engine, prefill: Member, decode: Member, *, timeout_s: float = 0.5
) -> tuple[str, ...]:
    """What an adapter does not keep of its port with members that accept and never answer.

    Opens a port on loopback for it; real time passes.
    """
    async with _mute() as port:
        found: list[str] = []
        for member in (prefill, decode):
            silent = _moved_to(member, port)
            for name, look in (("observe", engine.observe), ("health", engine.health)):
                try:
                    async with asyncio.timeout(4 * timeout_s + MARGIN_S):
                        harvest = await look(silent, timeout_s)
                except TimeoutError:
                    found.append(f"{name}() of a {member.role} that never answers does not end")
                    continue
                found += _all_missing(name, member, harvest)
        sides = (_moved_to(prefill, port), _moved_to(decode, port))
        try:
            async with asyncio.timeout(4 * timeout_s + MARGIN_S):
                ended = await engine.complete_direct(
                    *sides, prompt=PROMPT, output_tokens=1, timeout_s=timeout_s
                )
            if ended.status == "completed":
                found.append("complete_direct() completes though nobody answered")
        except TimeoutError:
            found.append("complete_direct() does not end when nobody answers")
    return tuple(found)


async def check_supervisor(
    make: Callable[[], Supervisor], member: Member, *, grace_s: float = 5.0
) -> tuple[str, ...]:
    """What a supervisor does not keep of its port, with a member that it may start and stop.

    `make` makes one as a separate command would, on the same state. `member` must not run, and is
    stopped at the end whatever happens.
    """
    found = list(_of_port(make(), Supervisor))
    if found:
        return tuple(found)
    try:
        found += await _lives(make, member, grace_s)
    finally:
        await make().stop(member, grace_s)
    if await make().inspect(member) is not None:
        found.append("a member that was stopped is still inspected as alive")
    left = await make().residue(member)
    if left:
        found.append(f"a member that was stopped leaves something: {left[0]}")
    return tuple(dict.fromkeys(found))


async def _lives(make: Callable[[], Supervisor], member: Member, grace_s: float) -> list[str]:
    found = []
    await make().stop(member, grace_s)
    if await make().inspect(member) is not None:
        found.append("a member that never ran is inspected as alive")
    if in_the_way := await make().obstacles(member):
        found.append(f"something is in the way of a member that may start: {in_the_way[0]}")
    first = await make().start(member)
    if await make().start(member) != first:
        found.append("starting what runs does not return what runs")
    if await make().inspect(member) != first:
        found.append("another object of it does not see the life that was started")
    both = await asyncio.gather(make().start(member), make().start(member))
    if set(map(_identity, both)) != {first.id}:
        found.append("two starts at once are not the one life that runs")
    await make().stop(member, grace_s)
    await make().stop(member, grace_s)
    if await make().inspect(member) is not None:
        found.append("a member that was stopped is still inspected as alive")
    second = await make().start(member)
    if second.id == first.id:
        found.append("a restart is not another incarnation")
    if second.started_at < first.started_at:
        found.append("a restart began before the life it follows")
    return found


def _identity(life: object) -> str:
    return str(getattr(life, "id", life))


def _of_port(adapter: object, port: type) -> list[str]:
    if not isinstance(adapter, port):
        return [f"{type(adapter).__name__} lacks a method of ports.{port.__name__}"]
    return [] if getattr(adapter, "name", "") else [f"{type(adapter).__name__} has no name"]


def _looked(member: Member, harvest: Harvest) -> list[str]:
    """A look is records of this member in our words, each a value or a reason, none twice."""
    found = []
    seen: set[tuple[str, str, str]] = set()
    for row in harvest.observations:
        what = f"{row.name} {row.label}".strip()
        if row.subject != member.name:
            found.append(f"{what} of {row.subject} comes with a look at {member.name}")
        if row.name not in KNOWN:
            found.append(f"{row.name!r} is no name of records/vocabulary.py")
        if row.value is None and row.missing is None and row.name != v.ENVIRONMENT:
            found.append(f"{what} has neither a value nor a reason why there is none")
        if row.value is not None and row.missing is not None:
            found.append(f"{what} has both a value and a reason why there is none")
        key = (row.source, row.name, row.label)
        if key in seen:
            found.append(f"{what} is told twice in one look")
        seen.add(key)
    names = {row.name for row in harvest.observations}
    found += [f"{name} of a {member.role} is not told" for name in PROGRESS if name not in names]
    wanted = QUEUES[member.role]
    found += [f"{name} of a {member.role} is not told" for name in wanted if name not in names]
    return found


def _told(member: Member, harvest: Harvest) -> list[str]:
    """The first look tells what judgement must know of the engine."""
    names = {trait.name for trait in harvest.traits}
    wanted = (v.T_ENGINE_FAMILY, v.T_ACTIVE_PROBE_SAFE)
    found = [f"the first look at {member.name} lacks {one}" for one in wanted if one not in names]
    found += [f"the trait {one.name} has no reason" for one in harvest.traits if not one.because]
    return found


def _healthy(member: Member, harvest: Harvest) -> list[str]:
    rows = {row.name: row for row in harvest.observations}
    found = []
    if v.HEALTH_STATUS not in rows or rows[v.HEALTH_STATUS].value != 200:
        found.append(f"health() of {member.name}, which runs, gives no status 200")
    if member.role is Role.PREFILL and v.BOOTSTRAP_READY not in rows:
        found.append("health() of a prefill says nothing of its rendezvous")
    return found


def _completed(end: Completion) -> list[str]:
    if end.status != "completed":
        return [f"complete_direct() through a pair that runs is {end.status}: {end.detail}"]
    found = []
    if len(end.token_ids) != 4:
        found.append(f"complete_direct() for 4 tokens gives {len(end.token_ids)}")
    if end.kv_moved is False:
        found.append("complete_direct() saw no KV move in a request that completed")
    if end.latency_s <= 0:
        found.append("complete_direct() took no time")
    return found


def _moved(member: Member, before: Harvest, after: Harvest) -> list[str]:
    """Counters only grow, and those of progress grew by two requests."""
    first, second = _numbers(before), _numbers(after)
    fell = [
        f"{name} of {member.name} fell from {value:g} to {second[name]:g}"
        for name, value in first.items()
        if name.endswith("_total") and second.get(name, value) < value
    ]
    asked = second.get(v.REQUESTS_TOTAL)
    if asked is not None and asked <= first.get(v.REQUESTS_TOTAL, 0.0):
        fell.append(f"{v.REQUESTS_TOTAL} of {member.name} did not grow by two requests")
    return fell


def _numbers(harvest: Harvest) -> dict[str, float]:
    return {
        row.name: float(row.value)
        for row in harvest.observations
        if not row.label and isinstance(row.value, int | float)
    }


async def _without(engine: Engine, prefill: Member, decode: Member) -> list[str]:
    """Members that are not there: reasons instead of exceptions, and nothing is claimed."""
    found = []
    for member in (prefill, decode):
        dead = _moved_to(member, 9)
        found += _all_missing("observe", member, await engine.observe(dead, 1.0))
        found += _all_missing("health", member, await engine.health(dead, 1.0))
        if await engine.ready(dead, 1.0):
            found.append(f"ready() is true of a {member.role} that is not there")
    dead_decode = _moved_to(decode, 9)
    ended = await engine.complete_direct(
        prefill, dead_decode, prompt=PROMPT, output_tokens=1, timeout_s=2.0
    )
    if ended.status == "completed":
        found.append("complete_direct() completes without a decode")
    return found


def _all_missing(call: str, member: Member, harvest: Harvest) -> list[str]:
    """Whether every row of a look at nobody is a reason, but for a rendezvous known to be none."""
    if not harvest.observations:
        return [f"{call}() of a {member.role} that does not answer says nothing at all"]
    claimed = [row for row in harvest.observations if row.missing is None and not _denial(row)]
    return [
        f"{call}() of a {member.role} that does not answer claims {row.name}" for row in claimed[:1]
    ]


def _denial(row: Observation) -> bool:
    return row.name == v.BOOTSTRAP_READY and row.value is False


def _moved_to(member: Member, port: int) -> Member:
    """The same member as if it were at another port of this host."""
    return msgspec.structs.replace(
        member,
        name=f"{member.name}-elsewhere",
        url=f"http://127.0.0.1:{port}",
        metrics_url=None,
        bootstrap_port=port if member.bootstrap_port is not None else None,
    )


@asynccontextmanager
async def _mute() -> AsyncIterator[int]:
    """A port of loopback that accepts, and never says anything."""
    held: set[asyncio.StreamWriter] = set()

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.add(writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in held:
            writer.close()


__all__ = ["check_engine", "check_engine_unreachable", "check_supervisor"]
