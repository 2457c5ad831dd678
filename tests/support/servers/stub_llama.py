"""llama-server's command line before a scripted server: `python -m tests.support.servers.stub_llama --port N …`.

Its answers take 0.2 s divided by `--parallel`, so that settings have a known effect.
"""

import argparse
from http.server import ThreadingHTTPServer

from tests.support.servers.stream_server import Handler, Script, ServerState

ANSWER_S = 0.2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parallel", type=int, default=4)
    args, _ = parser.parse_known_args()
    state = ServerState(has_info=False, owner="llamacpp", script=lambda body: Script(first_s=ANSWER_S / args.parallel))
    handler = type("LlamaHandler", (Handler,), {"state": state})
    ThreadingHTTPServer(("127.0.0.1", args.port), handler).serve_forever()


if __name__ == "__main__":
    main()
