"""PyTorch peers of the vocabulary ops. Imports are inside: not every machine has them all."""

import importlib.util

import torch
import torch.nn.functional as F
from torch_peers import on_gpu


def compiled_logits(inputs):
    """(forward, forward + backward): value, entropy and log-sum-exp of given logits, compiled."""
    logits = on_gpu(inputs["logits"]).requires_grad_()
    targets = on_gpu(inputs["targets"]).long()

    @torch.compile(dynamic=False)
    def values(logits, targets):
        z = logits.float()
        logp = F.log_softmax(z, -1)
        entropy = -(logp.exp() * logp).sum(-1)
        return logp.gather(1, targets[:, None])[:, 0], entropy, torch.logsumexp(z, -1)

    def forward():
        with torch.no_grad():
            return values(logits, targets)

    def both():
        logp, entropy, _ = values(logits, targets)
        return torch.autograd.grad((logp + entropy).sum(), logits)

    return forward, both


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
