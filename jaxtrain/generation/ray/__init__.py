"""Rollouts in other processes, on other machines: a service, its episode workers, their servers."""
