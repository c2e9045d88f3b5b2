"""rollout.curator = "growing": small numbers first."""


class Growing:
    """Asks for starts up to a limit, which grows with every prompt that earned something."""

    def __init__(self, seed, *, first=4):
        self.limit = first

    def choose(self, ask):
        """Whether this prompt is asked now; it comes up again in the next epoch."""
        return ask.row["start"] <= self.limit

    def learn(self, ask, rewards):
        """What its answers earned."""
        self.limit += max(rewards) > 0

    def state(self):
        """Goes into every checkpoint."""
        return self.limit

    def restore(self, state):
        """Comes out of one."""
        self.limit = state
