"""What a package can bring to jaxtrain. Nothing is imported before a config names it."""
