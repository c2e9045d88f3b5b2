"""An event loop in a thread of its own, which the loop thread can stop waiting for.

    loop thread     run(work) ── every 0.2 s: is the run to stop? does the event loop turn? ──┐
    its own thread  episodes, rewards, connections; what a world does there, nobody can end  <─┘

Code of an environment that blocks the event loop (time.sleep, requests.get) holds up all episodes.
It cannot be interrupted, but it is named, and it holds up neither a signal nor the end: these
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

from jaxtrain.errors import Interrupted, RunStopped
from jaxtrain.text_safety import escape_control_chars

T = TypeVar("T")

BEAT = 0.5
LOOK = 0.2
WARN_SECONDS = 20.0
"""Without a beat for so long, people are told what holds the event loop up."""
CLOSE_SECONDS = 10.0
MAX_THREADS = 64
MAX_HEARD = 3


class EventLoop:
    """Runs coroutines for another thread. patience: seconds that it may be blocked for."""

    def __init__(
        self,
        name: str,
        patience: float | None = None,
        log: Callable[[str], None] = print,
    ):
        self.name, self.patience, self.log = name, patience, log
        self.should_stop: Callable[[], bool] = lambda: False
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(DaemonThreads(MAX_THREADS))
        self._beaten = time.monotonic()
        self._warned = False
        self._heard = 0
        self._loop.set_exception_handler(self._hear)
        self._thread = threading.Thread(target=self._turn, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns or raises. Interrupted once should_stop() says so; RunStopped
        when the event loop has been blocked for longer than its patience."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while True:
            try:
                return future.result(timeout=LOOK)
            except TimeoutError:
                if future.done():
                    return future.result()
            if self.should_stop():
                future.cancel()
                raise Interrupted
            self._look()

    def tell(self, work: Callable[[], Any]) -> None:
        """Have something done there soon; nobody waits for it."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(work)

    def close(self, last: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Run a last coroutine and end the thread, both within CLOSE_SECONDS; a thread that is
        blocked is left behind."""
        if not self._thread.is_alive():
            return
        self.should_stop = lambda: False
        try:
            asyncio.run_coroutine_threadsafe(last(), self._loop).result(timeout=CLOSE_SECONDS)
        except TimeoutError:
            self.log(f"{self.name}: left behind, it is blocked in {self._place()}")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=2.0)

    def _turn(self) -> None:
        self._beat()
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left, timeout=1.0))
        self._loop.close()

    def _hear(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error that nobody waits for any more, such as that of an episode that was given up."""
        error = context.get("exception")
        if error is not None and self._heard < MAX_HEARD:
            self._heard += 1
            first = str(error).partition("\n")[0][:200]
            self.log(escape_control_chars(f"{self.name}: {type(error).__name__}: {first}"))

    def _beat(self) -> None:
        self._beaten, self._warned = time.monotonic(), False
        self._loop.call_later(BEAT, self._beat)

    def _look(self) -> None:
        """Whether the event loop still turns."""
        idle = time.monotonic() - self._beaten
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
        """What the thread is doing: "world.py:12 in reset"."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        frames = traceback.extract_stack(frame)[-3:] if frame is not None else []
        return " <- ".join(f"{f.filename}:{f.lineno} in {f.name}" for f in reversed(frames))


class DaemonThreads(ThreadPoolExecutor):
    """Threads that the end of the process does not wait for: a tool that hangs shall not hold up
    an end."""

    def __init__(self, size: int):
        super().__init__(size)
        self._calls: queue.SimpleQueue[tuple[Future, Callable[[], Any]] | None]
        self._calls = queue.SimpleQueue()
        self._free = threading.Semaphore(0)
        self._count = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """See Executor."""
        future: Future = Future()
        self._calls.put((future, lambda: fn(*args, **kwargs)))
        if not self._free.acquire(blocking=False) and self._count < self._max_workers:
            self._count += 1
            threading.Thread(target=self._serve, name="call", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads, each after its call; nobody waits."""
        for _ in range(self._count):
            self._calls.put(None)

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # whoever waits for it gets it
                    future.set_exception(error)
            self._free.release()
