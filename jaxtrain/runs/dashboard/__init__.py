"""`jaxtrain watch`: a dashboard in the terminal that reads the folders of runs, and nothing else.

folders -> tail.py, run.py: what runs wrote so far     facts.py: state, time left, warnings
        -> screens/: pure functions of (runs, what the person chose, size) -> lines of text
        -> frame.py: the whole screen as lines
keys    -> choice.py: what the person chose
app.py brings keys and lines to a terminal (Textual); open.py is the verb.
"""
