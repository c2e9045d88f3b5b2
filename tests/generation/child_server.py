"""A server that only says that it is there: child_server.py HOST PORT."""

import http.server
import sys


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Health).serve_forever()
