"""Adapters: small trained corrections beside frozen weights, where they go, and PEFT's folders."""
