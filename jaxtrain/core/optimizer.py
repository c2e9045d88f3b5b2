"""Optimizers and schedules from optax, chosen and masked by the config's plain numbers."""

import inspect
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain import plugins
from jaxtrain.config import OptimConfig
from jaxtrain.config.model import OPTIMIZERS, SCHEDULES
from jaxtrain.errors import UserError
from jaxtrain.layers.linear import ClippedLinear
from jaxtrain.models.parameters import Params


def build_schedule(optim: OptimConfig, total_steps: int) -> optax.Schedule:
    """Learning rate by step: linear warm-up from 0 to the peak, then the chosen shape.

    The first update (step 0) already has a rate above 0: warm-up over n steps gives step i the
    share (i + 1) / n of the peak. A decay meets min_lr one step after the last, so that no update
    is wasted on a rate of 0.
    """
    peak = optim.learning_rate
    warmup = optim.warmup_steps
    if warmup is None:
        warmup = round((optim.warmup_ratio or 0.0) * total_steps)
    floor = optim.min_lr if optim.min_lr is not None else peak * (optim.min_lr_ratio or 0.0)
    if optim.lr_scheduler not in SCHEDULES:
        facts = {"learning_rate": peak, "total_steps": total_steps}
        facts |= {"warmup_steps": warmup, "min_lr": floor}
        return make_outside("schedules", "lr_scheduler", "scheduler_options", optim, facts)
    span = max(total_steps - warmup, 1)
    decay = max(round(optim.decay_ratio * total_steps), 1)

    def schedule(step):
        step = jnp.asarray(step, jnp.float32)
        progress = jnp.clip((step - warmup) / span, 0.0, 1.0)
        match optim.lr_scheduler:
            case "constant":
                rate = jnp.full_like(step, peak)
            case "linear":
                rate = peak + (floor - peak) * progress
            case "cosine":
                rate = floor + (peak - floor) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
            case "inverse_sqrt":
                # T5's form: peak * sqrt(n / step) with n the length of the warm-up.
                start = max(warmup, 1)
                rate = jnp.maximum(peak * jnp.sqrt(start / jnp.maximum(step + 1, start)), floor)
            case "wsd":
                remaining = jnp.clip((total_steps - step) / decay, 0.0, 1.0)
                rate = floor + (peak - floor) * decay_share(optim.wsd_decay, remaining)
        ramp = jnp.minimum((step + 1.0) / warmup, 1.0) if warmup else 1.0
        return jnp.where(step < warmup, peak * ramp, rate)

    return schedule


def decay_share(shape: str, remaining):
    """Return the share of the peak above the floor with `remaining` (1 to 0) of the decay to go.

    The shapes of warmup-stable-decay as compared by Hägele et al. 2024 (arXiv 2405.18392).
    """
    match shape:
        case "linear":
            return remaining
        case "cosine":
            return 0.5 * (1.0 + jnp.cos(jnp.pi * (1.0 - remaining)))
        case "exponential":
            # Down to a hundredth, shifted so that the last step meets the floor exactly.
            tail = 0.01
            return (tail ** (1.0 - remaining) - tail) / (1.0 - tail)
        case "one_minus_sqrt":
            return 1.0 - jnp.sqrt(1.0 - remaining)
    raise AssertionError(shape)


def build_optimizer(
    optim: OptimConfig, schedule: optax.Schedule, params: Params, groups: Any = None
) -> optax.GradientTransformation:
    """Build the named optimizer with its weight-decay mask and per-parameter rates. The step clips
    gradients itself. groups: ParameterGroups, with rates and what is trained. Raises UserError for
    rates of parameters that are not trained."""
    factors: dict[str, Any] = {path: rate_factor(path, optim) for path in params}
    for key, (concerned, needed) in RATES.items():
        if getattr(optim, key) is not None and not any(map(concerned, params)):
            raise UserError(
                f"optim.{key} is the rate of what is not trained here; remove it, or set {needed}"
            )
    base = _named(optim, schedule, params)
    if groups is not None:
        factors = {path: groups.factor(path, factor) for path, factor in factors.items()}
        labels: Any = {path: "frozen" if groups.is_frozen(path) else "trained" for path in params}
        if "frozen" in labels.values():  # without moments
            base = optax.partition({"trained": base, "frozen": optax.set_to_zero()}, labels)
    if optim.moments != "params":
        from jaxtrain.core.moments import store_moments

        base = store_moments(base, optim.moments, stays_float32)

    def scale(updates: Any, _: Any) -> Any:
        return {path: (u * factors[path]).astype(u.dtype) for path, u in updates.items()}

    # A stage more, even an idle one, would be another tree of states: checkpoints of runs without
    # it could not be restored.
    if not all(np.all(factor == 1) for factor in factors.values()):
        # Every optimizer multiplies by its rate last, weight decay included.
        base = optax.chain(base, optax.stateless(scale))
    if optim.name == "schedule_free_adamw":
        # Experts' biases for their choice have no gradient: the step moves them itself.
        paths = [path for path in params if np.any(factors[path]) and "choice_bias" not in path]
        return average_steps(base, schedule, optim.beta1, paths)
    return base


class AverageState(NamedTuple):
    """State of `average_steps`."""

    count: jax.Array
    """int32 number of updates."""
    top_rate: jax.Array
    """float32: the highest learning rate so far."""
    weight_sum: jax.Array
    """float32: sum of the weights of all steps."""
    beta: jax.Array
    """float32: share of the average in the point where gradients are taken."""
    z: Params
    """Where `inner` goes, by path, in the parameters' dtypes."""
    inner: Any


def average_steps(
    inner: optax.GradientTransformation,
    schedule: optax.Schedule,
    beta: float,
    paths: Collection[str],
) -> optax.GradientTransformation:
    """Make `inner` schedule-free (Defazio et al. 2024, arXiv:2405.15682): z takes its steps, the
    parameters x are the average of all z by the square of the highest rate so far, and gradients
    are those at `gradient_point`, between both.

    A rate that is a constant multiple of the schedule's leaves the weights as they are. inner:
    without momentum. paths: what is averaged; the rest takes the steps of `inner` itself.
    (optax.contrib.schedule_free has y for parameters and divides to get at x, which loses bits.)
    """

    def init(params: Any) -> AverageState:
        zero = jnp.zeros((), jnp.float32)
        # Copies: the step donates the state, two leaves of which must not share a buffer.
        z = {path: jnp.copy(params[path]) for path in paths}
        share = jnp.asarray(beta, jnp.float32)
        return AverageState(jnp.zeros((), jnp.int32), zero, zero, share, z, inner.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, AverageState]:
        point: Any = gradient_point(state, params)
        moved, inner_state = inner.update(updates, state.inner, point)
        moves: Any = dict(moved)  # pyright: ignore[reportArgumentType]
        top = jnp.maximum(state.top_rate, schedule(state.count))
        total = state.weight_sum + top**2
        share = jnp.where(total > 0, top**2 / total, 0.0)
        z = {path: (old + moves[path]).astype(old.dtype) for path, old in state.z.items()}
        for path, new in z.items():
            moves[path] = (share * (new - params[path])).astype(params[path].dtype)
        return moves, AverageState(state.count + 1, top, total, state.beta, z, inner_state)

    return optax.GradientTransformation(init, update)


def gradient_point(opt_state: Any, params: Params) -> Params:
    """Return the parameters at which a step takes gradients: the trained ones, but for
    `average_steps` a mixture with z, y = beta x + (1 - beta) z."""
    if not isinstance(opt_state, AverageState):
        return params
    mixed, beta = dict(params), opt_state.beta
    for path, z in opt_state.z.items():
        if jax.typeof(z).memory_space == jax.memory.Space.Host:  # optim.offload
            z = jax.device_put(z, jax.memory.Space.Device)
        mixed[path] = (beta * params[path] + (1.0 - beta) * z).astype(z.dtype)
    return mixed


def rate_factor(path: str, optim: OptimConfig) -> float:
    """Return a parameter's learning rate over optim.learning_rate. LoRA+ (Hayou et al. 2024,
    arXiv:2402.12354): B has its own rate, which DoRA's magnitudes share, as in PEFT."""
    factor = (optim.lora_plus_ratio or 1.0) if is_second(path) else 1.0
    for key in ("embedding_lr", "tower_lr", "projector_lr"):
        if (rate := getattr(optim, key)) is not None and RATES[key][0](path):
            factor *= rate / optim.learning_rate
    return factor


def stays_float32(path: str) -> bool:
    """Return whether the moments of a parameter are never stored in 8 or 4 bits."""
    return is_vector(path) or path.endswith("embed.embedding")


def is_second(path: str) -> bool:
    """Return whether a parameter is an adapter's B or DoRA's magnitude."""
    return path.endswith((".adapter.b", ".adapter.magnitude"))


def is_tower(path: str) -> bool:
    """Return whether a parameter belongs to the tower for images."""
    return path.startswith("vision.tower.")


def is_projector(path: str) -> bool:
    """Return whether a parameter belongs to the projector behind such a tower."""
    return path.startswith("vision.projector.")


def _named(
    optim: OptimConfig, schedule: optax.Schedule, params: Params
) -> optax.GradientTransformation:
    mask = {path: decays(path, value, optim) for path, value in params.items()}
    decay = optim.weight_decay
    if optim.name not in OPTIMIZERS:
        facts = {"weight_decay": decay, "mask": mask}
        optimizer = make_outside("optimizers", "name", "options", optim, facts, schedule)
        return name_errors(optimizer, f"optim.name {optim.name!r}")
    match optim.name:
        case "adamw":
            return optax.adamw(
                schedule, optim.beta1, optim.beta2, optim.eps, weight_decay=decay, mask=mask
            )
        case "schedule_free_adamw":
            return optax.chain(
                # AdamW without its first moment.
                optax.scale_by_rms(optim.beta2, optim.eps, eps_in_sqrt=False, bias_correction=True),
                optax.add_decayed_weights(decay, mask),
                optax.scale_by_learning_rate(schedule),
            )
        case "lion":
            return optax.lion(schedule, optim.beta1, optim.beta2, weight_decay=decay, mask=mask)
        case "adafactor":
            return optax.chain(
                # optax.adafactor decays weights after the rate is applied, hence by a share of its
                # own, and scales by the size of parameters.
                optax.scale_by_factored_rms(),
                optax.clip_by_block_rms(1.0),
                optax.add_decayed_weights(decay, mask),
                optax.scale_by_learning_rate(schedule),
            )
        case "sgd":
            return optax.chain(
                optax.trace(optim.beta1) if optim.beta1 else optax.identity(),
                optax.add_decayed_weights(decay, mask),
                optax.scale_by_learning_rate(schedule),
            )
        case "muon":
            return _muon(optim, schedule, params, mask)
    raise AssertionError(optim.name)


def _muon(
    optim: OptimConfig, schedule: optax.Schedule, params: Params, mask: dict[str, bool]
) -> optax.GradientTransformation:
    """Build Muon for the matrices and AdamW for all else, with one weight-decay mask.

    optax.contrib.muon decays every parameter of its AdamW or none, and gives AdamW Muon's Nesterov
    momentum, so it is taken apart here; the state has the form of its state.
    """
    numbers = {path: muon_dimensions(path, value) for path, value in params.items()}
    matrices = {path: n if n is not None else optax.MaskedNode() for path, n in numbers.items()}

    def scale(updates: Any, _: Any) -> Any:
        # Updates as large as adamw's (arXiv 2502.16982), so one learning rate fits both.
        return jax.tree.map(lambda update: 0.2 * max(update.shape[-2:]) ** 0.5 * update, updates)

    transforms: dict[Any, Any] = {
        "muon": optax.chain(
            optax.contrib.scale_by_muon(
                beta=optim.beta1, eps=optim.eps, weight_dimension_numbers=matrices
            ),
            optax.stateless(scale),
            optax.add_decayed_weights(optim.weight_decay, mask),
            optax.scale_by_learning_rate(schedule),
        ),
        "adam": optax.adamw(
            schedule,
            optim.beta1,
            optim.beta2,
            optim.eps,
            weight_decay=optim.weight_decay,
            mask=mask,
        ),
    }
    labels: dict[Any, str] = {path: "adam" if n is None else "muon" for path, n in numbers.items()}
    return optax.partition(transforms, labels)


def make_outside(
    group: str, name: str, options: str, optim: OptimConfig, facts: dict[str, Any], *args: Any
) -> Any:
    """Call a plugin's factory with `args`, the facts that its signature names, and the options of
    the config, which take precedence. Raises UserError."""
    from jaxtrain.config.construct import make

    key = f"optim.{name}"
    factory = plugins.find(group, getattr(optim, name), {}, key=key)
    named = inspect.signature(factory).parameters
    taken = {fact: value for fact, value in facts.items() if fact in named}
    return make(
        factory,
        *args,
        options={**taken, **getattr(optim, options)},
        key=f"{key} {getattr(optim, name)!r}",
        options_key=f"optim.{options}",
        argument_names="learning_rate" if args else "",
    )


def name_errors(stage: Any, key: str) -> optax.GradientTransformation:
    """Return a plugin's transformation whose errors are UserErrors that name its key. Raises
    UserError for what is no transformation."""

    def named(method: str) -> Callable[..., Any]:
        call = getattr(stage, method, None)
        if not callable(call):
            raise UserError(
                f"{key} makes a {type(stage).__name__} without {method!r}; an optimizer is an optax"
                " GradientTransformation"
            )

        def run(*arguments: Any) -> Any:
            try:
                return call(*arguments)
            except plugins.FAILURES as error:  # the border: whatever foreign code may raise
                described = plugins.describe(error)
                raise UserError(f"{key} fails in its {method}: {described}") from error

        return run

    return optax.GradientTransformation(named("init"), named("update"))


VECTORS = (
    *("bias", "scale", "magnitude", "A_log", "D", "dt_bias", "conv", "conv_bias"),
    *("q_conv", "k_conv", "v_conv"),
    *("choice_bias", "expert_scale", "layer_scalar", "sinks", "position_table"),
    *("alpha_p", "alpha_n", "beta", "eps"),
    *("std_bias", "std_scale", *ClippedLinear.limits),
)


def is_vector(path: str) -> bool:
    """Return whether a parameter is a norm scale, a bias, a factor of a layer or of each expert, a
    decay rate, the taps of a convolution by channel, DoRA's magnitude (stacked: more axes), the
    learned positions of a tower, the numbers of an activation, or a limit."""
    name = path.rsplit(".", 1)[-1]
    return name in VECTORS or "norm" in name


def is_embedding(path: str) -> bool:
    """Return whether a parameter is an embedding or an output head of any kind."""
    tables = ("embed", "head", "lm_head", "position_embed", "score")
    return any(part in tables for part in path.split("."))


RATES: dict[str, tuple[Callable[[str], bool], str]] = {
    "lora_plus_ratio": (is_second, 'adapter.kind "lora" or "dora"'),
    "embedding_lr": (is_embedding, "adapter.train_embeddings or adapter.train_head"),
    "tower_lr": (is_tower, 'model.vision.train "all" (with an adapter: target "tower")'),
    "projector_lr": (
        is_projector,
        'model.vision.train "projector" or "all" (with an adapter: target "projector")',
    ),
}
"""Keys of section optim that are rates of some parameters: whether a path is one of them, and what
trains them."""


def decays(path: str, value, optim: OptimConfig) -> bool:
    """Return whether weight decay applies to a parameter."""
    return not is_vector(path) and (optim.decay_embeddings or not is_embedding(path))


def muon_dimensions(path: str, value) -> optax.contrib.MuonDimensionNumbers | None:
    """Return the axes of a weight that form the matrix muon orthogonalizes; None for adamw."""
    if is_vector(path) or is_embedding(path) or value.ndim < 2:
        return None
    axes = value.ndim
    return optax.contrib.MuonDimensionNumbers((axes - 2,), (axes - 1,))


def clip(grads: Params, max_norm: float | None) -> tuple[Params, jax.Array]:
    """Return gradients with a global norm of at most `max_norm`, None: any, and the norm before."""
    norm = optax.tree.norm(grads)
    if max_norm is None:
        return grads, norm
    scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-12))
    return jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads), norm
