"""A POST of JSON to a URL when a run starts, ends, or logs a warning.

{"event": "start" | "end" | "alert", "run": "runs/x", "step": 12, "total_steps": 100, "state": "",
 "message": "...", "host": "...", "time": 1700000000.0, "text": "one line of all that"}

Chat services show `text`. The URL is a secret: no message and no file of the run contains it.
"""

import json
import platform
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from jaxtrain.config.base import Section
from jaxtrain.errors import UserError
from jaxtrain.runs.observers.protocol import ObservedRun


class WebhookOptions(Section):
    """Its options."""

    secret_url: str
    """http:// or https://; "$NAME" is that environment variable."""
    events: list[Literal["start", "end", "failure", "alert"]] = ["start", "end", "alert"]
    """failure: only an end that is one."""
    seconds: float = Field(10.0, gt=0, le=600)
    """Longest wait for an answer, and at the end for all that is still to be sent."""


class Webhook:
    """Sends from a thread of its own; a URL that does not answer costs a warning."""

    Section = WebhookOptions

    def __init__(self, options: WebhookOptions):
        self.options = options
        if not options.secret_url.startswith(("http://", "https://")):
            raise UserError("webhook: secret_url is no URL; it begins with http:// or https://")
        self.step_done = 0
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._warned = False
        self._opener = urllib.request.build_opener(_NoRedirect)

    def start(self, run: ObservedRun) -> None:
        """Tell of the start."""
        self.run, self.step_done = run, run.start_step
        self._thread = threading.Thread(target=self._send_all, name="webhook", daemon=True)
        self._thread.start()
        if "start" in self.options.events:
            self._put("start", message=f"steps {run.start_step + 1} to {run.total_steps}")

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Only remembered."""
        self.step_done = step

    def alert(self, text: str) -> None:
        """Tell on."""
        if "alert" in self.options.events:
            self._put("alert", message=text)

    def end(self, state: str, message: str) -> None:
        """Send the end event, and wait until it is sent."""
        events = {"end", "failure"} if state == "failed" else {"end"}
        if events & set(self.options.events):
            self._put("end", state=state, message=message)
        self._queue.put(None)
        self._thread.join(self.options.seconds)

    def _put(self, event: str, *, message: str, state: str = "running") -> None:
        run = self.run
        where = f"step {self.step_done} of {run.total_steps}"
        event_name = state if event == "end" else event
        self._queue.put(
            {
                "event": event,
                "run": str(run.folder),
                "attempt": run.attempt,
                "step": self.step_done,
                "total_steps": run.total_steps,
                "state": state,
                "message": message,
                "host": platform.node(),
                "time": round(time.time(), 3),
                "text": f"jaxtrain {run.folder.name}: {event_name}, {where}"
                + (f": {message}" if message else ""),
            }
        )

    def _send_all(self) -> None:
        while (message := self._queue.get()) is not None:
            problem = self._send(message)
            if problem and not self._warned:
                self._warned = True
                self.run.log(f"warning: the webhook was not told of {message['event']}: {problem}")

    def _send(self, message: Mapping[str, Any]) -> str:
        """Why it could not be sent, without the URL; empty where it was."""
        try:
            request = urllib.request.Request(
                self.options.secret_url,
                json.dumps(message).encode(),
                {"Content-Type": "application/json"},
            )
            with self._opener.open(request, timeout=self.options.seconds):
                return ""
        except urllib.error.HTTPError as error:
            return f"it answered with status {error.code}"
        except urllib.error.URLError as error:
            reason = error.reason
            os_reason = isinstance(reason, OSError) and reason.strerror
            return str(os_reason) if os_reason else type(reason).__name__
        except Exception as error:  # the border: texts of these may hold the URL
            return type(error).__name__


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A POST that is sent elsewhere would arrive as a GET, and perhaps at a stranger's."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None
