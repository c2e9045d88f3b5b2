"""`jaxtrain doctor`: what is installed and present here, what does not fit, and what to do

collect.py, probe.py    this machine -> facts, a dict of plain values (jax in a process of its own)
accelerators.py,        facts -> findings: pure functions
surroundings.py
open.py                 the verb: prints them
"""
