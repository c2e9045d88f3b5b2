"""vLLM servers over HTTP: answers from them, weights to them."""
