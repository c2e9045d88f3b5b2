"""The part of the Hugging Face Hub's HTTP that pushes go through, on loopback."""

import http.server
import json
import re
import threading
from typing import Any

TOKEN = "hf_secret"


class Server(http.server.ThreadingHTTPServer):
    """Keeps what is pushed: `files` {(branch, path): bytes}, `commits` [(branch, message)].

    faults: [(part of a path, what happens when it is asked next)]: a status, "cut" (half of
    the body is read, then the line is dead), "silent" (no answer, until `stop`).
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, bool] = {}
        self.branches = {"main"}
        self.blobs: dict[str, bytes] = {}
        self.files: dict[tuple[str, str], bytes] = {}
        self.commits: list[tuple[str, str]] = []
        self.faults: list[tuple[str, Any]] = []
        self.asked: list[str] = []
        self.stop = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.stop.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *args):
        pass


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *args):
        pass

    def answer(self, status: int, body: Any = None):
        raw = json.dumps({} if body is None else body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def handle_any(self):
        hub, length = self.server, int(self.headers.get("Content-Length") or 0)
        hub.asked.append(f"{self.command} {self.path}")
        fault = next((f for f in hub.faults if f[0] in self.path), None)
        if fault is not None:
            hub.faults.remove(fault)
        if fault is not None and fault[1] == "cut":
            self.rfile.read(length // 2)
            self.close_connection = True
            self.connection.shutdown(2)
            return
        if "chunked" in (self.headers.get("Transfer-Encoding") or ""):
            raw = b""
            while size := int(self.rfile.readline(), 16):
                raw += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            raw = self.rfile.read(length)
        if fault is not None and fault[1] == "silent":
            hub.stop.wait()
            return
        if fault is not None:
            self.answer(fault[1], {"error": "no"})
            return
        if "/lfs/" not in self.path and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer(401, {"error": "Invalid user token."})
            return
        self.answer(*self.respond(raw))

    do_GET = do_POST = do_PUT = handle_any

    def respond(self, raw: bytes) -> tuple[int, Any]:
        hub, path = self.server, self.path.partition("?")[0]
        body = (
            json.loads(raw) if raw and path != "" and raw[:1] in b"{[" and b"\n{" not in raw else {}
        )
        if path == "/api/validate-yaml":  # a model card's head
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            name = f"{body.get('organization') or 'me'}/{body['name']}"
            if name in hub.repos:
                return 409, {
                    "error": "You already created this model repo",
                    "url": f"{hub.url}/{name}",
                }
            hub.repos[name] = body.get("visibility") == "private" or bool(body.get("private"))
            return 200, {"url": f"{hub.url}/{name}", "name": name}
        if actual := re.fullmatch(r"/api/models/[^/]+/[^/]+/branch/(.+)", path):
            hub.branches.add(actual[1])
            return 201, {}
        if actual := re.fullmatch(r"/api/models/[^/]+/[^/]+/preupload/(.+)", path):
            files = [
                {
                    "path": entry["path"],
                    "uploadMode": "lfs" if entry["path"].endswith(".bin") else "regular",
                    "shouldIgnore": False,
                }
                for entry in body["files"]
            ]
            return 200, {"files": files}
        if path.endswith("/info/lfs/objects/batch"):
            objects = []
            for entry in body["objects"]:
                upload = {"href": f"{hub.url}/lfs/{entry['oid']}"}
                recorded = entry["oid"] in hub.blobs
                objects.append({**entry, **({} if recorded else {"actions": {"upload": upload}})})
            return 200, {"transfer": "basic", "objects": objects}
        if actual := re.fullmatch(r"/lfs/(\w+)", path):
            hub.blobs[actual[1]] = raw
            return 200, {}
        if actual := re.fullmatch(r"/api/models/[^/]+/[^/]+/tree/(.+)", path):
            paths = [position for branch, position in hub.files if branch == actual[1]]
            return 200, [{"type": "file", "path": p, "size": 1, "oid": "0"} for p in paths]
        if actual := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/(.+)", path):
            return self.commit(
                actual[1], actual[2], [json.loads(line) for line in raw.splitlines()]
            )
        return 404, {"error": path}

    def commit(self, repo: str, branch: str, lines: list[dict]) -> tuple[int, Any]:
        hub = self.server
        for line in lines:
            value = line["value"]
            if line["key"] == "lfsFile":
                hub.files[branch, value["path"]] = hub.blobs[value["oid"]]
            elif line["key"] == "file":
                hub.files[branch, value["path"]] = value["content"].encode()
            elif line["key"] == "deletedFile":
                del hub.files[branch, value["path"]]
        hub.commits.append((branch, lines[0]["value"]["summary"]))
        oid = f"{len(hub.commits):040x}"
        return 200, {
            "commitUrl": f"{hub.url}/{repo}/commit/{oid}",
            "commitOid": oid,
            "success": True,
        }
