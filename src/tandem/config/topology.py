"""Members of a deployment: what each must say, and what no deployment can be.

For: turning member tables into records, and refusing impossible topologies.
Not for: types and unknown keys (`tables.py`).
"""

import ipaddress
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from urllib.parse import SplitResult, urlsplit

from tandem.config.faults import Fault, instead
from tandem.config.tables import MemberTable, checked
from tandem.records import Launch, Member, Role

ENGINES = {Role.PREFILL: ("sglang",), Role.DECODE: ("sglang",), Role.ROUTER: ("smg",)}
"""The adapters that speak to each role; the first is the default."""
LABEL = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*")
TOKENS = ("prometheus_token_file", "prometheus_token_variable")
SUPERVISORS = ("local", "none")


def members_of(raw: object, faults: list[Fault]) -> list[Member]:
    """The members as written, those that can be read; what is wrong with one is in `faults`."""
    if not isinstance(raw, list):
        faults.append(Fault("member", raw, "must be a list of tables", "write each as [[member]]"))
        return []
    members = []
    for number, entry in enumerate(raw):
        name = entry.get("name") if isinstance(entry, dict) else None
        key = f"member.{name if isinstance(name, str) and name else number}"
        table = checked(MemberTable, entry, key, faults)
        if table is not None:
            members.append(_member(table, key, faults))
    return members


def _member(table: MemberTable, key: str, faults: list[Fault]) -> Member:
    """The member as written: placeholders and relative folders are still in its launch."""
    role = Role(table.role)
    known = ENGINES[role]
    engine = known[0] if table.engine is None else table.engine
    if engine not in known:
        wrong = f"no adapter speaks to such a {role}"
        faults.append(Fault(f"{key}.engine", engine, wrong, instead(engine, known)))
    if table.supervisor not in SUPERVISORS:
        fix = instead(table.supervisor, SUPERVISORS)
        faults.append(Fault(f"{key}.supervisor", table.supervisor, "is not known", fix))
    launch = None
    if table.argv:
        launch = Launch(argv=table.argv, env=table.env, cwd=table.cwd or ".")
    faults += _launch_faults(table, key)
    faults += _label_faults(table, key)
    return Member(
        name=table.name,
        role=role,
        url=table.url.rstrip("/"),
        engine=engine,
        bootstrap_port=table.bootstrap_port,
        metrics_url=table.metrics_url,
        supervisor=table.supervisor,
        launch=launch,
        dp_size=table.dp_size,
        unit=_service(table.unit),
        container=table.container,
        metrics_labels=table.metrics_labels,
        log=table.log,
    )


def _service(unit: str | None) -> str | None:
    """The unit's whole name: without a type it is a service, as for systemctl."""
    return unit if unit is None or unit.endswith(".service") else f"{unit}.service"


def _launch_faults(table: MemberTable, key: str) -> Iterator[Fault]:
    yield from _unsayable(table, key)
    if table.unit and table.container:
        wrong = "a member is a unit or a container"
        yield Fault(f"{key}.container", table.container, wrong, "remove one of the two keys")
    for name in ("unit", "container"):
        if table.supervisor == "local" and getattr(table, name):
            fix = 'remove it, or remove supervisor = "local"'
            yield Fault(f"{key}.{name}", getattr(table, name), "Tandem itself starts this", fix)
    if table.supervisor == "local":
        if not table.argv:
            fix = 'add argv = ["{python}", "-m", ...]'
            yield Fault(f"{key}.argv", table.argv, "the local supervisor needs it", fix)
        return
    given = {"argv": table.argv, "env": table.env or None, "cwd": table.cwd}
    for name, value in given.items():
        if value is not None:
            shown = None if name == "env" else value
            fix = 'add supervisor = "local", or remove the key'
            yield Fault(f"{key}.{name}", shown, "nobody starts this member", fix)


def _unsayable(table: MemberTable, key: str) -> Iterator[Fault]:
    """What no process can be given: its words and variables end at a zero, names at `=`."""
    texts = [("argv", word) for word in table.argv or ()]
    texts += [(f"env.{name}", value) for name, value in table.env.items()]
    texts += [("cwd", table.cwd or ""), ("log", table.log or "")]
    for where, text in texts:
        if "\0" in text:
            yield Fault(f"{key}.{where}", text, "holds a zero character", "remove it")
    for name in table.env:
        if not name or "=" in name or "\0" in name:
            yield Fault(f"{key}.env", name, "is no name of a variable", "use letters and `_`")


def prometheus_faults(watch: Mapping[str, object]) -> Iterator[Fault]:
    """What is wrong with `[watch] prometheus` and its token."""
    url = str(watch.get("prometheus") or "")
    given = [name for name in TOKENS if watch.get(name)]
    if not url:
        for name in given:
            yield Fault(f"watch.{name}", None, "there is no Prometheus to show it to", "remove it")
        return
    split = _split(url)
    example = "write it as http://127.0.0.1:9090"
    if split.scheme not in ("http", "https") or not split.hostname:
        yield Fault("watch.prometheus", url, "must be http(s)://HOST:PORT", example)
    elif "@" in split.netloc or split.query:
        wrong = "must hold no credentials and no query"
        yield Fault("watch.prometheus", None, wrong, "give a prometheus_token_file")
    if len(given) > 1:
        yield Fault(f"watch.{given[1]}", None, f"{given[0]} is given too", "keep one of them")


def _label_faults(table: MemberTable, key: str) -> Iterator[Fault]:
    for name in table.metrics_labels:
        if not LABEL.fullmatch(name):
            wrong = "is no label of Prometheus"
            yield Fault(f"{key}.metrics_labels", name, wrong, "use letters, digits and `_`")


def topology_faults(members: list[Member], *, complete: bool) -> Iterator[Fault]:
    """What makes a deployment impossible; `complete` says that no member was left out."""
    yield from _name_faults(members)
    for member in members:
        yield from _role_faults(member)
        yield from _url_faults(member)
    yield from _endpoint_faults(members)
    yield from _matcher_faults(members)
    for role in (Role.PREFILL, Role.DECODE) if complete else ():
        if not any(member.role == role for member in members):
            fix = f'add a [[member]] with role = "{role}"'
            yield Fault("member", None, f"the deployment has no {role}", fix)


def _name_faults(members: list[Member]) -> Iterator[Fault]:
    seen: set[str] = set()
    for member in members:
        if member.name in seen:
            yield Fault(
                f"member.{member.name}.name",
                member.name,
                "two members have this name",
                "give each its own",
            )
        seen.add(member.name)


def _role_faults(member: Member) -> Iterator[Fault]:
    key = f"member.{member.name}.bootstrap_port"
    if member.role == Role.PREFILL and member.bootstrap_port is None:
        fix = "add the port of its --disaggregation-bootstrap-port, 8998 unless set"
        yield Fault(key, None, "a prefill has a bootstrap server", fix)
    if member.role != Role.PREFILL and member.bootstrap_port is not None:
        wrong = f"a {member.role} has no bootstrap server"
        yield Fault(key, member.bootstrap_port, wrong, "remove the key")
    if member.role == Role.ROUTER and member.dp_size != 1:
        key = f"member.{member.name}.dp_size"
        yield Fault(key, member.dp_size, "a router has no data-parallel ranks", "remove the key")


def _url_faults(member: Member) -> Iterator[Fault]:
    for name, url in (("url", member.url), ("metrics_url", member.metrics_url)):
        if url is None:
            continue
        key = f"member.{member.name}.{name}"
        split = _split(url)
        example = "write it as http://127.0.0.1:30000"
        if split.scheme not in ("http", "https") or _port(split) is None or not split.hostname:
            yield Fault(key, url, "must be http(s)://HOST:PORT", example)
        elif "@" in split.netloc or split.query:
            yield Fault(key, None, "must hold no credentials and no query", example)
        elif name == "url" and split.path:
            yield Fault(key, url, "must be the root of the server", "remove the path")
        elif member.supervisor == "local" and not _is_loopback(split.hostname):
            yield Fault(
                key,
                url,
                "what Tandem starts itself listens on loopback only",
                "use 127.0.0.1, or a supervisor of that host",
            )


def _matcher_faults(members: list[Member]) -> Iterator[Fault]:
    """Series that are two members' are nobody's."""
    users: dict[tuple[tuple[str, str], ...], str] = {}
    for member in members:
        matchers = tuple(sorted(member.metrics_labels.items()))
        if not matchers:
            continue
        first = users.setdefault(matchers, member.name)
        if first != member.name:
            key = f"member.{member.name}.metrics_labels"
            wrong = f"these are already those of {first}"
            yield Fault(key, None, wrong, "add a label that tells them apart")


def _endpoint_faults(members: list[Member]) -> Iterator[Fault]:
    """Two servers of one deployment cannot share a host and port."""
    users: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
    for member in members:
        url = _split(member.url)
        own = {("url", _host(url), _port(url))}
        metrics = _split(member.metrics_url or "")
        if metrics.netloc and metrics.netloc != url.netloc:
            own.add(("metrics_url", _host(metrics), _port(metrics)))
        own.add(("bootstrap_port", _host(url), member.bootstrap_port))
        for key, host, port in sorted(own, key=lambda each: each[0]):
            if port is not None:
                users[host, port].append((f"member.{member.name}.{key}", port))
    for entries in users.values():
        for key, port in entries[1:]:
            yield Fault(
                key, port, f"this port is already that of {entries[0][0]}", "give each its own"
            )


def _split(url: str) -> SplitResult:
    """The parts of a URL; of what cannot be one, nothing."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def _host(url: SplitResult) -> str:
    host = url.hostname or ""
    return "127.0.0.1" if host == "localhost" else host


def _port(url: SplitResult) -> int | None:
    try:
        return url.port
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
