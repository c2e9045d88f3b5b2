"""`jaxtrain doctor`: what is installed and present here, what does not fit, and what to do

collect.py, probe.py    this machine -> facts, a dict of plain values (jax in a process of its own)
judges.py, needs.py     facts -> findings: pure functions, and the versions they go by
command.py              the verb: prints them
"""
