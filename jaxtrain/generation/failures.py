"""Failures of episodes: told once a kind, counted, and the end of a run where they persist.

One window over the last episodes, whatever failed: an environment, a judge, a server. A short
outage is bridged by the pauses between tries; what fails nonetheless costs its group. Only where
more than a share of a whole window has failed is the run ended.
"""

from collections import Counter, deque
from collections.abc import Callable

from jaxtrain.errors import RunStopped, UserError
from jaxtrain.generation.engine import EpisodeFailed

MIN_WINDOW = 64
MAX_KINDS = 20
"""Kinds of failures that are told; a run shall not fill its log with them."""


class Failures:
    """What became of the last episodes. Used by one event loop."""

    def __init__(
        self, share: float = 1.0, window: int = MIN_WINDOW, log: Callable[[str], None] = print
    ):
        """share: of `window` episodes that may fail; 1: all of them."""
        self.share, self.window, self.log = share, max(window, MIN_WINDOW), log
        self._last: deque[EpisodeFailed | None] = deque(maxlen=self.window)
        self._failed = 0
        self._worked = False
        self._told: set[tuple[str, str]] = set()
        self.newest: EpisodeFailed | None = None

    def tell(self, failure: EpisodeFailed) -> None:
        """Say what went wrong, once a kind; it may be tried again."""
        self.newest = failure
        kind = (str(failure), failure.trace.rpartition("\n  File ")[2].partition("\n")[0])
        if kind not in self._told and len(self._told) < MAX_KINDS and failure.cause:
            self._told.add(kind)
            more = f"\n{failure.trace}" if failure.trace else ""
            self.log(f"an episode failed: {failure.cause[:500]} (said once, and counted){more}")

    def add(self, failure: EpisodeFailed | None, count: int = 1) -> None:
        """So many episodes came out well (None) or failed for good. Raises RunStopped or UserError
        where that is the end."""
        if not count:
            return
        for _ in range(count):
            gone = self._last[0] if len(self._last) == self.window else None
            self._failed += (failure is not None) - (gone is not None)
            self._last.append(failure)
        self._worked |= failure is None
        if failure is None:
            return
        self.newest = failure
        if failure.mistake and not self._worked:
            raise UserError(failure.cause)
        if len(self._last) == self.window and self._failed > self.share * self.window:
            raise self._explain()

    def _explain(self) -> Exception:
        failed = [failure for failure in self._last if failure is not None]
        (reason, times), *_ = Counter(map(str, failed)).most_common()
        worst = next(one for one in reversed(failed) if str(one) == reason)
        text = (
            f"{len(failed)} of the last {self.window} episodes failed, more than"
            f" rollout.max_failures {self.share:g} allows; {times} of them: {reason}"
            f" ({(worst.cause or 'no more is known')[:800]}). Mend that and start the same command"
            " again, or raise rollout.max_failures (1: failures never end the run)"
        )
        return UserError(text) if worst.mistake else RunStopped(text)
