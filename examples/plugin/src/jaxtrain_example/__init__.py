"""Example of everything a package can add to jaxtrain. Nothing is imported before a config names
it."""
