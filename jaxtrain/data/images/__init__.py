"""Images of rows: where they lie, their pixels, their patches, and the text that stands for them."""
