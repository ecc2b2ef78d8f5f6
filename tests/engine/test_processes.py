"""Workers as processes: exit statuses, signals, and the real model's tokens through a real pair."""

import asyncio
import resource
import signal
import socket
import subprocess
import sys

import aiohttp
import pytest

from engine.processes import end, free_port, ready, spawn, terminated
from tandem_engine.loading import load_model
from tandem_engine.model import Feed

PROMPT = "The capital of France is Paris. The capital of Italy is"


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "status", "said"),
        [
            (["prefill"], 3, "--model-path"),
            (["prefill", "--model", "toy", "--port", "99999"], 3, "--port"),
            (["decode", "--model", "toy", "--chunked-prefill-size", "512"], 3, "256"),
            (["decode", "--model", "toy", "--nonsense"], 3, "--nonsense"),
            (["router"], 3, "'router'"),
            (["decode", "--model", "/nowhere/model.gguf", "--port", "0"], 4, "/nowhere/model.gguf"),
        ],
    )
    async def test_a_bad_command_line_is_one_sentence(self, arguments, status, said):
        """The exit status names the kind of problem, stderr the flag or the file."""
        code, err = await end(await spawn(*arguments))

        last = err.strip().splitlines()[-1]
        assert (status, True) == (code, said in last)
        assert "Traceback" not in err

    @pytest.mark.parametrize("package", ["uvicorn", "starlette", "numpy"])
    def test_a_missing_package_is_one_sentence(self, package):
        """A worker without the engine's packages names the one it misses, and what to run."""
        without = (
            f"import sys; sys.modules[{package!r}] = None; from tandem_engine.__main__ import main;"
            "sys.exit(main(['prefill', '--model', 'toy', '--port', '0']))"
        )
        ended = subprocess.run(
            [sys.executable, "-c", without], capture_output=True, text=True, timeout=15, check=False
        )

        assert ended.returncode == 4
        assert ended.stderr == (
            f"tandem_engine: the package {package} is not installed; "
            "run: pip install 'tandem-pd[engine]'\n"
        )

    async def test_a_bad_timeout_variable_is_named(self):
        """A timeout that is no number is refused by the name of its variable."""
        variable = "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"
        code, err = await end(await spawn("decode", "--model", "toy", **{variable: "soon"}))

        assert (code, variable in err) == (3, True)

    async def test_a_port_in_use_is_one_sentence(self):
        """The holder of a port is left alone, and the worker says which port it wanted."""
        with socket.create_server(("127.0.0.1", 0)) as holder:
            port = str(holder.getsockname()[1])
            code, err = await end(await spawn("decode", "--model", "toy", "--port", port))

        assert (code, port in err, "Traceback" in err) == (4, True, False)

    async def test_unknown_switches_are_refused_at_start(self, tmp_path):
        """A faults file that says something unknown stops the worker before it serves."""
        path = tmp_path / "faults.json"
        path.write_text('{"peer_memory": "amnesia"}')
        code, err = await end(
            await spawn("prefill", "--model", "toy", "--enable-faults", str(path))
        )

        assert (code, "amnesia" in err) == (3, True)


class TestLife:
    async def test_many_connections_are_no_storm(self):
        """A low soft limit of open files is raised: connections that stay open stop nobody."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        port = free_port()
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        try:
            process = await spawn("decode", "--model", "toy", "--port", str(port))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        async with terminated(process), aiohttp.ClientSession() as http:
            await ready(http, f"http://127.0.0.1:{port}/health")
            left = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
            async with http.get(f"http://127.0.0.1:{port}/health") as reply:
                assert reply.status == 200
            for _, writer in left:
                writer.transport.abort()
            process.send_signal(signal.SIGTERM)
            code, err = await end(process)

        assert (code, "Too many open files" in err) == (0, False)

    async def test_sigterm_ends_with_status_0_and_leaves_no_memory(self):
        """A decode that is told to end closes its segment and exits 0."""
        port = free_port()
        process = await spawn("decode", "--model", "toy", "--port", str(port))
        async with terminated(process), aiohttp.ClientSession() as http:
            await ready(http, f"http://127.0.0.1:{port}/health")
            process.send_signal(signal.SIGTERM)
            code, err = await end(process)

        assert (code, "Traceback" in err) == (0, False)

    async def test_the_start_line_shows_the_arguments(self):
        """`server_args=ServerArgs(...)` comes first, in SGLang's form."""
        process = await spawn(
            "decode", "--model", "toy", "--port", "0", "--cuda-graph-max-bs", "96"
        )
        async with terminated(process):
            line = (await asyncio.wait_for(process.stderr.readline(), 20)).decode()

        assert line[0] == "["
        assert "] server_args=ServerArgs(disaggregation_mode='decode'" in line
        assert "cuda_graph_max_bs=96" in line

    async def test_faults_lists_every_switch(self):
        """`faults` says what exists and how each looks from outside."""
        process = await spawn("faults")
        out, _ = await process.communicate()

        assert all(word in out.decode() for word in ("peer_memory", "stale", "orphaned", "leases"))


@pytest.mark.needs("model")
@pytest.mark.timeout(60)
class TestRealModel:
    @pytest.mark.parametrize("transport", ["shm", "tcp"])
    async def test_tokens_are_those_of_one_process(self, transport):
        """Greedy output through a real pair is token-identical, streamed or not."""
        model = load_model("smollm2", context_length=512, sequences_max=2)
        prompt = model.tokenize(PROMPT * 30, special=True)[:300]
        said, fed = [], prompt
        while len(said) < 12:
            for start in range(0, len(fed), 256):
                row = model.step([Feed(0, fed[start : start + 256], model.length(0))])[0][-1]
            said.append(int(row.argmax()))
            fed = said[-1:]
        model.close()
        port, bootstrap, other = free_port(), free_port(), free_port()
        sizes = ["--model", "smollm2", "--context-length", "512", "--max-running-requests", "2"]
        prefill = await spawn(
            "prefill",
            *sizes,
            "--port",
            str(port),
            "--disaggregation-bootstrap-port",
            str(bootstrap),
        )
        decode = await spawn(
            "decode", *sizes, "--port", str(other), "--disaggregation-transfer-backend", transport
        )
        params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
        answers = []
        async with terminated(prefill, decode), aiohttp.ClientSession() as http:
            for one in (port, other):
                await ready(http, f"http://127.0.0.1:{one}/health")
            for room in (1, 2):
                body = {
                    "input_ids": prompt,
                    "sampling_params": params,
                    "bootstrap_host": "127.0.0.1",
                    "bootstrap_port": bootstrap,
                    "bootstrap_room": room,
                }

                async def ask(port, body=body):
                    async with http.post(f"http://127.0.0.1:{port}/generate", json=body) as reply:
                        return await reply.json()

                answers += [await asyncio.gather(ask(port), ask(other))]

        # The second prompt reuses the first one's prefix up to its last token: other chunk
        # boundaries, so only its first answer is promised to be equal.
        assert said == answers[0][1]["output_ids"]
        assert answers[0][0]["output_ids"] == said[:1]
        assert answers[1][1]["meta_info"]["prompt_tokens"] == len(prompt)
