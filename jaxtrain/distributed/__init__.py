"""Where arrays live: the mesh, the table of logical axes, and the feed of batches to devices."""
