"""An event loop in a thread of its own, which the loop thread can stop waiting for.

    loop thread     run(work) ── every 0.2 s: stop requested? is the event loop blocked? ──┐
    its own thread  episodes, rewards, connections; nothing can interrupt what they call <─┘

Code of an environment that blocks the event loop (time.sleep, requests.get) delays all episodes. It
cannot be interrupted, but it is named, and it delays neither a signal nor the end of the run: the
threads are daemons.
"""

import asyncio
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from typing_extensions import override

from jaxtrain.errors import Interrupted, RunStopped
from jaxtrain.text_safety import escape_control_chars

T = TypeVar("T")

BEAT_SECONDS = 0.5
POLL_SECONDS = 0.2
WARN_SECONDS = 20.0
"""Without a beat for so long, a warning names what blocks the event loop."""
CLOSE_SECONDS = 10.0
MAX_THREADS = 64
MAX_LOGGED = 3


class EventLoop:
    """Runs coroutines for another thread. patience: seconds that it may be blocked."""

    def __init__(
        self, name: str, patience: float | None = None, log: Callable[[str], None] = print
    ):
        self.name, self.patience, self.log = name, patience, log
        self.should_stop: Callable[[], bool] = lambda: False
        self._loop = asyncio.new_event_loop()
        # asyncio's own pool would be joined at exit: one tool that hangs would keep the process.
        self._loop.set_default_executor(DaemonThreads(MAX_THREADS))
        self._last_beat = time.monotonic()
        self._warned = False
        self._logged = 0
        self._loop.set_exception_handler(self._log_lost_error)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return or raise what the coroutine does. Raises Interrupted once should_stop() returns
        True, and RunStopped if the event loop is blocked for longer than its patience."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while True:
            try:
                return future.result(timeout=POLL_SECONDS)
            except TimeoutError:
                # The coroutine may itself have raised a TimeoutError, or finished just now.
                if future.done():
                    return future.result()
            if self.should_stop():
                future.cancel()
                raise Interrupted
            self._check_blocked()

    def call_soon(self, work: Callable[[], Any]) -> None:
        """Call a function in the event loop soon, without waiting for it."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(work)

    def close(self, last: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Run a last coroutine and end the thread, both within CLOSE_SECONDS; a blocked thread is
        abandoned."""
        if not self._thread.is_alive():
            return
        self.should_stop = lambda: False
        try:
            asyncio.run_coroutine_threadsafe(last(), self._loop).result(timeout=CLOSE_SECONDS)
        except TimeoutError:
            self.log(f"{self.name}: left behind, it is blocked in {self._place()}")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=2.0)

    def _serve(self) -> None:
        self._beat()
        self._loop.run_forever()
        # asyncio would report what is left as destroyed while pending.
        pending = asyncio.all_tasks(self._loop)
        for task in pending:
            task.cancel()
        if pending:
            self._loop.run_until_complete(asyncio.wait(pending, timeout=1.0))
        self._loop.close()

    def _log_lost_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error that nothing awaits any more, such as that of a cancelled episode."""
        error = context.get("exception")
        if error is not None and self._logged < MAX_LOGGED:
            self._logged += 1
            first = str(error).partition("\n")[0][:200]
            self.log(escape_control_chars(f"{self.name}: {type(error).__name__}: {first}"))

    def _beat(self) -> None:
        self._last_beat, self._warned = time.monotonic(), False
        self._loop.call_later(BEAT_SECONDS, self._beat)

    def _check_blocked(self) -> None:
        """Warn, and in the end raise, if the event loop has not made a turn for long."""
        idle = time.monotonic() - self._last_beat
        if idle > WARN_SECONDS and not self._warned:
            self._warned = True
            self.log(
                f"warning: the event loop, and with it every episode, has waited for {idle:.0f} s"
                f" for {self._place()}; environments must await, or call asyncio.to_thread"
            )
        if self.patience is not None and idle > self.patience + WARN_SECONDS:
            raise RunStopped(
                f"an environment has blocked the event loop for {idle:.0f} s, longer than"
                f" env.step_timeout allows, in {self._place()}; it must await what takes long, or"
                " call it with asyncio.to_thread"
            )

    def _place(self) -> str:
        """Return what the thread is doing: "world.py:12 in reset"."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        frames = traceback.extract_stack(frame)[-3:] if frame is not None else []
        return " <- ".join(f"{f.filename}:{f.lineno} in {f.name}" for f in reversed(frames))


class DaemonThreads(ThreadPoolExecutor):
    """Threads that the end of the process does not wait for, even if a tool in one hangs."""

    def __init__(self, size: int):
        super().__init__(size)
        self._calls: queue.SimpleQueue[tuple[Future, Callable[[], Any]] | None]
        self._calls = queue.SimpleQueue()
        self._free = threading.Semaphore(0)
        """Threads that wait for a call."""
        self._count = 0

    @override
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()
        self._calls.put((future, lambda: fn(*args, **kwargs)))
        if not self._free.acquire(blocking=False) and self._count < self._max_workers:
            self._count += 1
            threading.Thread(target=self._work, name="call", daemon=True).start()
        return future

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        # Each thread ends after its call; none is joined.
        for _ in range(self._count):
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:  # raised again by whatever awaits the future
                    future.set_exception(error)
            self._free.release()
