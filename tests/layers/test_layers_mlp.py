"""Activations of MLPs and of experts against transformers' of the same names."""

import numpy as np
import pytest
from jaxtrain_kernels.grouped_matmul.ffn import ACTIVATIONS as OF_EXPERTS

from jaxtrain.layers.mlp import ACTIVATIONS

torch = pytest.importorskip("torch", reason="parity needs torch, which this environment has not")


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_are_those_of_transformers(name):
    from transformers.activations import ACT2FN

    x = np.linspace(-6, 6, 1001, dtype=np.float32)
    expected = ACT2FN[name](torch.from_numpy(x)).numpy()
    # float32: exponentials and tanh of two libraries.
    for activations in (ACTIVATIONS, OF_EXPERTS):
        np.testing.assert_allclose(activations[name](x), expected, atol=2e-6)
