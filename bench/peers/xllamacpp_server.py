"""xllamacpp's Server with llama-server's flags. It runs in its own environment, so it imports nothing else of this folder."""

from __future__ import annotations

import argparse
import threading

import xllamacpp


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", required=True)
    for flag in ("-t", "-c", "-np", "-b", "-ub", "--port"):
        parser.add_argument(flag, type=int)
    parser.add_argument("--host")
    parser.add_argument("-kvu", action="store_true")
    parser.add_argument("--no-webui", action="store_true")
    args = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = args.m
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.t
    params.n_ctx, params.n_parallel, params.kv_unified = args.c, args.np or 1, args.kvu
    params.n_batch, params.n_ubatch = args.b or params.n_batch, args.ub or params.n_ubatch
    params.hostnames, params.port, params.ui = [args.host], args.port, not args.no_webui
    params.n_gpu_layers = 0
    server = xllamacpp.Server(params)
    print(server.listening_address, xllamacpp.get_system_info(), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
