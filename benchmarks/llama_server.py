"""llama.cpp's own HTTP server, as its wheel carries it.

`llama_server.py MODEL PORT SLOTS CONTEXT THREADS`, the context in tokens per slot. Continuous
batching, and the embedded engine's chunk of 256 tokens at most per step, so that a comparison is
one of scheduling and not of chunk sizes.
"""

import signal
import sys

from xllamacpp import CommonParams, Server


def main() -> None:
    """Serve until SIGTERM."""
    model = sys.argv[1]
    port, slots, context, threads = map(int, sys.argv[2:6])
    params = CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel = slots
    params.n_ctx = slots * context
    params.n_batch = params.n_ubatch = 256
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_gpu_layers = 0
    params.cont_batching = True
    params.kv_unified = False
    params.verbosity = -1
    server = Server(params)
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main()
