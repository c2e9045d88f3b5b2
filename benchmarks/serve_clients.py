"""Clients of `jaxtrain serve` at once, of which a third hang up: lost or mixed answers, memory.

`python benchmarks/serve_clients.py MODEL`, on any device. Every client asks for the greedy answer
to a question of its own, half of them as a stream. A third hang up: at once, or after the first
piece of a stream. Then the questions of those that stayed are asked again one at a time, and every
answer must be the one from the crowd. Rounds repeat this in the same server, whose memory must not
grow from one to the next.
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from harness import log, make_parser

REPO = Path(__file__).parents[1]
PATH = "/v1/chat/completions"


def main() -> None:
    """Run the rounds and print their table; exit with 1 if an answer was lost or mixed."""
    parser = make_parser(__doc__)
    parser.add_argument("model", help="as `jaxtrain serve` names it")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8, help="of an answer")
    parser.add_argument("--alone", type=int, default=200, help="answers asked again, at most")
    parser.add_argument("--max-model-len", type=int, default=256)
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [args.model, "--port", str(port), "--max-model-len", str(args.max_model_len)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO), str(REPO / "kernels")])}
    server = subprocess.Popen(
        [sys.executable, "-m", "jaxtrain.main", "serve", *words],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    log(server.stdout.readline().strip())
    wrong = 0
    try:
        ask(port, question(0, 0), args.tokens)
        log(f"warm: {read_memory(server.pid):.0f} MiB")
        for number in range(args.rounds):
            wrong += run_round(port, number, args)
            log(f"round {number + 1}: the server holds {read_memory(server.pid):.0f} MiB")
        running = read_metric(port, "vllm:num_requests_running")
        log(f"requests still running: {running:.0f}")
        wrong += running != 0 or server.poll() is not None
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
    sys.exit(1 if wrong else 0)


def question(number: int, client: int) -> str:
    """Return what a client asks."""
    return f"Question {number}-{client}: how much is {client} + {3 * client + number}?"


def run_round(port: int, number: int, args) -> int:
    """Run all clients at once; return how many answers were lost, or differ from those alone."""
    answers: dict[int, str] = {}
    failures: Counter[str] = Counter()

    def play(client: int) -> None:
        text, streams = question(number, client), client % 2 == 0
        try:
            if client % 3 == 0:
                hang_up(port, text, args.tokens, streams)
            else:
                answers[client] = ask(port, text, args.tokens, streams)
        except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
            failures[f"{type(error).__name__}: {error}"] += 1

    start = time.monotonic()
    threads = [threading.Thread(target=play, args=(client,)) for client in range(args.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - start
    staying = [client for client in range(args.clients) if client % 3]
    checked = staying[: args.alone]
    mixed = [
        client
        for client in checked
        if client in answers and ask(port, question(number, client), args.tokens) != answers[client]
    ]
    lost = len(staying) - len(answers)
    log(
        f"round {number + 1}: {len(answers)} of {len(staying)} answers in {seconds:.1f} s beside"
        f" {args.clients - len(staying)} that hung up; {lost} lost; of {len(checked)} asked again"
        f" alone {len(mixed)} differ"
    )
    for failure, count in failures.items():
        log(f"  {count} x {failure}")
    return lost + len(mixed) + sum(failures.values())


def send(port: int, text: str, tokens: int, streams: bool) -> http.client.HTTPConnection:
    """Send a request; return its connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1200)
    messages = [{"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "stream": streams}
    connection.request("POST", PATH, json.dumps(body))
    return connection


def ask(port: int, text: str, tokens: int, streams: bool = False) -> str:
    """Return the answer to a question; ValueError for an error in its place."""
    connection = send(port, text, tokens, streams)
    try:
        response = connection.getresponse()
        raw = response.read().decode()
    finally:
        connection.close()
    if response.status != 200:
        raise ValueError(f"status {response.status}: {raw[:200]}")
    if not streams:
        return json.loads(raw)["choices"][0]["message"]["content"]
    *events, last, _ = raw.split("\n\n")
    if last != "data: [DONE]":
        raise ValueError(f"a stream ends with {last[:200]}")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def hang_up(port: int, text: str, tokens: int, streams: bool) -> None:
    """Send a request and close the connection: at once, or of a stream after its first piece."""
    connection = send(port, text, tokens, streams)
    if streams:
        connection.getresponse().read1(1)
    connection.close()


def read_memory(pid: int) -> float:
    """Return the memory that a process holds, in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def read_metric(port: int, name: str) -> float:
    """Return a number of /metrics."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    (value,) = [line.split()[1] for line in lines if line.startswith(f"{name} ")]
    return float(value)


if __name__ == "__main__":
    main()
