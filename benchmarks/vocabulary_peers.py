"""PyTorch peers of the vocabulary ops. Imports are inside: not every machine has them all."""

import importlib.util

from torch_peers import on_gpu


def require(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise NotImplementedError(f"{module} is not installed")


def loss_arrays(inputs):
    hidden, head = (on_gpu(inputs[n]).requires_grad_() for n in ("hidden", "head"))
    return hidden, head, on_gpu(inputs["targets"]).long()


def liger(inputs):
    """Loss and gradients by Liger Kernel's fused linear cross-entropy."""
    require("liger_kernel")
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    hidden, head, targets = loss_arrays(inputs)

    def step():
        hidden.grad = head.grad = None
        arguments = (hidden, head, targets, None, None, -100, 0.0, 0.0, "sum")
        found = LigerFusedLinearCrossEntropyFunction.apply(*arguments)
        (found[0] if isinstance(found, tuple) else found).backward()

    return step


def cut_cross_entropy(inputs, exact: bool = False):
    """Loss and gradients by cut-cross-entropy; `exact`: without its filter on small gradients."""
    require("cut_cross_entropy")
    from cut_cross_entropy import linear_cross_entropy

    hidden, head, targets = loss_arrays(inputs)
    options = {"filter_eps": None} if exact else {}

    def step():
        hidden.grad = head.grad = None
        linear_cross_entropy(hidden, head, targets, reduction="sum", **options).backward()

    return step
