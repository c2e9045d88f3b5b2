"""Servers of a NeMo Gym: names, URLs and kinds, as its head server lists them.

head ── GET /server_instances ──────> URL of each process        {"calc_agent": "http://..."}
     ── GET /global_config_dict_yaml ─> what each process is     {"calc_agent": {...}}
"""

import json
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

import yaml

from jaxtrain.errors import UserError

ASK_SECONDS = 10.0
MAX_BYTES = 1 << 25
HERE = {"localhost", "127.0.0.1", "0.0.0.0", "::1"}
Mode = Literal["agent", "verify"]
KINDS = {"agent": "responses_api_agents", "verify": "resources_servers"}
ROUTES = {"agent": "/run", "verify": "/verify"}
WHAT = {"agent": "an agent", "verify": "a resources server"}
"""Server of each mode: its kind in Gym's config, its route, and its description in messages."""


class Roster:
    """Servers of a Gym as last listed by its head, and those configured by URL."""

    def __init__(
        self, key: str, head: str, static_urls: Mapping[str, str], headers: dict[str, str]
    ):
        """key: the section's, for messages. head: URL of the head server, or "". static_urls: URLs
        of servers by name. headers: headers of requests."""
        self.key, self.head, self.headers = key, head, headers
        self.given = {name: url.rstrip("/") for name, url in static_urls.items()}
        self.listed: Any = None
        """Last list of the head server."""
        self._urls: dict[str, str] = {}
        self._config: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """Name of the Gym, for messages."""
        return f"NeMo Gym at {self.head or ', '.join(sorted(set(self.given.values())))}"

    def read(self) -> None:
        """Query the head server. Raises OSError or ValueError while not all servers are up, and
        UserError if it is not a head server of Gym."""
        if not self.head:
            return
        self.ask(f"{self.head}/health", False)  # HTTP 503 while servers start
        try:
            listed = self.ask(f"{self.head}/server_instances")
            global_config = yaml.safe_load(self.ask(f"{self.head}/global_config_dict_yaml"))
            self._urls = {entry["config_path"]: reach(entry["url"], self.head) for entry in listed}
            self._config = {
                name: entry for name, entry in global_config.items() if isinstance(entry, dict)
            }
            self.listed = listed
        except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
            raise UserError(
                f"{self.key}.head: {self.head} does not answer as the head server of a NeMo Gym"
                f" 0.7 does (GET /server_instances, /global_config_dict_yaml): {error!r:.300}"
            ) from None

    def find(self, name: str, mode: Mode) -> tuple[str, str]:
        """Return (name, URL) of the process that plays or judges for an agent; the URL is "" if
        there is none. An agent with an environment server is reached there. In mode "verify",
        `name` may also be a resources server."""
        if name in self.given:
            return name, self.given[name]
        if mode == "verify":
            agent = _find_block(self._config.get(name), KINDS["agent"])
            name = _name_of(agent.get("resources_server")) or name
        for process, block in self._config.items() if mode == "agent" else ():
            inner = _find_block(block, "environment_servers")
            if _name_of(inner.get("agent_server")) == name and process in self._urls:
                return process, self._urls[process]
        return name, self._urls[name] if name in self.list(mode) else ""

    def list(self, mode: Mode) -> list[str]:
        """List the names of servers of a mode's kind, including those configured by URL."""
        kind = KINDS[mode]
        names = {
            name for name, block in self._config.items() if kind in block and name in self._urls
        }
        return sorted(names | set(self.given))

    def greet(self, process: str) -> None:
        """Raise OSError or ValueError if a process does not answer or is no longer listed."""
        try:
            self.ask(f"{self.given.get(process) or self._urls.get(process, '')}/livez", False)
        except urllib.error.HTTPError as error:
            if error.code >= 500:
                raise

    def check(self, names: Collection[str], mode: Mode, how: str) -> None:
        """Raise UserError for names that are not servers of this mode. how: key that names them."""
        if missing := sorted(name for name in names if not self.find(name, mode)[1]):
            names_found = set(self.list(mode)) | set(self.list("agent"))
            expected = WHAT["agent"] + ("" if mode == "agent" else f" or {WHAT[mode]}")
            raise UserError(
                f"{how}: this Gym has no {' or '.join(map(repr, missing))}; it must be {expected}"
                f" of {', '.join(sorted(names_found)) or '(none)'}"
            )
        for name in sorted(names):
            self._check_routes(*self.find(name, mode), mode)

    def _check_routes(self, name: str, url: str, mode: Mode) -> None:
        try:
            routes = set(self.ask(f"{url}/openapi.json")["paths"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.key}: {name} at {url} does not answer as a server of NeMo Gym does"
                f" (GET /openapi.json): {error!r:.300}"
            ) from None
        if ROUTES[mode] not in routes:
            kinds = [f"it is {WHAT[kind]}" for kind, route in ROUTES.items() if route in routes]
            advice = (kinds or [f"it has {', '.join(sorted(routes)[:9]) or 'none'}"])[0]
            raise UserError(
                f'{self.key}.mode "{mode}" needs {WHAT[mode]}, with the route {ROUTES[mode]};'
                f" {name} at {url} has none: {advice}"
            )

    def ask(self, url: str, read: bool = True) -> Any:
        """Send a GET and return its JSON, or None unless `read`. Raises OSError or ValueError."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(url, headers=self.headers)
        with opener.open(request, timeout=ASK_SECONDS) as answer:
            return json.loads(answer.read(MAX_BYTES)) if read else None


def reach(url: str, head: str) -> str:
    """Rewrite a server URL listed by a head for this machine: localhost means the head's host."""
    server, head_url = urlsplit(url), urlsplit(head)
    if server.hostname in HERE and head_url.hostname not in HERE:
        host = f"[{head_url.hostname}]" if ":" in str(head_url.hostname) else head_url.hostname
        url = server._replace(netloc=f"{host}:{server.port}").geturl()
    return url.rstrip("/")


def _find_block(block: Any, kind: str) -> dict[str, Any]:
    """Return the config of a process's server of a kind; {} if it is of another kind."""
    inner = block.get(kind) if isinstance(block, dict) else None
    server = next(iter(inner.values()), None) if isinstance(inner, dict) else None
    return server if isinstance(server, dict) else {}


def _name_of(reference: Any) -> str | None:
    return reference.get("name") if isinstance(reference, dict) else None
