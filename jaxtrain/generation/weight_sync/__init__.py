"""Weight synchronization: the trainer's publishers, and the transports to servers."""
