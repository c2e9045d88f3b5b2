"""Sandbox: untrusted Python in separate processes, judged by values that it cannot forge.

    sandbox.py (caller) -> supervisor.py -> cell of the program    <-- calls by value -->
                                            cell of the test, which alone sends the verdict

Code inside imports only the standard library and this package.
"""
