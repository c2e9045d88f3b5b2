"""Three OpenEnv environments behind one port: `python openenv_worlds.py PORT`, where the package
openenv is. guess: a number; tools: an MCP tool; even: characters with an even code."""

import sys

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Guess(Action):
    guess: str


class Text(Action):
    text: str


class Seen(Observation):
    prompt: str = ""


class GuessEnv(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.number, self.tries = 0, 0

    def reset(self, seed=None, episode_id=None, **provided):
        self.number, self.tries = (seed or 0) % 10, 0
        return Seen(prompt="Guess from 0 to 9.", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **provided):
        self.tries += 1
        right = action.guess == str(self.number)
        text = "You win." if right else "No."
        return Seen(prompt=text, done=right or self.tries == 3, reward=float(right))

    @property
    def state(self):
        return State(step_count=self.tries)


class EvenEnv(GuessEnv):
    def reset(self, seed=None, episode_id=None, **provided):
        return Seen(prompt="Write.", done=False)

    def step(self, action, timeout_s=None, **provided):
        even = sum(ord(letter) % 2 == 0 for letter in action.text)
        return Seen(prompt="", done=True, reward=even / max(1, len(action.text)))


class ToolEnv(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("sums")

        @server.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **provided):
        return Observation(done=False, metadata={"status": "ready"})

    def _step_impl(self, action, timeout_s=None, **provided):
        return Observation(done=False, metadata={"error": "call a tool"})

    @property
    def state(self):
        return State()


app = FastAPI()
for name, parts in {
    "guess": (GuessEnv, Guess, Seen),
    "even": (EvenEnv, Text, Seen),
    "tools": (ToolEnv, CallToolAction, CallToolObservation),
}.items():
    app.mount(f"/{name}", create_app(*parts, env_name=name, max_concurrent_envs=64))
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
