"""The PyTorch side of experts_step.py: transformers' model with its grouped matmul, PEFT's LoRA.

As well as these allow: experts_implementation "grouped_mm" on bfloat16 weights (it takes no other),
every decoder layer under torch.compile and checkpointed as a whole, the head's cross-entropy
compiled over pieces of 4,096 tokens that are checkpointed, fused AdamW, clipping by global norm.
Documents are rows of their own, so attention is causal: SDPA, or FlexAttention where there are
sinks. LoRA is PEFT's: on attention, and by `target_parameters` on the matrices of experts. With
matrices in NF4 it is experts_nf4.py's.
"""

import torch
import torch.nn.functional as F
import transformers
from torch.utils.checkpoint import checkpoint

from peers import experts_nf4
from peers.timing import measure_steps

WARM_UP = 3
PIECE = 4096  # tokens of the head's cross-entropy at once


def build_model(
    raw: dict, lora: int, target: str, device: str, quantize: str = "none"
) -> torch.nn.Module:
    """transformers' model of a config.json with random bfloat16 weights, under PEFT if lora > 0;
    with quantize "nf4" that of experts_nf4.py."""
    sinks = raw["model_type"] == "gpt_oss"
    cuda = device == "cuda"
    config = transformers.AutoConfig.for_model(**raw)
    config.use_cache = False
    torch.manual_seed(0)
    if quantize != "none":
        dtype = torch.bfloat16 if cuda else torch.float32
        model = experts_nf4.draw_packed(config, lora, target, device, dtype)
        return checkpoint_blocks(model)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config,
            dtype=torch.bfloat16 if cuda else torch.float32,
            attn_implementation=("flex_attention" if cuda else "eager") if sinks else "sdpa",
            experts_implementation="grouped_mm",
        )
    checkpoint_blocks(model)
    if lora:
        import peft

        everything = target == "all-linear"
        experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        settings = peft.LoraConfig(
            r=lora,
            lora_alpha=2 * lora,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            target_parameters=experts if everything else None,
            task_type="CAUSAL_LM",
        )
        model = peft.get_peft_model(model, settings).base_model.model
        model.enable_input_require_grads()
    return model


def checkpoint_blocks(model):
    """The model, whose blocks are computed again in the backward pass."""
    switch = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    switch({"use_reentrant": False})
    return model.train()


def piece_loss(hidden, head, targets):
    """Sum of -log p of a piece of tokens, in float32."""
    return F.cross_entropy((hidden @ head.T).float(), targets, reduction="sum")


class Step:
    """A whole optimizer step on rows of one document each."""

    def __init__(self, model, tokens, compile: bool):
        self.model, self.tokens = model, tokens
        torch._dynamo.config.cache_size_limit = 64  # unpacking is compiled in any case
        if compile:
            for layer in model.model.layers:  # one compilation serves all
                layer.compile(dynamic=False)
        self.piece = torch.compile(piece_loss, dynamic=False) if compile else piece_loss
        trained = [p for p in model.parameters() if p.requires_grad]
        self.trained = trained
        self.optimizer = torch.optim.AdamW(trained, 1e-5, weight_decay=0.0, fused=tokens.is_cuda)

    def loss(self):
        """The mean over all tokens that have one before them."""
        hidden = self.model.model(input_ids=self.tokens).last_hidden_state
        hidden, targets = hidden[:, :-1].flatten(0, 1), self.tokens[:, 1:].flatten()
        total = 0.0
        for x, y in zip(hidden.split(PIECE), targets.split(PIECE), strict=True):
            total = total + checkpoint(
                self.piece, x, self.model.lm_head.weight, y, use_reentrant=False
            )
        return total / targets.numel()

    def run(self):
        """Run a step and return the mean loss, still on the device."""
        loss = self.loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def measure(
    raw: dict, tokens, lora: int, target: str, timed: int, compile: bool, quantize: str
) -> dict:
    """Seconds a step and the allocator's peaks; tokens int64 [rows, T], numpy."""
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    model = build_model(raw, lora, target, device, quantize)
    step = Step(model, torch.from_numpy(tokens).to(device), compile and cuda)
    row = measure_steps(step.run, WARM_UP, timed, cuda, wait=True)
    row["trained"] = sum(p.numel() for p in step.trained)
    return row | {
        "version": f"torch {torch.__version__}, transformers {transformers.__version__}",
    }
