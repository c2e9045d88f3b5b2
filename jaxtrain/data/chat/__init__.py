"""Messages, chat templates, and tokens with masks."""
