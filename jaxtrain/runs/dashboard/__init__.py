"""`jaxtrain watch`: a dashboard in the terminal that reads the folders of runs, and nothing else.

folders -> tail.py, run_data.py, reader.py: what runs wrote so far    status.py: state, time left
        -> app.py: a Textual app of head, tabs, search and keys; view.py: what its screens share
        -> screens/: a tab each; chart.py: curves of braille characters
command.py is the verb.
"""
