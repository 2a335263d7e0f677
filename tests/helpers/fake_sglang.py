"""A program that takes the command line of an SGLang server, for the tests of its life and end.

`python -I fake_sglang.py BEHAVIOUR [arguments of SGLang]`. It prints its arguments, keys included,
as SGLang does; starts a child that leaves its session; and answers /health. BEHAVIOUR is one of
serve, usage, crash, mute.
"""

import http.server
import json
import os
import signal
import subprocess
import sys
from pathlib import Path


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    behaviour, arguments = sys.argv[1], sys.argv[2:]
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    config = json.loads(Path(options["--config"]).read_text()) if "--config" in options else {}
    orphan = subprocess.Popen(["sleep", "600"], start_new_session=True)
    facts = {
        "options": options,
        "config": config,
        "pids": [os.getpid(), orphan.pid],
        "folder": os.environ["TMPDIR"],
        "variables": sorted(name for name in os.environ if name.startswith("SGLANG_")),
    }
    say(json.dumps(facts))
    if behaviour == "usage":
        say("unrecognized arguments: --no-such")
        sys.exit(2)
    if behaviour == "crash":
        say("out of memory")
        os.kill(os.getpid(), signal.SIGSEGV)
    if behaviour == "mute":
        signal.pause()
    address = (options["--host"], int(options["--port"]))
    http.server.ThreadingHTTPServer(address, Handler).serve_forever()


if __name__ == "__main__":
    main()
