"""A throw-away deployment to rehearse on: its folder, its `tandem.toml`, its own processes.

For: what every drill and the demo need before anything is injected. The loop under test is a
separate `tandem watch` process that is given this folder's `tandem.toml` and nothing else.
Not for: injecting (`injections.py`) or scoring (`score.py`).
"""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tandem.errors import WorldError

COMMAND_TIMEOUT_S = 90.0
SERVED_NAME = "rehearsal"
PORTS = range(15000, 30000)

CONFIG = """\
# A rehearsal deployment: one prefill, one decode, the router, on this machine only.
[deployment]
name = "{name}"

[[member]]
name = "prefill-0"
role = "prefill"
url = "http://127.0.0.1:{prefill_port}"
bootstrap_port = {bootstrap_port}
supervisor = "local"
argv = {prefill_argv}

[[member]]
name = "decode-0"
role = "decode"
url = "http://127.0.0.1:{decode_port}"
supervisor = "local"
argv = {decode_argv}
env = {decode_env}

[[member]]
name = "router"
role = "router"
engine = "smg"
url = "http://127.0.0.1:{router_port}"
metrics_url = "http://127.0.0.1:{router_metrics_port}/metrics"
supervisor = "local"
argv = {router_argv}

[policy]
mode = "auto"
auto_scopes = ["pair"]
drain_s = 1.0

[verify]
sessions = {sessions}
concurrency = 8
"""


def free_ports(count: int) -> list[int]:
    """Loopback ports nobody listens on now; all held at once so that they differ.

    Below the range from which clients get theirs: while a member restarts, any connection of the
    machine might otherwise be given its port.
    """
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in secrets.SystemRandom().sample(PORTS, len(PORTS)):
            if len(found) == count:
                break
            held = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                held.bind(("127.0.0.1", port))
                found.append(port)
    return found


@dataclass
class Workspace:
    """One rehearsal deployment in `root`; the decode's flags and variables may change."""

    root: Path
    model: str = "smollm2"
    sessions: int = 30
    max_inflight: int = 8
    context_length: int = 1024
    decode_flags: dict[str, str | None] = field(
        default_factory=lambda: {"--disable-overlap-schedule": None, "--cuda-graph-max-bs": "64"}
    )
    decode_env: dict[str, str] = field(default_factory=dict)
    ports: list[int] = field(default_factory=lambda: free_ports(5))
    _watch: asyncio.subprocess.Process | None = None

    @property
    def router_url(self) -> str:
        """Where clients send their requests."""
        return f"http://127.0.0.1:{self.ports[3]}"

    @property
    def prefill_url(self) -> str:
        """The prefill's own address, for its switchboard."""
        return f"http://127.0.0.1:{self.ports[0]}"

    @property
    def config(self) -> Path:
        """The workspace's `tandem.toml`."""
        return self.root / "tandem.toml"

    def create(self) -> None:
        """Make the folder, its git repository and its configuration."""
        self.root.mkdir(parents=True, exist_ok=True)
        if not (self.root / ".git").exists():
            self._git("init", "--quiet")
        (self.root / ".gitignore").write_text(".tandem/\nclient.jsonl\nswitchboard-*.json\n")
        self.save()
        self._git("add", ".gitignore", "tandem.toml")
        self._git("commit", "--quiet", "--allow-empty", "-m", "deployment: begin")

    def save(self) -> None:
        """Write `tandem.toml` as the flags and variables stand now."""
        prefill, bootstrap, decode, router, metrics = self.ports
        self.config.write_text(
            CONFIG.format(
                name="rehearsal",
                prefill_port=prefill,
                bootstrap_port=bootstrap,
                decode_port=decode,
                router_port=router,
                router_metrics_port=metrics,
                prefill_argv=json.dumps(self._prefill_argv()),
                decode_argv=json.dumps(self._decode_argv()),
                decode_env=_inline_table(self.decode_env),
                router_argv=json.dumps(self._router_argv()),
                sessions=self.sessions,
            )
        )

    def _engine_argv(self, role: str, port: int) -> list[str]:
        argv = ["{python}", "-m", "tandem_engine", role, "--model", self.model]
        argv += ["--served-model-name", SERVED_NAME]
        argv += ["--context-length", str(self.context_length)]
        switchboard = self.root / f"switchboard-{role}.json"
        return [*argv, "--port", str(port), "--enable-faults", str(switchboard)]

    def _prefill_argv(self) -> list[str]:
        argv = self._engine_argv("prefill", self.ports[0])
        argv += ["--disaggregation-bootstrap-port", str(self.ports[1])]
        argv += ["--disaggregation-max-inflight", str(self.max_inflight)]
        return [*argv, "--disable-overlap-schedule"]

    def _decode_argv(self) -> list[str]:
        argv = [*self._engine_argv("decode", self.ports[2]), "--drain-timeout-s", "0"]
        for flag, value in self.decode_flags.items():
            argv += [flag] if value is None else [flag, value]
        return argv

    def _router_argv(self) -> list[str]:
        smg = Path(sys.executable).with_name("smg")
        prefill, bootstrap, decode, router, metrics = (str(port) for port in self.ports)
        local = "http://127.0.0.1:"
        argv = [str(smg), "launch", "--pd-disaggregation", "--policy", "random"]
        argv += ["--prefill", local + prefill, bootstrap, "--decode", local + decode]
        argv += ["--host", "127.0.0.1", "--port", router]
        argv += ["--prometheus-host", "127.0.0.1", "--prometheus-port", metrics]
        argv += ["--health-check-interval-secs", "1", "--health-success-threshold", "1"]
        argv += ["--worker-startup-check-interval", "1", "--shutdown-grace-period-secs", "1"]
        return [*argv, "--retry-max-retries", "1", "--disable-circuit-breaker"]

    async def tandem(self, *words: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Run one Tandem command in the workspace; its output, or `WorldError` when it fails."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tandem",
            *words,
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            # Ctrl-C is ours to pass on, once: a second one would cut its putting away short.
            start_new_session=True,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), timeout_s)
        except asyncio.CancelledError:
            # Left alone it would go on, and its lock would keep `down` from putting things away.
            await _interrupt(process)
            raise
        except TimeoutError:
            process.kill()
            await process.wait()
            raise WorldError(
                f"`tandem {' '.join(words)}` did not end within {timeout_s:.0f} s.",
                next_step=f"Look at the logs in {self.root / '.tandem' / 'logs'}.",
            ) from None
        text = output.decode(errors="replace").strip()
        if process.returncode != 0:
            last = text.splitlines()[-1].removeprefix("tandem: ") if text else "no output"
            raise WorldError(
                f"`tandem {' '.join(words)}` ended with status {process.returncode}: {last}",
                next_step=f"Look at the logs in {self.root / '.tandem' / 'logs'}.",
            )
        return text

    async def start_watch(self, hunch: str | None) -> None:
        """Start the loop under test as a process of its own."""
        log = (self.root / "watch.log").open("ab")
        words = ["watch"] + (["--hunch", hunch] if hunch else [])
        self._watch = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tandem",
            *words,
            cwd=self.root,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        log.close()

    def watch_alive(self) -> bool:
        """Whether the loop under test still runs."""
        return self._watch is not None and self._watch.returncode is None

    async def stop_watch(self) -> None:
        """Ask the loop to end as a person would, then insist."""
        if self._watch is not None:
            await _interrupt(self._watch)

    async def close(self) -> None:
        """End the watch and take the deployment down, whatever state they are in.

        Raises `WorldError` when something is left, after a second try.
        """
        await self.stop_watch()
        try:
            await self.tandem("down")
        except WorldError:
            await self.tandem("down")

    def _git(self, *words: str) -> None:
        identity = ["-c", "user.name=Tandem", "-c", "user.email=tandem@localhost"]
        try:
            subprocess.run(
                ["git", *identity, *words],
                cwd=self.root,
                check=True,
                timeout=20,
                capture_output=True,
                env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
            )
        except FileNotFoundError:
            raise WorldError(
                "git is not installed, and a rehearsal commits its report.",
                next_step="Install git (`apt-get install git`) and run this again.",
            ) from None
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise WorldError(
                f"git {words[0]} failed in {self.root}: {error}.",
                next_step="Choose another folder with --workspace.",
            ) from None


async def _interrupt(process: asyncio.subprocess.Process, grace_s: float = 15.0) -> None:
    """End a process as Ctrl-C does, and insist after `grace_s`."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    try:
        await asyncio.wait_for(process.wait(), grace_s)
    except TimeoutError:
        process.kill()
        await process.wait()


def _inline_table(values: dict[str, str]) -> str:
    pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in values.items())
    return "{ " + pairs + " }" if pairs else "{}"
