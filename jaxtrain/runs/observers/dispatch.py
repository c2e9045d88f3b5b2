"""The observers of a run: opened by the config, notified on process 0, their verdicts collected.

    loop thread ── notify("step", ...) ──> each observer ──> verdicts ── take() ──> the loop
    seal thread ── saved(...) ──> a queue, passed on by the loop's next notify

One that fails is switched off with a warning; one that cannot be made or started ends the run
before it trains. No jax here.
"""

import queue
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from jaxtrain import plugins
from jaxtrain.config import Config
from jaxtrain.config.construct import make
from jaxtrain.config.observers import OBSERVERS, ObserverConfig
from jaxtrain.config.secrets import reveal
from jaxtrain.errors import UserError
from jaxtrain.runs.observers.protocol import VERDICTS, ObservedRun
from jaxtrain.runs.watchdog import describe_end
from jaxtrain.text_safety import show

MOMENT = 1.0
"""Seconds that a call may take before a warning is logged, since training waits for it."""


class Observers:
    """Context: notifies all observers of one run. Processes but the first have none."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        log: Callable[[str], None],
        *,
        attempt: int = 1,
        phase: Callable[[str], AbstractContextManager[object]] = nullcontext,
        primary: bool = True,
    ):
        """Makes them; UserError where one cannot be found or made. phase: says what the run waits
        for."""
        self.config, self.folder, self.log, self.attempt = config, folder, log, attempt
        self.phase = phase
        self._all = open_observers(config) if primary else {}
        self._started: list[str] = []
        """Labels of those that were started: only they are notified of the end."""
        self._verdicts: dict[str, str] = {}
        self._saved: queue.SimpleQueue[tuple[int, Path]] = queue.SimpleQueue()
        self._slow: set[str] = set()
        self._alerting = False
        self._stopped = ""

    def __bool__(self) -> bool:
        return bool(self._all)

    def start(self, total_steps: int, start_step: int) -> None:
        """Training goes from `start_step` (steps already done) to `total_steps`."""
        for label, observer in list(self._all.items()):
            run = ObservedRun(
                self.folder,
                self.folder / "observers" / label,
                self.config.saved(),
                total_steps,
                start_step,
                self.attempt,
                self.log,
                lambda text, label=label: self._alert(label, text),
            )
            try:
                self._note(label, getattr(observer, "start", _nothing)(run))
            except UserError:
                raise
            except plugins.FAILURES as error:  # the border: whatever foreign code may raise
                raise UserError(
                    f"observer {label} cannot start: {plugins.describe(error)}"
                ) from error
            self._started.append(label)

    def notify(self, method: str, *args: Any) -> None:
        """Call a method of all that have it, on the loop's thread."""
        while not self._saved.empty():
            self._call("checkpoint", *self._saved.get())
        self._call(method, *args)

    def saved(self, step: int, path: Path) -> None:
        """A checkpoint is complete; from any thread."""
        if self._all:
            self._saved.put((step, path))

    def take(self) -> dict[str, str]:
        """Verdicts since the last call, each with the observer that gave it first."""
        verdicts, self._verdicts = self._verdicts, {}
        return verdicts

    def stopped(self, reason: str) -> None:
        """The run ends by a signal."""
        self._stopped = reason

    def __enter__(self) -> "Observers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *traceback: object
    ) -> None:
        state, message = describe_end(error, self._stopped)
        self._all = {
            label: observer for label, observer in self._all.items() if label in self._started
        }
        with self.phase("waiting for observers"):
            self.notify("end", state, message)
        self._all = {}

    def _call(self, method: str, *args: Any) -> None:
        for label, observer in list(self._all.items()):
            began = time.monotonic()
            try:
                self._note(label, getattr(observer, method, _nothing)(*args))
            except plugins.FAILURES as error:  # the border: a broken observer must not cost the run
                self._all.pop(label, None)
                self.log(
                    f"warning: observer {label} failed and is switched off: {method}():"
                    f" {plugins.describe(error)}"
                )
            seconds = time.monotonic() - began
            if seconds > MOMENT and method != "end" and label not in self._slow:
                self._slow.add(label)
                self.log(
                    f"warning: observer {label} took {seconds:.1f} s in {method}(), for which"
                    " training waited; this is said once"
                )

    def _note(self, label: str, verdict: object) -> None:
        if verdict is None:
            return
        if verdict not in VERDICTS:
            raise ValueError(
                f"it returned {show(verdict)}; a verdict is None,"
                f" {', '.join(map(repr, VERDICTS[:-1]))} or {VERDICTS[-1]!r}"
            )
        self._verdicts.setdefault(str(verdict), label)

    def _alert(self, label: str, text: str) -> None:
        self.log(f"warning: {label}: {text}")
        if not self._alerting:  # no recursion: an alert raised by an alert is only logged
            self._alerting = True
            try:
                self._call("alert", f"{label}: {text}")
            finally:
                self._alerting = False


def open_observers(config: Config) -> dict[str, Any]:
    """Open all observers, keyed by the names that messages use; raise UserError if one cannot be
    found or made."""
    tables = list_observers(config)
    opened: dict[str, Any] = {}
    for key, table in tables:
        label = table.kind.rpartition("/")[2]
        label = label if label not in opened else f"{label} ({key})"
        options = reveal(table.options, f"{key}.options")
        opened[label] = make(
            find_observer(key, table),
            options=options,
            key=f"{key}.kind {table.kind!r}",
            options_key=f"{key}.options",
        )
    return opened


def find_observer(key: str, table: ObserverConfig) -> Callable[..., Any]:
    """Return what makes an observer; UserError where its name leads nowhere."""
    return plugins.find("observers", table.kind, OBSERVERS, key=f"{key}.kind")


def list_observers(config: Config) -> list[tuple[str, ObserverConfig]]:
    """(key, table) of each: the config's own, and what eval.patience stands for."""
    configured = [(f"observers.{index}", section) for index, section in enumerate(config.observers)]
    if config.eval.patience is not None:
        options = {
            "metric": config.checkpoint.best_metric,
            "mode": config.checkpoint.best_mode,
            "patience": config.eval.patience,
            "min_delta": config.eval.min_delta,
        }
        configured.insert(0, ("eval.patience", ObserverConfig(kind="early_stop", options=options)))
    return configured


def _nothing(*args: Any) -> None:
    """Stands for a method that an observer does not have."""
