"""What the command line does besides training; each is imported when it is called."""
