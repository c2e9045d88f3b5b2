"""The parts that models are made of: arrays and numbers in, arrays out, no config objects.

Shapes: B rows, T packed tokens in a row, S keys, D model, N query heads, K kv heads, H head dim,
F ffn, E experts, V vocab, L layers. Parameters are created in `param_dtype`, used in `dtype`, and
carry the logical axes of `parallel.rules` as metadata (`axes`).
"""
