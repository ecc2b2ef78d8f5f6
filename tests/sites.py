"""One watched deployment in memory: a painted past, fakes for hands, and a store on the disk.

For: tests of the loop, of handling and of standing. Time is virtual: a turn of the loop paints the
seconds that its sleep let pass. Not for: how members behave (`fakes.py`) or look (`scenes.py`).
"""

import asyncio
import contextlib
from copy import deepcopy
from functools import cache

import faults
from fakes import World
from fakes import deployment as fake_deployment
from scenes import CELL, DECODE, PREFILL, ROUTER, Scene
from tandem.collect import Collector
from tandem.failures import discover
from tandem.loop import watch
from tandem.parts import Parts
from tandem.ports import Harvest
from tandem.records import (
    Change,
    Incarnation,
    Policy,
    Profile,
    ReportSettings,
    Role,
    Settings,
)
from tandem.store import Store

SMALL_PROOF = Profile(sequential=1, sessions=2, turns=1, concurrency=2, rescored_sessions=1)
AUTO = Policy(mode="auto", auto_scopes=("pair",))
TURNS_MAX = 400

__all__ = ["AUTO", "CELL", "DECODE", "PREFILL", "ROUTER", "HeardStore", "Site", "inline"]


async def inline(work, *args, **named):
    """Stand in for `asyncio.to_thread`: no virtual second passes while a file is written."""
    return work(*args, **named)


@cache
def _painted(paint):
    return paint()


def partial():
    """The beginning of the incident: some hand-offs hang while others flow."""
    scene = faults.serving()
    scene.restart(DECODE).run(3)
    scene.prefill.queues, scene.decode.queues = {"inflight": 3}, {"transfer": 2}
    scene.active = 4.0
    return scene.run(12)


class HeardStore(Store):
    """A store that keeps what was told by kind, and does what a test says beforehand."""

    def __init__(self, root, settings):
        super().__init__(root, settings)
        self.heard = []
        self.before = {}
        """The name of a method to what is called before it, with its arguments."""
        self.on_event = None
        self.then = {}
        """A kind of event to what happens once after it was told."""
        self.touched = None
        """The world in which each line on the disk is a contact, where a crash is planned."""

    def _first(self, method, *args):
        if method in self.before:
            self.before[method](*args)

    def event(self, kind, text, *, at, data=None):
        self._first("event", kind, text)
        told = super().event(kind, text, at=at, data=data)
        self.heard.append((kind, text))
        if kind in self.then:
            self.then.pop(kind)()
        if self.on_event is not None:
            self.on_event(kind, text)
        return told

    def append(self, harvest):
        self._first("append", harvest)
        return super().append(harvest)

    def save(self, incident):
        self._first("save", incident)
        crashing = self.touched.touch("save") if self.touched else False
        super().save(incident)
        if self.touched:
            self.touched.done(crashing)

    def journal_for(self, incident_id):
        journal = super().journal_for(incident_id)
        return _TouchedJournal(journal, self.touched) if self.touched else journal

    def keep(self, findings):
        self._first("keep", findings)
        super().keep(findings)

    def seal(self, incident, **how):
        self._first("seal", incident)
        return super().seal(incident, **how)


class _TouchedJournal:
    """A journal each of whose lines is a contact with the world."""

    def __init__(self, journal, world):
        self.journal, self.world = journal, world
        self.records = journal.records

    def append(self, record):
        crashing = self.world.touch("journal")
        self.journal.append(record)
        self.world.done(crashing)


class Site:
    """A deployment with a past; `scene` is what the next seconds look like."""

    def __init__(self, root, paint=faults.serving, *, policy=None, told=False, **settings):
        """`told` says that the folder holds the past already."""
        self.root = root
        self.scene = Scene(router=True)
        painted = _painted(paint)
        for name, value in vars(painted).items():
            # Rows of the past are shared: they are frozen, and there are thousands.
            rows = name in ("observations", "changes", "traits")
            setattr(self.scene, name, list(value) if rows else deepcopy(value))
        self.world = World(fake_deployment())
        self.clock = self.world.clock
        self.clock.time = self.scene.now
        self.scene.deployment = self.world.deployment
        for number, (name, at) in enumerate(self.scene.lives.items()):
            if self._alive(name):
                life = Incarnation(id=f"{name}:{at:.0f}", started_at=at, pid=number + 1)
                self.world.lives[name] = life
        self.heals = True
        """Whether a pair that was restarted in order serves again."""
        self.fields = {"policy": policy or Policy(), "verify": SMALL_PROOF, **settings}
        self.fields.setdefault("report", ReportSettings(commit=False))
        self.told = []
        self.stores = []
        self._take = None
        self.parts = self.open()
        self._seen = [0, 0, 0]
        if told:
            self._news()

    def _alive(self, name):
        if name == ROUTER:
            return self.scene.router_alive
        return self.scene.engines[name].alive

    def open(self):
        """Parts over the same world and folder, as a second process would have them."""
        settings = Settings(root=str(self.root), deployment=self.world.deployment, **self.fields)
        store = HeardStore.open(self.root, settings)
        self.stores.append(store)
        self.store = store
        self.parts = Parts(
            settings=settings,
            store=store,
            hands=self.world.hands(),
            clock=self.clock,
            collector=Collector([self], self.clock),
            modes=discover(),
            take_stacks=self.take_stacks,
        )
        return self.parts

    def close(self):
        """Let go of every store."""
        for store in self.stores:
            store.close()

    async def take_stacks(self, members):
        """Give no stacks, or what a test put in their place."""
        return Harvest() if self._take is None else await self._take(members)

    def take_stacks_with(self, take):
        """Take stacks another way from now on."""
        self._take = take

    # The one source.

    name, interval_s, timeout_s = "scene", 0.5, 5.0

    async def collect(self):
        """Paint the seconds that have passed, and give what is new."""
        while self.scene.now + 1.0 <= self.clock.now():
            self._follow()
            self.scene.run(1)
        return self._news()

    def forget(self):
        """Let nothing of the past be in the store: nobody has looked before."""
        self._news()

    def _news(self):
        rows = (self.scene.observations, self.scene.traits, self.scene.changes)
        news = [each[seen:] for each, seen in zip(rows, self._seen, strict=True)]
        self._seen = [len(each) for each in rows]
        observations, traits, changes = news
        return Harvest(tuple(observations), tuple(traits), tuple(changes))

    def _follow(self):
        """Let the scene show the lives the world has now."""
        for name in self.scene.lives:
            life = self.world.life(name)
            if name == ROUTER:
                self.scene.router_alive = life is not None
            else:
                self.scene.engines[name].alive = life is not None
            if life is not None and life.started_at != self.scene.lives[name]:
                self._reborn(name, life)

    def _reborn(self, name, life):
        scene = self.scene
        scene.lives[name] = life.started_at
        for key in [key for key in scene._totals if key[0] == name]:
            del scene._totals[key]
        scene.changes.append(
            Change(at=life.started_at, subject=name, kind="restart", incarnation=life.id)
        )
        engines = [one for one in self.world.deployment.members if one.role is not Role.ROUTER]
        ran = [self.world.life(one.name) for one in engines]
        if self.heals and all(ran) and self.world.in_order(PREFILL, DECODE):
            faults.flow(scene)

    # Watching.

    async def watch(self, *, turns=None, until=None, hunch=None, parts=None):
        """Run the loop for `turns`, or until an event of the kind `until` was told."""
        store = (parts or self.parts).store
        reached = asyncio.Event()
        store.on_event = lambda kind, _: reached.set() if kind == until else None
        running = asyncio.ensure_future(
            watch(
                parts or self.parts,
                hunch=hunch,
                tell=self.told.append,
                turns_max=turns or TURNS_MAX,
            )
        )
        waiting = asyncio.ensure_future(reached.wait())
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if until is not None and not reached.is_set():
            await running
            msg = f"{until} was never told in {TURNS_MAX} turns: {store.heard}"
            raise AssertionError(msg)
        if until is not None:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
        else:
            await running

    def when(self, kind, then):
        """Let something happen once, right after an event of a kind was told."""
        self.store.then[kind] = then

    def kinds(self):
        """The kinds of what was told, in order."""
        return [kind for kind, _ in self.store.heard]

    def texts(self, kind):
        """What was told of one kind."""
        return [text for told, text in self.store.heard if told == kind]

    def acts(self):
        """Starts and stops in the order they happened."""
        return [line for line in self.world.history if line.startswith(("start", "stop"))]
