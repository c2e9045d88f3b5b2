"""TRL's losses of pairs and labels, called without its trainers, on log-probs out of a table.

Imported by tests when they run: TRL takes long to import.
"""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import torch
from trl import DPOTrainer, KTOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.utils import FusedCausalLMOutput

LENGTHS = [(3, 5), (4, 2), (1, 6), (5, 5)]
"""Tokens of the chosen and rejected answer of each pair."""
PROMPT = 2
NUM_ANSWER_TOKENS = sum(map(sum, LENGTHS))
FIRST = PROMPT * len(LENGTHS)
"""Answers' token ids begin here; each token of the pairs has its own."""


def make_rows():
    """[(prompt, chosen, rejected)] of token ids."""
    ids = iter(range(FIRST, FIRST + NUM_ANSWER_TOKENS))
    return [
        (
            list(range(PROMPT * i, PROMPT * i + PROMPT)),
            [next(ids) for _ in range(chosen)],
            [next(ids) for _ in range(rejected)],
        )
        for i, (chosen, rejected) in enumerate(LENGTHS)
    ]


class Table(torch.nn.Module):
    """A model for TRL that knows nothing but log-probs by token."""

    is_gradient_checkpointing = False

    def __init__(self, logp, peak, dtype):
        super().__init__()
        self.logp = torch.nn.Parameter(torch.tensor(logp, dtype=dtype))
        self.peak = torch.tensor(peak, dtype=dtype)

    def forward(self, input_ids, attention_mask, labels, **kwargs):
        mask = (labels[:, 1:] != -100).to(self.logp.dtype)
        zeros = torch.zeros_like(mask)
        return FusedCausalLMOutput(
            log_probs=self.logp[input_ids[:, 1:]] * mask,
            entropy=zeros,
            log_sum_sq_probs=self.peak[input_ids[:, 1:]] * mask,
            mean_logits=zeros,
            is_top1=mask.bool(),
        )


def stand_in(tables, dtype="float64", **options):
    """(what TRL's methods see as the trainer, its policy)."""
    policy, reference = (Table(table, tables[2], getattr(torch, dtype)) for table in tables[:2])

    def itself(x):
        return x

    accelerator = SimpleNamespace(
        device="cpu", gather=itself, gather_for_metrics=itself, unwrap_model=itself
    )
    trainer = SimpleNamespace(
        model=policy,
        ref_model=reference,
        accelerator=accelerator,
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        f_alpha_divergence_coef=0.5,
        label_smoothing=0.0,
        use_weighting=False,
        beta=0.1,
        loss_weights=[1.0],
        args=SimpleNamespace(discopop_tau=0.05, gradient_checkpointing_kwargs=None),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    vars(trainer).update(options)
    return trainer, policy


def pad(rows):
    """input_ids, attention_mask and completion_mask of (prompt, answer)."""
    width = max(len(p) + len(a) for p, a in rows)
    ids, attention, completion = np.zeros((3, len(rows), width), np.int64)
    for i, (prompt, answer) in enumerate(rows):
        n = len(prompt) + len(answer)
        ids[i, :n], attention[i, :n] = prompt + answer, 1
        completion[i, len(prompt) : n] = 1
    names = ("input_ids", "attention_mask", "completion_mask")
    return {n: torch.tensor(v) for n, v in zip(names, (ids, attention, completion), strict=True)}


def of_trl(tables, loss="sigmoid", **options):
    """(loss, its gradient) by DPOTrainer."""
    losses = [loss] if isinstance(loss, str) else loss
    options.setdefault("loss_weights", [1.0] * len(losses))
    trainer, policy = stand_in(tables, loss_types=losses, **options)
    rows = make_rows()
    inputs = pad([(p, c) for p, c, _ in rows] + [(p, r) for p, _, r in rows])
    value = DPOTrainer._compute_loss(trainer, policy, inputs, False)
    value.backward()
    return float(value.detach()), policy.logp.grad.numpy()


def of_trl_labels(tables, labels, loss, **options):
    """(loss, its gradient, the baseline) by KTOTrainer."""
    trainer, policy = stand_in(
        tables,
        loss_type=loss,
        calculate_KL=loss == "kto",
        _compute_kl_logps=lambda model, batch: KTOTrainer._compute_kl_logps(trainer, model, batch),
        **options,
    )
    rows = [(prompt, chosen) for prompt, chosen, _ in make_rows()]
    rotated = [(prompt, rows[i - 1][1]) for i, (prompt, _) in enumerate(rows)]
    inputs = pad(rows) | {f"KL_{name}": value for name, value in pad(rotated).items()}
    inputs["label"] = torch.tensor(labels)
    value = KTOTrainer._compute_loss(trainer, policy, inputs, False)
    value.backward()
    return float(value.detach()), policy.logp.grad.numpy(), trainer._metrics["train"]["kl"][0]


def sums_of(policy):
    """(chosen, rejected) sums and lengths of the rows."""
    rows = make_rows()
    return [
        (
            torch.stack([policy[torch.tensor(row[side])].sum() for row in rows]),
            torch.tensor([len(row[side]) for row in rows]),
        )
        for side in (1, 2)
    ]


def of_trl_without_reference(tables, loss, *, means, alpha=0.0, **options):
    """(loss, its gradient) by CPOTrainer."""
    policy = torch.tensor(tables[0], requires_grad=True)
    (chosen, long), (rejected, short) = sums_of(policy)
    likelihood = -chosen.sum() / long.sum()
    if means:
        chosen, rejected = chosen / long, rejected / short
    trainer = SimpleNamespace(
        loss_type=loss,
        alpha=alpha,
        simpo_gamma=0.5,
        accelerator=SimpleNamespace(device="cpu"),
        **options,
    )
    losses, *_ = CPOTrainer.cpo_loss(trainer, chosen, rejected)
    value = losses.mean() + options["cpo_alpha"] * likelihood
    value.backward()
    return float(value.detach()), policy.grad.numpy()


def odds_of_trl(chosen, rejected, beta):
    """Odds that ORPOTrainer computes from mean log-probs."""
    trainer = SimpleNamespace(beta=beta, accelerator=SimpleNamespace(device="cpu"))
    return ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)


def of_trl_orpo(tables, beta):
    """(loss, its gradient) by ORPOTrainer; the likelihood is over prompt and answer but for the
    first token."""
    policy = torch.tensor(tables[0], requires_grad=True)
    (chosen, long), (rejected, short) = sums_of(policy)
    prompts = sum(policy[torch.tensor(row[0][1:])].sum() for row in make_rows())
    likelihood = -(chosen.sum() + prompts) / (long.sum() + len(LENGTHS) * (PROMPT - 1))
    losses, *_ = odds_of_trl(chosen / long, rejected / short, beta)
    value = likelihood - losses.mean()
    value.backward()
    return float(value.detach()), policy.grad.numpy()
