"""Training methods, a folder each, whose `KINDS` declares what each task.kind is made of:

    {"sft": {"section": "config:SFTTask", "method": "method"}}

The modules are relative to the folder. `jaxtrain.config.methods` reads the declarations, so a
method exists exactly as long as its folder does.
"""

import jaxtrain.config  # noqa: F401  It imports the sections below, and they import it.
