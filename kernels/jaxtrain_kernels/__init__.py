"""The public ops of jaxtrain, each with a plain reference and faster backends behind `impl`."""

from jaxtrain_kernels.context import Context
from jaxtrain_kernels.conv_heads import conv_heads
from jaxtrain_kernels.decode_attention import decode_attention
from jaxtrain_kernels.gated_delta import gated_delta
from jaxtrain_kernels.grouped_matmul import grouped_matmul
from jaxtrain_kernels.grouped_matmul.ffn import Adapters, Biases, Clamped
from jaxtrain_kernels.grouped_matmul.moe import moe_ffn
from jaxtrain_kernels.logp_gather import LogProbs, logp_gather
from jaxtrain_kernels.recurrence.conv import causal_conv
from jaxtrain_kernels.rotate_heads import rotate_heads
from jaxtrain_kernels.selective_scan import selective_scan
from jaxtrain_kernels.ssd import ssd
from jaxtrain_kernels.tree_attention import attention
from jaxtrain_kernels.weighted_logp import weighted_logp

__all__ = [
    "Adapters",
    "Biases",
    "Clamped",
    "Context",
    "LogProbs",
    "attention",
    "causal_conv",
    "conv_heads",
    "decode_attention",
    "gated_delta",
    "grouped_matmul",
    "logp_gather",
    "moe_ffn",
    "rotate_heads",
    "selective_scan",
    "ssd",
    "weighted_logp",
]
