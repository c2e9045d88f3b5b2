"Training methods: a folder each."
