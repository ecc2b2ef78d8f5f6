"""Named timelines: the incident, its near miss, what is no stall, and faults with no mode.

Each function paints one scene up to the moment at which it is judged.
"""

from scenes import CELL, DECODE, PREFILL, ROUTER, Scene
from tandem.records import vocabulary as v


def serving(rate: float = 2.0, **shape: int) -> Scene:
    """A healthy deployment under light load, seen for a minute."""
    return flow(Scene(**shape), rate).run(60)


def flow(scene: Scene, rate: float = 2.0) -> Scene:
    """Every engine completes `rate` requests a second and holds none for long."""
    for name, engine in scene.engines.items():
        engine.completes = rate
        engine.tokens = rate * (60.0 if name.startswith("prefill") else 12.0)
        engine.queues = {"transfer": 0.0, "inflight": 0.0}
        engine.cpu = 0.3
        engine.health, engine.forwards = 200, True
    scene.offered = scene.answered = rate
    scene.active = lambda second: float(second % 3 == 0)
    scene.probes = dict.fromkeys(scene.probes, "completed")
    return scene


def still(scene: Scene) -> Scene:
    """Nothing completes or computes any more; what is held stays as the caller sets it."""
    for engine in scene.engines.values():
        engine.completes = engine.tokens = 0.0
        engine.cpu = 0.03
    scene.answered = 0.0
    return scene


def silence(scene: Scene, held: int = 8) -> Scene:
    """The pair goes silent: every hand-off slot is held, health stays green."""
    still(scene)
    scene.prefill.queues = {"inflight": held, "bootstrap": 2}
    scene.decode.queues = {"transfer": held, "prealloc": 2}
    scene.offered, scene.active = 0.0, float(held + 2)
    scene.probes = dict.fromkeys(scene.probes, "stuck")
    return scene


def stale_peers(*, silent_s: int = 15, restarts: int = 3) -> Scene:
    """The incident by stale peers: after each decode-only restart more rooms hang, then all."""
    return after_restarts(serving(), silent_s=silent_s, restarts=restarts)


def after_restarts(scene: Scene, *, silent_s: int = 15, restarts: int = 3) -> Scene:
    """Restart the decode alone, again and again, under a prefill with stale peers."""
    held = 0
    for _ in range(restarts):
        scene.restart(DECODE)
        for _ in range(2):
            held += 1
            scene.prefill.queues = {"inflight": held}
            scene.decode.queues = {"transfer": 1}
            scene.active = held
            scene.run(12)
    return silence(scene, held + 2).run(silent_s)


def orphaned_transfers(*, silent_s: int = 15, restarts: int = 3) -> Scene:
    """The incident by orphans: each restart under load pins what was in flight, nothing else."""
    scene = serving()
    held = 0
    for _ in range(restarts):
        held += 3
        scene.prefill.queues = {"inflight": held}
        scene.restart(DECODE)
        scene.run(24)
    silence(scene, held)
    scene.decode.queues = {"transfer": 3, "prealloc": 2}
    return scene.run(silent_s)


def near_miss() -> Scene:
    """The same restarts with leases: queues blip for two seconds and everything flows again."""
    scene = serving()
    for _ in range(3):
        scene.prefill.queues = {"bootstrap": 3, "inflight": 2}
        scene.active = 5.0
        scene.answered = 0.0
        scene.prefill.completes = 0.0
        scene.restart(DECODE, away_s=3, settle=False)
        scene.run(2)
        flow(scene).run(20)
    return scene


def idle() -> Scene:
    """Nobody asks for anything; only health checks and probes move a token."""
    scene = serving()
    for engine in scene.engines.values():
        engine.completes, engine.tokens, engine.cpu = 0.2, 5.2, 0.05
    scene.offered = scene.answered = 0.2
    scene.active = 0.0
    return scene.run(60)


def burst() -> Scene:
    """Forty requests arrive at once: long queues that work their way down."""
    scene = serving()
    left = {"waiting": lambda second: max(0.0, 40 - 2 * second), "inflight": 1.0}
    scene.prefill.queues = dict(left)
    scene.prefill.seconds_each = 0.4
    scene.decode.queues = {"transfer": lambda second: max(0.0, 20 - second), "running": 8.0}
    scene.offered, scene.active = 0.0, lambda second: max(0.0, 40 - 2 * second)
    scene.probes = dict.fromkeys(scene.probes, "late")
    return scene.run(18)


def long_prefill(seconds: int = 32) -> Scene:
    """One prompt of many thousand tokens: chunks of 256 every two seconds, all else waits."""
    scene = still(serving())
    scene.prefill.tokens = lambda second: 256.0 if second % 2 == 0 else 0.0
    scene.prefill.cpu = 1.0
    scene.prefill.forwards = False
    scene.prefill.queues = {"waiting": 2.0, "running": 1.0}
    scene.decode.queues = {"transfer": 3.0}
    scene.offered, scene.active = 0.0, 3.0
    scene.probes = dict.fromkeys(scene.probes, "stuck")
    return scene.run(seconds)


def overload() -> Scene:
    """Twice the load that can be served: everything moves and the queues never empty."""
    scene = serving()
    scene.prefill.queues = {"waiting": 12.0, "inflight": lambda second: second % 3}
    scene.decode.queues = {"prealloc": 6.0, "transfer": 2.0, "running": 16.0}
    scene.offered, scene.active = 4.0, 30.0
    scene.prefill.seconds_each = 0.5
    scene.probes = dict.fromkeys(scene.probes, "late")
    return scene.run(60)


def cold_start() -> Scene:
    """The pair just started: the first request makes it compile for half a minute."""
    scene = Scene()
    for name in scene.lives:
        scene.lives[name] = scene.now - 3.0
    still(scene)
    for engine in scene.engines.values():
        engine.forwards, engine.cpu = False, 1.0
    scene.prefill.queues = {"running": 1.0}
    scene.decode.queues = {"transfer": 1.0}
    scene.offered, scene.active = 0.0, 1.0
    scene.probes = dict.fromkeys(scene.probes, "stuck")
    return scene.run(30)


def stall_without_restart() -> Scene:
    """Hand-offs hang for ever although no decode was ever restarted: no known mode."""
    return silence(serving(), held=4).run(20)


def stall_long_after_a_restart() -> Scene:
    """A harmless decode restart, two minutes of good work, then hand-offs hang: no known mode."""
    scene = serving().restart(DECODE)
    return silence(flow(scene).run(120), held=4).run(20)


def stall_before_a_restart() -> Scene:
    """Hand-offs hang first; then somebody restarts the decode alone, which does not help."""
    scene = silence(serving(), held=4).run(30)
    return scene.restart(DECODE).run(20)


def decode_hangs() -> Scene:
    """A forward step on the decode never returns; its health check ends with it: no known mode."""
    scene = still(serving())
    scene.decode.forwards, scene.decode.health, scene.decode.cpu = False, 503, 1.0
    scene.decode.queues = {"running": 3.0, "prealloc": 2.0}
    scene.prefill.queues = {"bootstrap": 2.0}
    scene.offered, scene.active = 0.0, 5.0
    scene.probes = dict.fromkeys(scene.probes, "stuck")
    return scene.run(20)


def lost_response() -> Scene:
    """An answer got lost behind the router; engines idle, and new requests work: no known mode."""
    scene = serving()
    scene.offered, scene.answered = 1.0, 1.0
    scene.active = 1.0
    return scene.run(30)


def ranks_apart() -> Scene:
    """Two ranks of the decode wait in different collectives: stacks show it."""
    scene = decode_hangs()
    for rank, call in enumerate(("all_gather_into_tensor", "broadcast_object_list")):
        frames = f"{call} (distributed_c10d.py:1)\nforward (model_runner.py:2)"
        scene.see("stack", DECODE, v.STACK, frames, label=f"4{rank}/4{rank} TP{rank}")
    return scene


def abort_wedge(*, logged: bool = True) -> Scene:
    """A burst of aborts kills the bootstrap thread: everything waits in bootstrapping."""
    scene = serving()
    for engine in scene.engines.values():
        engine.aborts = 3.0
    scene.run(10)
    for engine in scene.engines.values():
        engine.aborts = 0.0
    still(scene)
    scene.traits = [one for one in scene.traits if one.name != v.T_ACTIVE_PROBE_SAFE]
    scene.prefill.queues = {"bootstrap": 6.0}
    scene.decode.queues = {"prealloc": 6.0}
    scene.offered, scene.active = 0.0, 6.0
    scene.probes = dict.fromkeys(scene.probes, "stuck")
    scene.run(20)
    if logged:
        scene.see("log", PREFILL, v.LOG_SIGNATURE, 1, label="foreign-traffic")
    return scene


def router_diverges() -> Scene:
    """The router holds what it is given; the engines idle and serve whoever asks directly."""
    scene = serving()
    for engine in scene.engines.values():
        engine.completes = engine.tokens = 0.2
    scene.offered, scene.answered, scene.active = 1.0, 0.0, lambda second: second
    scene.probes[ROUTER] = "late"
    scene.run(5)
    scene.probes[ROUTER] = "stuck"
    scene.see("router", ROUTER, v.WORKER_BREAKER_OPEN, True, label=PREFILL)
    return scene.run(20)


def dead_decode(seconds: int = 20) -> Scene:
    """The decode's process is gone and nobody starts it again."""
    scene = still(serving())
    scene.decode.alive = False
    scene.prefill.queues = {"bootstrap": 3.0}
    scene.offered, scene.active = 0.0, 3.0
    scene.probes = {CELL: "failed", ROUTER: "failed"}
    return scene.run(seconds)


def failing_handoffs() -> Scene:
    """Every few seconds a hand-off fails aloud, while others complete."""
    scene = serving()
    scene.prefill.fails = scene.decode.fails = lambda second: float(second % 4 == 0)
    scene.probes[CELL] = "failed"
    return scene.run(30)


def paused_decode(seconds: int = 14) -> Scene:
    """Somebody stopped the decode's process: it holds what it has and answers nothing."""
    scene = still(serving())
    scene.decode.health = None
    scene.prefill.queues = {"bootstrap": 3.0}
    scene.offered, scene.active = 0.0, 3.0
    scene.probes = dict.fromkeys(scene.probes, "stuck")
    for _ in range(seconds):
        scene.run(1)
        scene.see("process", DECODE, v.PROCESS_STATE, "T")
    return scene
