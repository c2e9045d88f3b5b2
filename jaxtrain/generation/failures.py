"""Failures of episodes: logged once per kind, counted, and the end of a run where they persist.

One window over the last episodes covers whatever failed: an environment, a judge, a server. A short
outage is bridged by the pauses between tries; an episode that fails nonetheless costs its group.
The run ends only when more than a share of a whole window has failed.
"""

from collections import Counter, deque
from collections.abc import Callable

from jaxtrain.errors import RunStopped, UserError
from jaxtrain.generation.engine import EpisodeFailed

MIN_WINDOW = 64
MAX_KINDS = 20
"""Kinds of failures that are logged, so that they cannot fill a run's log."""


class Failures:
    """Outcomes of the last episodes. Used by one event loop."""

    def __init__(
        self, share: float = 1.0, window: int = MIN_WINDOW, log: Callable[[str], None] = print
    ):
        """share: of `window` episodes that may fail; 1: all of them."""
        self.share, self.window, self.log = share, max(window, MIN_WINDOW), log
        self._last: deque[EpisodeFailed | None] = deque(maxlen=self.window)
        self._failed = 0
        self._any_worked = False
        self._logged: set[tuple[str, str]] = set()
        self.newest: EpisodeFailed | None = None

    def log_once(self, failure: EpisodeFailed) -> None:
        """Log a failure, which may be tried again, once per kind."""
        self.newest = failure
        kind = (str(failure), failure.trace.rpartition("\n  File ")[2].partition("\n")[0])
        if kind not in self._logged and len(self._logged) < MAX_KINDS and failure.cause:
            self._logged.add(kind)
            trace = f"\n{failure.trace}" if failure.trace else ""
            self.log(f"an episode failed: {failure.cause[:500]} (said once, and counted){trace}")

    def add(self, failure: EpisodeFailed | None, count: int = 1) -> None:
        """Count episodes that succeeded (None) or failed for good. Raises RunStopped or UserError
        if too many have failed."""
        if not count:
            return
        for _ in range(count):
            oldest = self._last[0] if len(self._last) == self.window else None
            self._failed += (failure is not None) - (oldest is not None)
            self._last.append(failure)
        self._any_worked |= failure is None
        if failure is None:
            return
        self.newest = failure
        # A mistake in the config fails from the first episode on; later it is an outage.
        if failure.mistake and not self._any_worked:
            raise UserError(failure.cause)
        if len(self._last) == self.window and self._failed > self.share * self.window:
            raise self._explain()

    def _explain(self) -> Exception:
        failed = [failure for failure in self._last if failure is not None]
        (reason, times), *_ = Counter(map(str, failed)).most_common()
        worst = next(failure for failure in reversed(failed) if str(failure) == reason)
        text = (
            f"{len(failed)} of the last {self.window} episodes failed, more than"
            f" rollout.max_failures {self.share:g} allows; {times} of them: {reason}"
            f" ({(worst.cause or 'no more is known')[:800]}). Mend that and start the same command"
            " again, or raise rollout.max_failures (1: failures never end the run)"
        )
        return UserError(text) if worst.mistake else RunStopped(text)
