"""What may be remembered: everything else becomes `<redacted>` before it is first written.

Command lines, environments and server arguments go by allowlist: a value stays when its name is
known to be harmless, or when it is a plain number or switch. Free text (log lines, stacks, errors)
cannot: there every shape of a credential we know, and every quoted prompt, is taken out.

For: the store, which lets nothing in without it. Not for: the run records of a supervisor, which
must hold what a member is started with and are readable by their owner alone.
"""

import functools
import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from tandem.records import (
    ENGINE_VARIABLES,
    Change,
    Deployment,
    Event,
    Launch,
    Observation,
    Record,
    Trait,
    Value,
)
from tandem.records import vocabulary as v
from tandem.visible import visible

REDACTED = "<redacted>"
OFTEN_MAX = 400
TEXT_MAX = 65536
"""Characters kept of one text; a stack of a big process fits, a dumped prompt does not."""

HARMLESS = frozenset(
    """
    host port url model model-path tokenizer tokenizer-path tokenizer-mode served-model-name dtype
    quantization kv-cache-dtype device revision load-format context-length ctx
    disaggregation-mode disaggregation-transfer-backend disaggregation-bootstrap-port
    disaggregation-decode-allocation-policy disaggregation-ib-device disaggregation-decode-tp
    disaggregation-decode-dp
    disaggregation-prefill-pp disaggregation-decode-enable-offload-kvcache
    num-reserved-decode-tokens kv-transfer-config kv-connector handoff transport bootstrap-port
    bootstrap-host role prefill decode policy prefill-policy decode-policy pd-disaggregation
    prometheus-host prometheus-port metrics-port worker-urls backend connection-mode
    health-check-endpoint attention-backend prefill-attention-backend decode-attention-backend
    sampling-backend grammar-backend moe-a2a-backend moe-runner-backend deepep-mode
    mm-attention-backend fp8-gemm-backend fp4-gemm-backend nsa-prefill-backend nsa-decode-backend
    speculative-algorithm speculative-draft-model-path cuda-graph-bs schedule-policy
    load-balance-method max-total-tokens max-prefill-tokens max-new-tokens log-level log-level-http
    log-dir dist-init-addr node-rank nnodes tp tp-size dp dp-size pp pp-size ep ep-size
    tensor-parallel-size pipeline-parallel-size data-parallel-size gpu-memory-utilization
    mem-fraction-static distributed-executor-backend all2all-backend block-size
    reasoning-parser tool-call-parser chat-template faults seed version page-size threads
    """.split()  # noqa: SIM905 - words read best as words
)
"""Names of arguments, in flags and in server information, whose values say nothing secret."""

SECRETISH = re.compile(
    r"key|token(?!s\b|s[-_]|iz)|secret|pass(?!es)|pwd|auth|credential|cookie|bearer|signature",
    re.IGNORECASE,
)
_PLAIN = re.compile(r"[\d\s.,+\-\[\]()]+|[+-]?[\d.]+[eE][+-]?\d+")
"""Numbers, and lists of them."""
_SWITCH = frozenset({"true", "false", "none", "auto", "on", "off", "yes", "no"})
_VERBS = frozenset({"launch", "serve", "server", "prefill", "decode", "router", "worker"})
_FLAG = re.compile(r"(?P<name>--?[A-Za-z][A-Za-z0-9_.-]{0,63})(?:=(?P<value>.*))?", re.DOTALL)
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,80}")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


_SECRET_NAME = (
    r"(?:api[-_]?key|access[-_]?key|private[-_]?key|secret|passw|pwd|credential|"
    r"authorization|cookie)[\w.-]{0,40}"
)
_IS = r"[\"']?\s*[:=]\s*"
_PROMPT = rf"\b((?:text|prompts?|contents?|messages?|inputs?|input_text|input_ids|query|body){_IS})"
_BARE = r"[^\s\"',;&}\)\]]+"
_COUNT = r"[\d.]+\b"
_DONE = r"[\"']?<redacted>"
_KEYS = (
    r"\b(?:sk|pk|rk|hf|gh[a-z]|github_pat|glpat|xox[a-z]|nvapi|gsk|npm|pypi|dckr_pat|AIza|ya29\.)"
    r"[-_]?[A-Za-z0-9][\w-]{11,}"
)
_MIXED_40 = (
    r"(?<![\w/+.-])(?!/)(?=\S{0,39}[A-Z])(?=\S{0,39}[a-z])(?=\S{0,39}\d)"
    r"[A-Za-z0-9/+]{40}=*(?![\w/+=.-])"
)

# Every repeat that may begin anywhere is bounded: a hostile line costs no more than a long one.
_SHAPES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), into)
    for pattern, into in (
        (r"(?s)-----BEGIN [A-Z ]+-----.*?(?:-----END [A-Z ]+-----|\Z)", REDACTED),
        # A URL keeps where, and loses who asks and what is asked.
        (r"(?i)\b([a-z][a-z0-9+.-]{0,20}://)[^\s/'\"]*@", r"\1"),
        (r"(?i)\b([a-z][a-z0-9+.-]{0,20}://[^\s?#'\"<>]*)[?#][^\s'\"<>]*", r"\1"),
        (r"\beyJ[\w-]{4,}\.[\w-]+(?:\.[\w-]*)?", REDACTED),
        (r"(?i)\b(bearer|basic|digest)\s+[\w.~+/=:-]{6,}", rf"\1 {REDACTED}"),
        (_KEYS, REDACTED),
        (r"\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}\b", REDACTED),
        # Prompts: what is quoted or bracketed after such a name, to its end.
        (rf"(?is){_PROMPT}'(?:[^'\\]|\\.)*(?:'|\Z)", rf"\1{REDACTED}"),
        (rf'(?is){_PROMPT}"(?:[^"\\]|\\.)*(?:"|\Z)', rf"\1{REDACTED}"),
        (rf"(?is){_PROMPT}[\[{{(].*", rf"\1{REDACTED}"),
        (rf"(?i){_PROMPT}(?!{_COUNT}|{_DONE})\S.*", rf"\1{REDACTED}"),
        # Credentials by name. A token with a number is a count (`#new-token: 32`).
        (rf"(?i)({_SECRET_NAME}{_IS})(?!{_DONE})(?:'[^']*'|\"[^\"]*\"|{_BARE})", rf"\1{REDACTED}"),
        (
            rf"(?i)(token{_IS})(?!{_COUNT}|{_DONE})(?:'[^']*'|\"[^\"]*\"|{_BARE})",
            rf"\1{REDACTED}",
        ),
        (rf"(?i)(--[\w-]{{0,40}}{_SECRET_NAME}\s+)(?!{_DONE}){_BARE}", rf"\1{REDACTED}"),
        (rf"(?i)(--[\w-]{{0,40}}token\s+)(?!{_COUNT}|{_DONE}){_BARE}", rf"\1{REDACTED}"),
        # What is left that is long: quoted prose, and a key without a name beside it.
        (r"'(?=[^'\n]{0,60} )[^'\n]{80,}'", f"'{REDACTED}'"),
        (r'"(?=[^"\n]{0,60} )[^"\n]{80,}"', f'"{REDACTED}"'),
        (_MIXED_40, REDACTED),
        (r"\b(?=\w*[A-Z])(?=\w*[a-z])(?=(?:[A-Za-z_]*\d){4})\w{32,}\b", REDACTED),
    )
)


def text(value: str) -> str:
    """Free text without credentials, URL queries and prompts, at most `TEXT_MAX` characters.

    Nor does it keep what a terminal would obey: a log line is shown to people later.
    """
    return _scrub(value) if len(value) > OFTEN_MAX else _scrub_often(value)


def _scrub(value: str) -> str:
    value = visible(value)
    if len(value) > TEXT_MAX:
        value = value[:TEXT_MAX] + f"... ({len(value) - TEXT_MAX} characters more)"
    for shape, into in _SHAPES:
        value = shape.sub(into, value)
    return value


_scrub_often = functools.lru_cache(maxsize=8192)(_scrub)
"""Traits, labels and states come again with every look, and were half the cost of one."""


def _is_plain(value: str) -> bool:
    return not value or value.lower() in _SWITCH or bool(_PLAIN.fullmatch(value))


def argument(name: str, value: str) -> str:
    """The value of a flag or server argument, if that name may show one."""
    bare = name.lstrip("-").lower().replace("_", "-")
    if bare in HARMLESS:
        return text(value)
    if SECRETISH.search(bare):
        return REDACTED
    return value if _is_plain(value) else REDACTED


def command_line(words: Sequence[str]) -> tuple[str, ...]:
    """The words of a command line; what follows a flag belongs to it until the next flag."""
    kept: list[str] = []
    flag: str | None = None
    for place, word in enumerate(words):
        if place == 0 and " " in word:
            # A process that wrote its whole title into the first word.
            kept.append(" ".join(command_line(word.split())))
        elif place == 0:
            kept.append(text(word))
        elif match := _FLAG.fullmatch(word):
            flag, value = match["name"], match["value"]
            kept.append(flag if value is None else f"{flag}={argument(flag, value)}")
        elif flag == "-m":
            kept.append(text(word) if _MODULE.fullmatch(word) else REDACTED)
            flag = None
        elif flag is not None:
            kept.append(argument(flag, word))
        else:
            kept.append(_positional(word))
    return tuple(kept)


def _positional(word: str) -> str:
    if assigned := _ASSIGNMENT.fullmatch(word):
        return f"{assigned[1]}={variable(assigned[1], assigned[2]) or REDACTED}"
    harmless = word in _VERBS or _is_plain(word) or "/" in word or word.endswith((".py", ".gguf"))
    return text(word) if harmless else REDACTED


def variable(name: str, value: str, also: Sequence[str] = ()) -> str | None:
    """The value of an environment variable; None when even its presence is not ours to keep."""
    if not (name.startswith(ENGINE_VARIABLES) or name in also):
        return None
    return REDACTED if SECRETISH.search(name) else text(value)


def launch(given: Launch, also: Sequence[str] = ()) -> Launch:
    """How a member is started, as it may be shown."""
    env = {name: variable(name, value, also) for name, value in given.env.items()}
    return Launch(
        argv=command_line(given.argv),
        env={name: value for name, value in env.items() if value is not None},
        cwd=given.cwd,
    )


def deployment(given: Deployment, also: Sequence[str] = ()) -> Deployment:
    """A deployment whose launches may be shown."""
    members = tuple(
        msgspec.structs.replace(member, launch=launch(member.launch, also))
        if member.launch
        else member
        for member in given.members
    )
    return msgspec.structs.replace(given, members=members)


def observation(seen: Observation, also: Sequence[str] = ()) -> Observation | None:
    """An observation that may be kept, or None when nothing of it may."""
    value = seen.value
    if seen.name == v.ENVIRONMENT and seen.label:
        value = variable(seen.label, "" if value is None else str(value), also)
        if value is None:
            return None
        value = None if seen.value is None else value
    elif seen.name == v.SERVER_ARG:
        value = None if value is None else _argument_value(seen.label, value)
    elif seen.name == v.COMMAND_LINE:
        words = (value,) if isinstance(value, str) else value
        value = command_line(words) if isinstance(words, tuple) else None
    elif isinstance(value, str | tuple):
        value = texts(value)
    elif seen.missing is None and "://" not in seen.label:
        return seen
    return msgspec.structs.replace(
        seen,
        value=value,
        label=text(seen.label),
        missing=None if seen.missing is None else text(seen.missing),
    )


def _argument_value(name: str, value: Value) -> Value:
    if isinstance(value, str):
        return argument(name, value)
    if isinstance(value, tuple):
        return tuple(argument(name, each) for each in value)
    return value if argument(name, "1") == "1" else REDACTED


def texts(value: Value) -> Value:
    """A value with every text in it scrubbed."""
    if isinstance(value, str):
        return text(value)
    return tuple(map(text, value)) if isinstance(value, tuple) else value


def trait(given: Trait) -> Trait:
    """A trait that may be kept."""
    return msgspec.structs.replace(given, value=texts(given.value), because=text(given.because))


def change(given: Change, also: Sequence[str] = ()) -> Change:
    """A ledger row that may be kept: that something changed stays, its values by the same rules."""

    def shown(value: str | None) -> str | None:
        if value is None:
            return None
        if given.kind == "env":
            return variable(given.what, value, also) or REDACTED
        if given.kind == "flag" and given.what == "argv":  # the words before the first flag
            return " ".join(command_line(value.split()))
        if given.kind == "flag":
            return argument(given.what, value)
        return text(value)

    return msgspec.structs.replace(
        given,
        what=text(given.what),
        before=shown(given.before),
        after=shown(given.after),
        how_known=text(given.how_known),
    )


def event(given: Event) -> Event:
    """An event that may be kept."""
    data = {name: texts(value) for name, value in given.data.items()}
    return msgspec.structs.replace(given, text=text(given.text), data=data)


_Kept = TypeVar("_Kept", bound=Record)


def record(given: _Kept) -> _Kept:
    """Any other record with every text in it scrubbed; structure and numbers stay."""
    return msgspec.convert(_scrubbed(msgspec.to_builtins(given)), type(given))


def _scrubbed(value: object) -> object:
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return {name: _scrubbed(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_scrubbed(each) for each in value]
    return value
