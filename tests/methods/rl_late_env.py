"""An environment for tests of streaming: the last episodes of every round end late."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

from rl_toy_env import EvenTokens

PATIENCE = 120.0


class LateTail(EvenTokens):
    """The prompts `late` end only when the run has written so many steps; that of `stop_at` stops
    the run by a signal then. Every prompt asked is noted in the file asked.txt of the folder."""

    def __init__(self, tokenizer, folder, late, group_size, stop_at=None):
        super().__init__(tokenizer)
        self.folder, self.group_size, self.stop_at = Path(folder), group_size, stop_at
        self.stopped = False
        self.late = {int(draw): steps for draw, steps in late.items()}

    async def run(self, row, engine, sampling, index):
        draw = index // (4 * self.group_size)
        with (self.folder / "asked.txt").open("a") as file:
            file.write(f"{draw}\n")
        if draw in self.late:
            deadline = time.monotonic() + PATIENCE
            while self.count_steps() < self.late[draw] or draw == self.stop_at:
                if draw == self.stop_at and self.count_steps() >= self.late[draw]:
                    if not self.stopped:
                        self.stopped = True  # a second signal would end it at once
                        os.kill(os.getpid(), signal.SIGTERM)
                    await asyncio.sleep(PATIENCE)
                assert time.monotonic() < deadline, f"prompt {draw} waited in vain for a step"
                await asyncio.sleep(0.01)
        return await super().run(row, engine, sampling, index)

    def count_steps(self):
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return 0
        lines = path.read_text().splitlines()
        return sum("loss" in json.loads(line) for line in lines)
