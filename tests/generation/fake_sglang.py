"""A scripted SGLang server in a thread, by its documented protocol: without a model.

It draws 100 + i at place i of a row, STOP at the place `length`, log-prob -0.5 each. An update of
weights ends the requests under way (finish_reason abort), as abort_all_requests says.
"""

import base64
import io
import json
import pickle
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

STOP = 3


class Unpickler(pickle.Unpickler):
    """SGLang's: modules of a list, and of the builtins next to nothing."""

    def find_class(self, module, name):
        assert module in ("torch", "functools"), f"SGLang refuses {module}.{name}"
        return super().find_class(module, name)


class FakeSglang:
    def __init__(self):
        self.asked, self.log, self.script = [], [], []
        self.version, self.success, self.length = "default", True, 6
        self.updates, self.hold_at, self.held = 0, None, 0
        self.ranks, self.tensors = 1, []
        """hold_at: with so many updates, draw two tokens and no more until the next one. held:
        requests that have come to this."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                if self.path == "/get_model_info":
                    info = {"model_path": "base", "is_generation": True}
                    return self.reply(200, {**info, "weight_version": fake.version})
                if self.path == "/get_server_info":
                    return self.reply(200, {"tp_size": fake.ranks})
                if self.path == "/v1/models":
                    entry = {"id": "base", "root": "base", "parent": None, "max_model_len": 512}
                    return self.reply(200, {"object": "list", "data": [entry]})
                self.reply(200 if self.path == "/health" else 404, {})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path.startswith("/update_weights_from_"):
                    fake.log.append(body)
                    fake.updates += 1
                    if fake.success:
                        fake.version = body.get("weight_version", fake.version)
                    if parts := body.pop("serialized_named_tensors", None):
                        assert len(set(parts)) == 1 and len(parts) == fake.ranks
                        raw = io.BytesIO(base64.b64decode(parts[0], validate=True))
                        fake.tensors += Unpickler(raw).load()
                    message = "Succeeded to update model weights." if fake.success else "no folder"
                    status = 200 if fake.success else 400
                    return self.reply(status, {"success": fake.success, "message": message})
                if self.path != "/generate":
                    return self.reply(404, {"detail": "Not Found"})
                self.reply(*fake.generate(body))

            def reply(self, status, answer):
                raw = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def generate(self, body):
        params = body["sampling_params"]
        if params["top_k"] != 1:  # that is the look at a server before the run
            self.asked.append(body)
            if self.script:
                return self.script.pop(0), {"error": {"message": "out of luck"}}
        updates, ids = self.updates, []
        reason = {"type": "length", "length": params["max_new_tokens"]}
        while len(ids) < params["max_new_tokens"]:
            if self.updates != updates:
                reason = {"type": "abort", "message": "Abort by weights"}
                break
            position = len(body["input_ids"]) + len(ids)
            ids.append(STOP if position == self.length - 1 else 100 + position)
            if ids[-1] in params["stop_token_ids"]:
                reason = {"type": "stop", "matched": ids[-1]}
                break
            self.held += self.hold_at == self.updates and len(ids) == 2
            while self.hold_at == self.updates and len(ids) == 2:
                time.sleep(0.01)
        meta = {
            "id": "0",
            "finish_reason": reason,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "weight_version": self.version,
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        if body["top_logprobs_num"]:
            best = [[[-0.5, token, None], [-1.5, 7, None]] for token in ids]
            meta["output_top_logprobs"] = [b[: body["top_logprobs_num"]] for b in best]
        return 200, {"text": "", "output_ids": ids, "meta_info": meta}

    def close(self):
        self.http.shutdown()
        self.http.server_close()
