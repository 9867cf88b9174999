"""A stand-in for the decoder's own `kernarc.cli serve`: the same command line, a known speed, planted faults.

Output: after an id t comes (7 t + 3) mod 97. One event a step of num_speculative_tokens + 1 ids, --step-ms apart.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("model")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--device")
    parser.add_argument("--max-context", type=int)
    parser.add_argument("--num-speculative-tokens", type=int, default=0)
    parser.add_argument("--step-ms", type=float, default=1.0)
    parser.add_argument("--start-s", type=float, default=0.0)
    parser.add_argument("--exit-at-start", type=int)
    parser.add_argument("--die-at-request", type=int, default=-1)
    parser.add_argument("--die-once", type=Path, help="die only where this file does not exist yet")
    parser.add_argument("--cached-prompt-tokens", type=int, default=0, help="counted at /metrics only")
    parser.add_argument("--unseen-steps", type=int, default=0, help="counted at /metrics beyond the events sent")
    parser.add_argument("--stop-early", type=int, default=0)
    parser.add_argument("--wrong-token-at", type=int, default=-1, help="output position of one wrong id")
    parser.add_argument("--prompt-tokens-off-by", type=int, default=0)
    parser.add_argument("--stray-child", action="store_true", help="start a process in a session of its own")
    parser.add_argument("--busy-when-idle", action="store_true", help="keep a core busy beside what is asked for")
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--marker")
    return parser.parse_args()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


ARGS = parse()
STATE = {"requests": 0, "hits": 0, "drafts": 0}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        return

    def do_GET(self) -> None:
        drafts, hits = STATE["drafts"], STATE["hits"]
        body = {
            "/v1/models": json.dumps({"data": [{"id": "fake"}]}),
            "/metrics": f'# HELP x y\nkernarc_drafts_total {drafts}\nfake:prefix_cache_hits_total{{a="b"}} {hits}\n',
        }.get(self.path, "")
        self.send_response(200 if body else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        STATE["hits"] += ARGS.cached_prompt_tokens
        fatal = STATE["requests"] == ARGS.die_at_request and not (ARGS.die_once and ARGS.die_once.exists())
        STATE["requests"] += 1
        last, sent, total = request["prompt"][-1], 0, request["max_tokens"] - ARGS.stop_early
        deadline = time.perf_counter()
        while sent < total:
            ids = []
            while len(ids) <= (ARGS.num_speculative_tokens if sent else 0) and sent + len(ids) < total:
                last = (7 * last + 3 + (sent + len(ids) == ARGS.wrong_token_at)) % 97
                ids.append(last)
            STATE["drafts"] += 1 if sent else ARGS.unseen_steps
            sent += len(ids)
            deadline += ARGS.step_ms / 1000
            time.sleep(max(0.0, deadline - time.perf_counter()))
            if fatal and sent > total // 2:
                if ARGS.die_once:
                    ARGS.die_once.touch()
                say("fatal: planted fault")
                os._exit(42)
            finish = "length" if sent == total else None
            self._event({"choices": [{"index": 0, "text": "x" * len(ids), "token_ids": ids, "finish_reason": finish}]})
        usage = {
            "prompt_tokens": len(request["prompt"]) + ARGS.prompt_tokens_off_by,
            "completion_tokens": total,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, content: object) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())
        self.wfile.flush()


def main() -> None:
    if ARGS.ignore_sigterm:
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if ARGS.stray_child:
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)", f"{ARGS.marker}-stray"], start_new_session=True
        )
    if ARGS.busy_when_idle:
        spin = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
        subprocess.Popen([sys.executable, "-c", spin])
    say("loading")
    if ARGS.exit_at_start is not None:
        say("error: no such weights")
        sys.exit(ARGS.exit_at_start)
    time.sleep(ARGS.start_s)
    ThreadingHTTPServer((ARGS.host, ARGS.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
