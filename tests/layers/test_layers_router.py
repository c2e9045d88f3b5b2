"""`choose` against a loop in numpy, and against the routers of transformers."""

import importlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain.layers.linear import LayerInit
from jaxtrain.layers.norm import RMSNorm
from jaxtrain.layers.router import Router, RoutingOptions, choose

T, D, E, TOP = 60, 16, 12, 3


def choose_in_numpy(logits, routing, bias, expert_scale):
    """(experts, gates) of one token, in float64."""
    z = np.asarray(logits, np.float64)
    if routing.logit_cap is not None:
        z = routing.logit_cap * np.tanh(z / routing.logit_cap)
    if routing.score == "softmax":
        s = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    elif routing.score == "sigmoid":
        s = 1 / (1 + np.exp(-z))
    else:
        s = np.sqrt(np.log1p(np.exp(z)))
    expected = s if bias is None else s + np.asarray(bias, np.float64)
    groups = np.split(np.arange(len(z)), routing.groups)
    strength = [np.sort(expected[group])[::-1][: routing.strength].sum() for group in groups]
    taken = np.argsort(strength)[::-1][: routing.top_groups]
    candidates = np.concatenate([groups[g] for g in taken])
    experts = candidates[np.argsort(expected[candidates])[::-1]][: routing.top]
    gates = s[experts]
    if routing.normalize:
        gates = gates / (max(gates.sum(), routing.min_sum) + routing.eps)
    gates = gates * routing.scale
    return experts, gates if expert_scale is None else gates * expert_scale[experts]


def draw_options(rng):
    """Options that fit together, for 12 experts."""
    groups = int(rng.choice([1, 2, 3, 4]))
    top_groups = int(rng.integers(1, groups + 1))
    top = int(rng.integers(1, min(5, 12 // groups * top_groups) + 1))
    routing = RoutingOptions(
        top=top,
        score=str(rng.choice(["softmax", "sigmoid", "sqrt_softplus"])),
        groups=groups,
        top_groups=top_groups,
        strength=int(rng.choice([1, 2])),
        normalize=bool(rng.integers(2)),
        min_sum=float(rng.choice([0, 0.3])),
        eps=float(rng.choice([1e-20, 1e-6, 0.1])),
        scale=float(rng.choice([1, 2.5])),
        logit_cap=[None, 1.5][rng.integers(2)],
    )
    # Mostly negative, so that a candidate which is not open beats the open ones if it is at 0.
    bias = rng.uniform(-2, 0.2, E).astype(np.float32) if rng.integers(2) else None
    scale = rng.uniform(0.5, 2, E).astype(np.float32) if rng.integers(2) else None
    return routing, bias, scale


@pytest.mark.slow
@pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.thorough)])
def test_choose_equals_a_loop(count):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        for _ in range(count):
            routing, bias, scale = draw_options(rng)
            logits = 2 * rng.standard_normal((3, E))
            actual = choose(jnp.asarray(logits), routing, choice_bias=bias, expert_scale=scale)
            for row, z in enumerate(logits):
                experts, gates = choose_in_numpy(z, routing, bias, scale)
                np.testing.assert_array_equal(actual.experts[row], experts, str(routing))
                np.testing.assert_allclose(
                    actual.gates[row], gates, rtol=1e-12, err_msg=str(routing)
                )
            np.testing.assert_allclose(actual.probs.sum(-1), 1, rtol=1e-12)


NUMBERS = {
    "hidden_size": D,
    "top_k_experts": TOP,
    "num_experts_per_tok": TOP,
    "num_experts": E,
    "num_local_experts": E,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "route_scale": 2.5,
    "moe_topk": TOP,
    "moe_norm_min": 0.6,
    "use_expert_bias": True,
    "topk_method": "group_limited_greedy",
    "moe_router_logit_softcapping": 1.5,
    "scoring_func": "sqrtsoftplus",
    "rms_norm_eps": 1e-3,
}
"""What one or another of their routers reads of its config."""
GROUPED = {"groups": 4, "top_groups": 2}
CASES = {
    "qwen3_moe": ("Qwen3MoeTopKRouter", {"normalize": True}, {}),
    "olmoe": ("OlmoeTopKRouter", {}, {}),
    "mixtral": ("MixtralTopKRouter", {"normalize": True}, {}),
    "gpt_oss": ("GptOssTopKRouter", {"normalize": True}, {"logit_bias": True}),
    "granitemoe": ("GraniteMoeTopKRouter", {"normalize": True}, {}),
    "hunyuan_v1_moe": ("HunYuanMoEV1Gate", {"normalize": True}, {"wide": True}),
    "gemma4": (
        "Gemma4TextRouter",
        {"normalize": True},
        {"expert_scale": True, "norm": RMSNorm(D, eps=1e-3), "input_scale": D**-0.5},
    ),
    "deepseek_v2": (
        "DeepseekV2TopkRouter",
        {**GROUPED, "strength": 1, "scale": 2.5},
        {"wide": True},
    ),
    "mistral4": ("Mistral4TopkRouter", {**GROUPED, "normalize": True, "scale": 2.5}, {}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeTopKRouter",
        {"normalize": True, "min_sum": 0.6},
        {"choice_bias": True, "wide": True},
    ),
    "deepseek_v3": (
        "DeepseekV3TopkRouter",
        {"score": "sigmoid", **GROUPED, "normalize": True, "scale": 2.5},
        {"choice_bias": True, "wide": True},
    ),
    "minimax_m2": (
        "MiniMaxM2TopKRouter",
        {"score": "sigmoid", "normalize": True},
        {"choice_bias": True},
    ),
    "afmoe": (
        "AfmoeTokenChoiceRouter",
        {"score": "sigmoid", "normalize": True, "scale": 2.5},
        {"choice_bias": True},
    ),
    "lfm2_moe": (
        "Lfm2MoeTopKRouter",
        {"score": "sigmoid", "normalize": True, "eps": 1e-6, "scale": 2.5},
        {"choice_bias": True},
    ),
    "laguna": (
        "LagunaTopKRouter",
        {"score": "sigmoid", "normalize": True, "logit_cap": 1.5},
        {"choice_bias": True},
    ),
    "deepseek_v4": (
        "DeepseekV4TopKRouter",
        {"score": "sqrt_softplus", "normalize": True, "scale": 2.5},
        {"choice_bias": True},
    ),
}


OFTEN = ("deepseek_v3", "ernie4_5_moe", "gemma4", "gpt_oss")
"""Those that run in every test; together they have nearly all options."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in OFTEN else pytest.mark.slow) for n in CASES]
)
def test_routers_equal_those_of_transformers(name):
    """Experts are equal; gates and gradients agree to float32 rounding."""
    torch = pytest.importorskip("torch", reason="parity needs torch")
    class_name, routing, options = CASES[name]
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    config = types.SimpleNamespace(**NUMBERS, norm_topk_prob="normalize" in routing)
    reference = getattr(module, class_name)(config).float()
    rng = np.random.default_rng(3)
    x, probe = rng.standard_normal((1, T, D), np.float32), rng.standard_normal((T, E), np.float32)
    bias = rng.uniform(-0.9, 0.1, E).astype(np.float32)
    held = {"choice_bias": bias}
    with torch.no_grad():
        for key, parameter in reference.named_parameters():
            parameter.copy_(torch.from_numpy(rng.uniform(-0.9, 0.9, parameter.shape)))
            if parameter.ndim == 2 and not key.endswith("e_score_correction_bias"):
                held["kernel"], kernel = parameter.detach().numpy().T, parameter
        for key, tensor in reference.state_dict().items():
            result = {"per_expert_scale": "expert_scale", "scale": "norm.scale", "bias": "bias"}
            if key.endswith("e_score_correction_bias"):
                tensor.copy_(torch.from_numpy(bias).reshape(tensor.shape))
            elif key in result:
                held[result[key]] = tensor.numpy()
    arguments = torch.from_numpy(x).requires_grad_()
    outside = name in ("minimax_m2", "afmoe", "lfm2_moe")  # the bias is the MoE's
    flat = arguments if name in ("minimax_m2", "afmoe") else arguments[0]
    _, gates, experts = reference(flat, torch.from_numpy(bias)) if outside else reference(flat)
    spread = torch.zeros(T, E).scatter(1, experts, gates.float())
    (spread * torch.from_numpy(probe)).sum().backward()

    router = Router(
        D, E, RoutingOptions(top=TOP, **routing), **options, init=LayerInit(nnx.Rngs(0))
    )
    for path, leaf in nnx.to_flat_state(nnx.state(router)):
        leaf.set_value(jnp.asarray(held[".".join(path)]))
        nnx.update(router, nnx.from_flat_state([(path, leaf)]))
    graphdef, state = nnx.split(router)

    def loss(state, x):
        choice = nnx.merge(graphdef, state)(x[0])
        spread = jnp.zeros((T, E)).at[jnp.arange(T)[:, None], choice.experts].set(choice.gates)
        return (spread * probe).sum(), spread

    with jax.disable_jit():
        grads, actual = jax.grad(loss, (0, 1), has_aux=True)(state, jnp.asarray(x))
    theirs_TE = spread.detach().numpy()
    np.testing.assert_array_equal(actual != 0, theirs_TE != 0)
    np.testing.assert_allclose(actual, theirs_TE, rtol=1e-6, atol=1e-6)
    # Products of a few roundings, summed over experts and tokens.
    for local, second in ((grads[1], arguments.grad), (grads[0]["kernel"][...], kernel.grad.T)):
        np.testing.assert_allclose(local, second, atol=2e-6 * float(abs(second).max()), rtol=1e-5)
    if router.choice_bias is not None:
        assert not np.asarray(grads[0]["choice_bias"][...]).any()


def test_a_softmax_over_the_chosen_is_renormalized_probabilities():
    """Mixtral's paper says the first, transformers computes the second, and so do we."""
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((T, E)), jnp.float32)
    choice = choose(logits, RoutingOptions(top=TOP, normalize=True))
    top, experts = jax.lax.top_k(logits, TOP)
    np.testing.assert_array_equal(choice.experts, experts)
    np.testing.assert_allclose(choice.gates, jax.nn.softmax(top, -1), rtol=1e-5)
    np.testing.assert_allclose(choice.lse, jax.nn.logsumexp(logits, -1), rtol=1e-6)


def test_given_experts_take_gates_of_these_logits():
    """But for a token with a negative number or with an expert twice."""
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((4, E)), jnp.float32)
    routing = RoutingOptions(top=3, normalize=True)
    base = choose(logits, routing)
    arguments = jnp.asarray([[4, 0, 9], [1, -1, 2], [5, 3, 5], [-1, -1, -1]])
    choice = choose(logits, routing, replayed=arguments)
    np.testing.assert_array_equal(choice.experts[0], arguments[0])
    np.testing.assert_allclose(choice.gates[0], jax.nn.softmax(logits[0, arguments[0]]), rtol=1e-5)
    for local, second in zip(choice, base, strict=True):
        np.testing.assert_array_equal(local[1:], second[1:])
    np.testing.assert_array_equal(choice.probs, base.probs)


def test_the_choice_bias_is_wide_and_logits_are_never_rounded():
    """With bfloat16 weights and inputs, sums are float32 and a bias moves by less than 2**-8."""
    for wide in (False, True):
        router = Router(
            D,
            E,
            RoutingOptions(top=TOP, score="sigmoid"),
            choice_bias=True,
            wide=wide,
            init=LayerInit(nnx.Rngs(0), param_dtype=jnp.bfloat16, dtype=jnp.bfloat16),
        )
        assert router.choice_bias.dtype == jnp.float32 and router.kernel.dtype == jnp.bfloat16
        x = jax.random.normal(jax.random.key(0), (5, D), jnp.bfloat16)
        exact = np.asarray(x, np.float64) @ np.asarray(router.kernel[...], np.float64)
        choice = router(x)
        assert choice.gates.dtype == jnp.float32
        gates = np.take_along_axis(1 / (1 + np.exp(-exact)), np.asarray(choice.experts), -1)
        np.testing.assert_allclose(choice.gates, gates, rtol=1e-6)
