"""Training API in Tinker's form, over HTTP: `jaxtrain serve --train`."""
