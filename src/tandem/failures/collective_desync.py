"""Ranks of one engine that wait for each other in different calls, for ever.

What you see
    One engine stops as a whole: no token, no completed step. Its GPUs are busy (a rank spins in a
    collective that another never enters) or idle (the ranks wait in a CPU group). The overlap
    schedule was one way into it.

Why it is silent
    Every rank is inside a call that will return "soon"; no timeout of the engine covers it, and
    the error of the collective library comes minutes to hours later.

What rules it in
    Stacks of every rank that stand in different calls, twice. Supporting only: one engine of the
    pair runs no forward step while the other does; its processes compute without progress.

What rules it out
    Forward steps that still complete on every engine: a health check that runs one is answered by
    all ranks together. An engine of a single rank has nobody to fall out of step with. The flag
    that switches the overlap schedule off excludes that mechanism alone, not the failure. Idle
    GPUs exclude nothing.

Repair and its safety
    Restart the whole engine, after taking stacks of every rank, the quiet one too: a restart
    destroys the only proof. In a pair whose decode may not be restarted alone, the pair.

References
    sgl-project/sglang#34569 (batch ordinals, not timestamps, find the divergence),
    sgl-project/sglang#31144 (one rank in a send, seven in all-gather).
"""

import re

from tandem import signs
from tandem.facts import Facts
from tandem.failures.answers import (
    LOOK_S,
    contradicts,
    forwards,
    healthy,
    supports,
    unknown,
)
from tandem.ports import Mode
from tandem.records import TestResult
from tandem.records import vocabulary as v

SLUG = "collective-desync"
OVERLAP = "overlap-schedule"
SIZES = ("tp_size", "pp_size", "dp_size", "ep_size")
"""Server arguments whose product is at least the number of ranks of one engine."""
COLLECTIVE = re.compile(
    r"\b(all_?reduce|all_?gather\w*|broadcast\w*|barrier|reduce_?scatter\w*|recv\w*|send\w*|"
    r"synchronize|wait)\b"
)
"""Frames in which a rank waits for others."""
RANK = re.compile(r"(?i)\b(tp|pp|dp|ep|rank)[\s_-]?\d+")
SCHEDULER = re.compile(r"event_loop|run_batch|scheduler\.py")


def forwards_still_complete(facts: Facts, subject: str) -> TestResult:
    """Whether a forward step still completes on every engine, which takes every rank."""
    test = "forwards-still-complete"
    members = [name for name in signs.ends(facts, subject) if name]
    seen = {name: tokens for name in members if (tokens := forwards(facts, name)) is not None}
    if len(seen) < 2:
        return unknown(
            test, "decisive", "not every engine's progress was seen", "progress of both engines"
        )
    cited = tuple(cite for tokens in seen.values() for cite in tokens.evidence)
    stopped = [name for name, tokens in seen.items() if tokens.value <= 0]
    if stopped:
        # Moderate: a hung kernel, a hung step and a starved health check look the same from here.
        why = f"{' and '.join(stopped)} completed no forward step in the last 10 s"
        return supports(test, "moderate", why, cited)
    checks = tuple(cite for name in members for cite in healthy(facts, name))
    runs = all(_runs_forward(facts, name) for name in members)
    answered = f", and /health, which runs one, answered 200 {len(checks)} times" if runs else ""
    counts = ", ".join(f"{name} {tokens.value:.0f}" for name, tokens in seen.items())
    # Decisive: a step needs every rank, and steps were completed while the pair was silent.
    why = f"forward steps still complete (tokens in the last 10 s: {counts}{answered})"
    return contradicts(test, "decisive", why, (*cited, *checks))


def ranks_in_different_calls(facts: Facts, subject: str) -> TestResult:
    """Whether stacks of the ranks of one engine stand in different collective calls."""
    test = "ranks-in-different-calls"
    ask = "stacks of every rank of the silent engine, the quiet one too, twice"
    for name in filter(None, signs.ends(facts, subject)):
        waits = _ranks(facts, name)
        if len(waits) < 2:
            continue
        cited = tuple(cite for _, cite in waits.values())
        calls = sorted({call for call, _ in waits.values()})
        tokens = forwards(facts, name)
        if len(calls) > 1 and tokens is not None and tokens.value <= 0:
            # Decisive: this is the failure itself, seen.
            why = f"ranks of {name} wait in different calls: {', '.join(calls)}"
            return supports(test, "decisive", why, cited)
        if len(calls) == 1:
            # Strong: all wait in one call; the one they wait for is not among the stacks, or none.
            why = f"every rank of {name} that was seen stands in the same call ({calls[0]})"
            return contradicts(test, "strong", why, cited)
    return unknown(test, "decisive", "no stacks of two ranks of one engine were taken", ask)


def single_rank(facts: Facts, subject: str) -> TestResult:
    """Whether the engines have one rank each, so that nobody can fall out of step."""
    test = "single-rank"
    cited: list[int] = []
    for name in signs.ends(facts, subject):
        sizes = [
            seen
            for label in SIZES
            if name and (seen := facts.latest(name, v.SERVER_ARG, label)) is not None
        ]
        if not sizes:
            return unknown(test, "strong", "the number of ranks is not known")
        if any(str(seen.value) not in ("1", "None", "0") for seen in sizes):
            return unknown(test, "strong", f"{name} has several ranks")
        cited += [seen.id for seen in sizes]
    # Strong, not decisive: an argument says what was asked for, not what runs.
    return contradicts(test, "strong", "every engine of the path has a single rank", tuple(cited))


def one_engine_stopped(facts: Facts, subject: str) -> TestResult:
    """Whether exactly one engine stopped stepping while its peer goes on."""
    test = "one-engine-stopped"
    seen = [
        (name, tokens)
        for name in signs.ends(facts, subject)
        if name and (tokens := forwards(facts, name)) is not None
    ]
    stopped = [name for name, tokens in seen if tokens.value <= 0]
    if len(seen) < 2 or len(stopped) != 1:
        return unknown(test, "weak", "it cannot be told that exactly one engine stopped")
    cited = tuple(cite for _, tokens in seen for cite in tokens.evidence)
    # Weak: any fault inside one engine does this.
    return supports(test, "weak", f"only {stopped[0]} stopped; its peer still steps", cited)


def computes_without_progress(facts: Facts, subject: str) -> TestResult:
    """Whether a stopped engine burns CPU: spinning. Idle processes exclude nothing."""
    test = "computes-without-progress"
    for name in signs.ends(facts, subject):
        tokens = forwards(facts, name) if name else None
        used = signs.busy(facts, name, LOOK_S) if name else None
        if tokens is None or used is None or tokens.value > 0 or used.value < signs.BUSY_CPU:
            continue
        # Weak: a long or hung kernel spins as well.
        why = f"{name} used {used.value:.1f} cores for 10 s and computed no token"
        return supports(test, "weak", why, (*tokens.evidence, *used.evidence))
    return unknown(test, "weak", "no stopped engine is seen computing; idle excludes nothing")


def overlap_switched_off(facts: Facts, subject: str) -> TestResult:
    """Whether every live engine runs with its overlap schedule switched off."""
    test = "overlap-switched-off"
    traits = [
        trait
        for trait in facts.traits
        if trait.name == v.T_SWITCHES_OFF and trait.value in (SLUG, OVERLAP)
    ]
    members = [name for name in signs.ends(facts, subject) if name]
    carried: list[str] = []
    cited: list[int] = []
    for name in members:
        found = next(
            (
                (trait.label, seen)
                for trait in traits
                if trait.subject in (name, "*")
                and (seen := _carries(facts, name, trait.label)) is not None
            ),
            None,
        )
        if found is not None:
            carried.append(found[0])
            cited.append(found[1])
    if not members or len(carried) < len(members):
        return unknown(
            test,
            "weak",
            "not every engine's command line is known to switch the overlap schedule off",
            "the command line of every live engine process",
        )
    # Weak for the failure: only this one way into it is closed. Alone for its mechanism.
    why = f"the live command line of {' and '.join(members)} carries {carried[0]}"
    return contradicts(test, "weak", why, tuple(cited))


def _carries(facts: Facts, member: str, switch: str) -> int | None:
    """The observation of the present life that shows a flag, or `VAR=value`, in force."""
    if not switch.startswith("-"):
        variable, _, value = switch.partition("=")
        seen = facts.latest(member, v.ENVIRONMENT, variable)
        return seen.id if seen is not None and str(seen.value) == value else None
    life = facts.incarnation(member)
    line = facts.latest(member, v.COMMAND_LINE)
    if line is not None and isinstance(line.value, tuple):
        present = life is None or line.incarnation in (None, life.id)
        return line.id if present and switch in line.value else None
    argument = facts.latest(member, v.SERVER_ARG, switch.lstrip("-").replace("-", "_"))
    return argument.id if argument is not None and str(argument.value) == "True" else None


def _runs_forward(facts: Facts, member: str) -> bool:
    trait = facts.trait(member, v.T_HEALTH_RUNS_FORWARD)
    return trait is not None and trait.value is True


def _ranks(facts: Facts, member: str) -> dict[str, tuple[str, int]]:
    """Each rank's innermost waiting call and the stack that shows it.

    A rank is a thread named for one (`TP3`), or the main thread of a process that runs a
    scheduler's loop; helper threads of one process wait for each other as a matter of course.
    """
    found: dict[str, tuple[str, int]] = {}
    for label in facts.labels(member, v.STACK):
        seen = facts.latest(member, v.STACK, label)
        if seen is None:
            continue
        frames = str(seen.value)
        process, _, thread = label.partition(" ")[0].partition("/")
        named = RANK.search(label)
        if named:
            rank = named.group().lower()
        elif process and process == thread and SCHEDULER.search(frames):
            rank = process
        else:
            continue
        waiting = next(filter(None, map(COLLECTIVE.search, frames.splitlines()[:8])), None)
        if waiting is not None:
            found[rank] = (waiting.group(1), seen.id)
    return found


MODE = Mode(
    slug=SLUG,
    incident_class="collective-desync",
    scope="engine",
    safety="Safe once the stacks of every rank are taken: the engine completes nothing anyway.",
    tests=(
        forwards_still_complete,
        ranks_in_different_calls,
        single_rank,
        one_engine_stopped,
        computes_without_progress,
        overlap_switched_off,
    ),
    needs=("ranks-in-different-calls",),
    aliases=(OVERLAP, "collective-deadlock", "nccl-hang", "rank-desync"),
    components=("compute", "scheduler"),
    mechanisms={OVERLAP: "overlap-switched-off"},
)
