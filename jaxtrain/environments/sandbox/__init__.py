"""The sandbox: foreign Python in processes of its own, judged by values that it cannot forge.

    box.py (caller) -> keeper.py -> a cell that runs the program   <-- calls by value -->
                                    a cell that runs the test, which alone tells the verdict

What runs inside imports nothing but the standard library and this package.
"""
