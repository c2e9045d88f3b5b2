"""SGLang servers as an engine: publishing by folders, requests over HTTP."""
