"""rollout.curator = "growing": small numbers first."""


class Growing:
    """Asks for starts up to a limit, which grows with every prompt that earned something."""

    def __init__(self, seed, *, first=4):
        self.limit = first

    def choose(self, ask):
        """Return whether this prompt is used now; it comes up again in the next epoch."""
        return ask.row["start"] <= self.limit

    def learn(self, ask, rewards):
        """Record the rewards of its answers."""
        self.limit += max(rewards) > 0

    def state(self):
        """Goes into every checkpoint."""
        return self.limit

    def restore(self, state):
        """Comes out of one."""
        self.limit = state
