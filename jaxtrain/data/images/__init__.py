"""Images of rows: where they lie, their patches, and the text that stands for them."""
