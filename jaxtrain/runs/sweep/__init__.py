"""Many runs of one config, each with other values of some keys; Optuna says which.

    SWEEP.toml -> space.py: what is tried, checked before anything starts
    study.py: Optuna's study in a journal, which several processes share
    trial.py: one run as a process; run.py: as many at once as there is room for

No jax here: every run is a process of its own.
"""
