"""An environment for tests that goes wrong from some prompt on, while a file says so."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

from rl_toy_env import EvenTokens


class Faulty(EvenTokens):
    """{"from": 8, "fault": "raise"} in the file `switch`: prompts from number 8 on. Of every second
    prompt all episodes earn the same, where `flat` is set."""

    def __init__(self, tokenizer, switch="", group_size=4, flat=False):
        super().__init__(tokenizer)
        self.switch, self.group_size, self.flat = Path(switch), group_size, flat

    async def run(self, row, engine, sampling, index):
        draw = index // (4 * self.group_size)
        fault = ""
        if self.switch.is_file():
            payload = json.loads(self.switch.read_text())
            fault = payload["fault"] if draw >= payload["from"] else ""
        if fault == "raise":
            raise OSError("the world is gone")
        if fault in ("hang", "block"):
            if draw == payload["from"] and index % self.group_size == 0:
                os.kill(os.getpid(), signal.SIGTERM)  # a second one would end it at once
            time.sleep(20) if fault == "block" else await asyncio.sleep(60)
        episode = await super().run(row, engine, sampling, index)
        if fault == "zero" or (self.flat and draw % 2):
            episode.rewards = {"even": 0.0}
        return episode
