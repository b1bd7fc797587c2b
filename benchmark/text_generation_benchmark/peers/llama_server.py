"""Runs llama.cpp's server as the package xllamacpp has compiled it: `llama_server.py MODEL PORT STREAMS CONTEXT`.

The settings are the server's own defaults, all cores, and as many slots as there are streams, which share one cache of
CONTEXT tokens for each of them. Runs in llama.cpp's virtual environment.
"""

import os
import signal
import sys

import xllamacpp  # type: ignore[import-not-found]


def main(model: str, port: str, streams: str, context: str) -> None:
    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.model_alias = model, {"peer"}
    parameters.hostnames, parameters.port = ["127.0.0.1"], int(port)
    parameters.n_parallel, parameters.n_ctx = int(streams), int(streams) * int(context)
    parameters.kv_unified = True
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = os.cpu_count()
    server = xllamacpp.Server(parameters)
    print("listening at", server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
