"""The PyTorch side of rotate_heads' benchmark: torch.compile of norm and rotation."""

import torch
import torch.nn.functional as F
from torch_peers import on_gpu


def compiled(case, layers: int):
    """(forward, backward) of as many layers' calls, each a callable without arguments."""
    H, R = case.head_dim, 2 * case.half
    inputs = case.inputs()
    cos, sin = (torch.from_numpy(inputs[n]).cuda()[:, :, None] for n in ("cos", "sin"))
    parts = [*case.counts, *([case.passed] if case.passed else [])]
    x = on_gpu(inputs["x"])
    xs = [torch.randn_like(x).requires_grad_() for _ in range(layers)]
    shapes = [(*x.shape[:2], count, H) for count in parts]
    d_outs = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for _ in xs for s in shapes]
    scales = (
        [[on_gpu(scale).requires_grad_() for scale in inputs["scales"]] for _ in xs]
        if case.normed
        else [None] * layers
    )

    def turn(z):
        first, second, passed = z.float().split([R // 2, R // 2, H - R], dim=-1)
        turned = [first * cos - second * sin, second * cos + first * sin, passed]
        return torch.cat(turned, dim=-1).bfloat16()

    @torch.compile(dynamic=False)
    def run(xs, scales):
        found = []
        for x, scale in zip(xs, scales, strict=True):
            pieces = x.split([count * H for count in parts], dim=-1)
            for place, piece in enumerate(pieces):
                z = piece.unflatten(-1, (-1, H))
                if place == len(case.counts):
                    found.append(z.contiguous())
                    continue
                if scale is not None:
                    z = F.rms_norm(z, (H,), scale[place], 1e-6)
                found.append(turn(z))
        return found

    def forward():
        with torch.no_grad():
            return run(xs, scales)

    outs = run(xs, scales)
    trained = [*xs, *(scale for own in scales if own is not None for scale in own)]

    def backward():
        return torch.autograd.grad(outs, trained, d_outs, retain_graph=True)

    return forward, backward
