"""Answers of `jaxtrain serve`: requests in OpenAI's form, by the local engine."""
