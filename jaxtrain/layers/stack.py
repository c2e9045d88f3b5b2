"""Stack: L blocks in order, stored stacked by kind, run as scans or one by one.

The storage is the same either way, so a checkpoint does not depend on how the model was run. A scan
takes the shortest period in which layers of several kinds, windows or encodings repeat:

    local local global local local global local    two rounds of three layers, and one layer

Decoding runs the layers one by one, because each has a state of its own kind.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtrain_kernels import Context
from jaxtrain_kernels.mosaic import device_kind

from jaxtrain.distributed.mesh import HOST_MEMORY
from jaxtrain.distributed.sharding import constrain
from jaxtrain.errors import UserError
from jaxtrain.layers.linear import Linear
from jaxtrain.layers.mixer import Decoding, LayerInputs, LayerSpec, Mixer, State
from jaxtrain.layers.noise import hash_bits, set_rng_bits
from jaxtrain.layers.rope import Angles
from jaxtrain.layers.stack_params import (
    create_stacked,
    fold,
    fuse_all,
    round_kernels,
    split_leading,
    take_slices,
    unfold,
    unfold_params,
)

SAVE_DOTS = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    # Named outputs are saved in place of the matmul results that they equal or sum up: nothing
    # reads the unnamed results then, so XLA drops them and nothing is stored twice.
    jax.checkpoint_policies.save_only_these_names("adapted_out", "linear_out"),
)
SAVE_ATTENTION = jax.checkpoint_policies.save_only_these_names(
    "attention_out", "attention_lse", "mla_latent", "moe_out"
)
OFFLOAD, BLOCK_INPUT = "offload", "block_input"
REMAT: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "elementwise": jax.checkpoint_policies.save_from_both_policies(SAVE_DOTS, SAVE_ATTENTION),
    "dots": SAVE_DOTS,
    "save_attention": SAVE_ATTENTION,
    "full": jax.checkpoint_policies.nothing_saveable,
    OFFLOAD: jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[BLOCK_INPUT],
        offload_src="device",
        offload_dst=HOST_MEMORY,
    ),
}
"""Checkpoint policies by config value: save everything; matmul results and attention outputs;
matmul results; attention outputs; only the input of each block; that input in the memory of the
host. The backward pass recomputes the rest. Attention's backends, adapters, the Linears of a scan
and blocks name their results accordingly."""


@dataclasses.dataclass(frozen=True)
class StackInputs:
    """Inputs of a pass besides the hidden states."""

    context: Context
    angles: Mapping[str, Angles]
    """Rotations by name of the position encoding."""
    extra: Any = None
    """A pytree of arrays [L, ...], of which each block gets its layer's slice."""
    experts: jax.Array | None = None
    """int32 [L, B, T, k] experts of each token; slices of layers without experts are ignored."""
    side_context: Any = None
    """A pytree that all blocks get alike."""
    rng_bits: jax.Array | None = None
    """uint32 [B, T] random bits of the tokens, for blocks that draw (see layers.noise)."""
    masks: Mapping[str, Context] = dataclasses.field(default_factory=dict)
    """In the place of `context`, for layers that name one."""


@dataclasses.dataclass(frozen=True)
class DecodingStates:
    """States of all layers, and the positions of the new tokens."""

    states: Sequence[State]
    decoding: Decoding
    trial: bool = False
    """Return states for `Stack.commit`, which decides later how many tokens stay."""


class StackOutput(NamedTuple):
    """Outputs of all layers."""

    hidden: jax.Array
    """[B, T, D]."""
    captured: dict[int, jax.Array]
    """{layer: its output [B, T, D]} of the requested layers."""
    notes: dict[str, jax.Array]
    """{name: [layers, ...]} of metrics that blocks return, in the order of the layers that do."""


class TokenReplay(NamedTuple):
    """Inputs from which a layer without a trial state reads the accepted tokens again."""

    state: State
    """State before the trial."""
    x: jax.Array
    """[B, T, D] input of the block."""


class LayerSegment(NamedTuple):
    """Layers that run as one scan, or a single layer."""

    start: int
    period: int
    """Layers that differ from each other."""
    repeats: int

    @property
    def layers(self) -> range:
        return range(self.start, self.start + self.period * self.repeats)


class Stack(nnx.Module):
    """Blocks (x_BTD, LayerInputs, state) -> (x_BTD, state, {name: array}), in the order of `specs`.

    `make_block(kind, rngs)` creates one. A block has a `mixer`, the Mixer that its state belongs
    to. only: index, within each kind, of the single layer to create, to initialize weights in
    pieces.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        make_block: Callable[[str, nnx.Rngs], nnx.Module],
        *,
        remat: str = "none",
        scan: bool = True,
        only: int | jax.Array | None = None,
        rngs: nnx.Rngs,
    ):
        if remat not in REMAT:
            raise UserError(f"remat={remat!r} is unknown; choose one of {sorted(REMAT)}")
        self.specs = tuple(specs)
        self.remat = remat
        self.scan = scan
        self.exact: Any = None
        """The `layers.exact.ExactOps` that blocks run with; None: blocks run by themselves."""
        self.layers = nnx.data(None)
        # A key per layer, drawn for all of them even with `only`: the weights of a layer do not
        # depend on how many are created at once.
        keys = jax.random.split(rngs.params(), len(self.specs))
        for kind in dict.fromkeys(spec.kind for spec in self.specs):
            assert not hasattr(self, kind), f"{kind!r} is no name for a kind of layers"
            layers = [layer for layer, spec in enumerate(self.specs) if spec.kind == kind]
            make, kind_keys = functools.partial(make_block, kind), keys[np.array(layers)]
            kind_keys = kind_keys if only is None else kind_keys[only][None]
            setattr(self, kind, create_stacked(make, kind_keys))

    def __call__(
        self,
        x_BTD: jax.Array,
        inputs: StackInputs,
        cache: DecodingStates | None = None,
        *,
        capture: Sequence[int] = (),
        depth: int | None = None,
    ) -> tuple[StackOutput, tuple[State, ...]]:
        """Return (outputs, states after the tokens; none without a cache, as in training).

        capture: layers whose outputs are returned. depth: layers from this one on may be skipped;
        `hidden` is meaningless then.
        """
        num_layers = len(self.specs)
        assert all(0 <= layer < num_layers for layer in capture), f"{capture} of {num_layers}"
        if self.scan and self.layers is None and cache is None:
            segments = find_segments(self.specs)
        else:
            segments = single_layers(num_layers)
        blocks = self._split_blocks(segments)
        layer_numbers = None
        if inputs.rng_bits is not None:
            layer_numbers = jnp.arange(num_layers, dtype=jnp.uint32)
        segment_inputs = split_leading(
            (inputs.extra, inputs.experts, layer_numbers),
            [len(segment.layers) for segment in segments],
        )
        runner = self._make_runner(inputs, cache, blocks)
        captured, notes, new_states, exported = {}, {}, [], {}
        for segment, block, layer_inputs in zip(segments, blocks, segment_inputs, strict=True):
            if depth is not None and segment.start >= depth:
                break
            captures = [layer for layer in segment.layers if layer in capture]
            if segment.repeats == 1:
                spec = self.specs[segment.start]
                graphdef, params = block[spec.kind]
                params, layer_inputs = jax.tree.map(lambda x: x.squeeze(0), (params, layer_inputs))
                run_block = runner(graphdef, spec, scanned=False)
                x_BTD, state, layer_export, layer_notes = run_block(
                    x_BTD,
                    params,
                    layer_inputs,
                    None if cache is None else cache.states[segment.start],
                    exported.get(spec.imports),
                )
                new_states.append(state)
                if spec.exports:
                    exported[spec.exports] = layer_export
                captured |= dict.fromkeys(captures, x_BTD)
                segment_notes = {name: value[None] for name, value in layer_notes.items()}
            else:
                plan = self._plan_scan(segment, captures, depth)
                runners = [
                    functools.partial(
                        runner(block[spec.kind][0], spec, scanned=True),
                        state=None,
                        imported=exported.get(spec.imports),
                    )
                    for spec in plan.specs
                ]
                params = {kind: state for kind, (_, state) in block.items()}
                x_BTD, outputs, segment_notes = _scan(plan, runners, x_BTD, params, layer_inputs)
                captured |= outputs
            for name, value in segment_notes.items():
                notes.setdefault(name, []).append(value)
        notes = {name: jnp.concatenate(parts) for name, parts in notes.items()}
        states = () if cache is None else tuple(new_states)
        return StackOutput(x_BTD, captured, notes), states

    def _make_runner(
        self,
        inputs: StackInputs,
        cache: DecodingStates | None,
        blocks: Sequence[dict[str, tuple[Any, nnx.State]]],
    ) -> Callable[..., Callable]:
        """Return (graphdef, spec, scanned) -> function that runs one layer of this pass."""
        shared = {}
        if cache is None:
            for kind, block in (entry for kinds in blocks for entry in kinds.items()):
                if kind not in shared:
                    shared[kind] = nnx.merge(*block).mixer.find_shared(inputs.context)
        decoding = None if cache is None else cache.decoding
        trial = cache is not None and cache.trial

        def run(x_BTD, params, layer_inputs, state, imported, graphdef, spec):
            (extra, experts, number), params = layer_inputs, take_slices(params)
            if self.remat == OFFLOAD and cache is None:
                # Before anything else reads it, or the block's own input would be saved as well.
                x_BTD = checkpoint_name(x_BTD, BLOCK_INPUT)
            x_BTD = constrain(x_BTD, "rows", "sequence", "features")
            block = nnx.merge(graphdef, params)
            if inputs.rng_bits is not None:
                set_rng_bits(block, hash_bits(inputs.rng_bits, number + jnp.uint32(1)))
            has_trial_state = trial and block.mixer.trials == "own"
            block_inputs = LayerInputs(
                inputs.masks.get(spec.mask, inputs.context),
                spec,
                inputs.angles.get(spec.rope),
                decoding,
                extra,
                experts,
                inputs.side_context,
                shared.get(spec.kind),
                imported,
                trial=has_trial_state,
            )
            replay = TokenReplay(state, x_BTD)
            run_layer = block if self.exact is None else functools.partial(self.exact.block, block)
            x_BTD, state, layer_notes = run_layer(x_BTD, block_inputs, state)
            state, layer_export = state if spec.exports else (state, None)
            if trial and not has_trial_state:
                assert not spec.exports, "a replay would export other keys and values"
                return x_BTD, replay, layer_export, layer_notes
            return x_BTD, block.mixer.place_state(state), layer_export, layer_notes

        # Cached, so that equal layers are one jitted function: traced, differentiated and lowered
        # once, and their kernels are compiled once.
        @functools.cache
        def runner(graphdef, spec, scanned):
            run_block = functools.partial(run, graphdef=graphdef, spec=spec)
            if self.remat != "none" and cache is None:
                # Inside a scan the loop already keeps XLA from undoing the rematerialization by
                # common subexpression elimination.
                policy, prevent_cse = REMAT[self.remat], not self.scan
                run_block = jax.checkpoint(run_block, policy=policy, prevent_cse=prevent_cse)
            return run_block if scanned else jax.jit(run_block)

        return runner

    def commit(self, inputs: StackInputs, tried: DecodingStates) -> tuple[State, ...]:
        """Return the states after the tokens of a trial up to `decoding.end`; `inputs` are those of
        all its tokens."""
        new_states, decoding = [], tried.decoding
        extras = split_leading(inputs.extra, [1] * len(self.specs))
        for (spec, block), extra, state in zip(self.singles(), extras, tried.states, strict=True):
            extra = jax.tree.map(lambda leaf: leaf[0], extra)
            if isinstance(state, TokenReplay):
                angles = inputs.angles.get(spec.rope)
                layer_inputs = LayerInputs(inputs.context, spec, angles, decoding, extra)
                _, state, _ = block(state.x, layer_inputs, state.state)
            else:
                state = block.mixer.commit_state(spec, state, decoding)
            new_states.append(block.mixer.place_state(state))
        return tuple(new_states)

    def singles(self) -> list[tuple[LayerSpec, Any]]:
        """Return each layer's spec and its block, unstacked."""
        layers = []
        segments = single_layers(len(self.specs))
        for spec, block in zip(self.specs, self._split_blocks(segments), strict=True):
            graphdef, params = block[spec.kind]
            layers.append((spec, nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[0], params))))
        return layers

    def unstack(self) -> None:
        """Store every layer separately from now on, and run layers one by one.

        For programs with a loop over the layers of their own, such as decoding, where a slice of
        the stack would be copied for every token. Call it inside of jit; the stack is deleted.
        """
        layers = []
        for block in self._split_blocks(single_layers(len(self.specs)), rounded=False):
            ((graphdef, state),) = block.values()
            layers.append(nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[0], state)))
        for kind in {spec.kind for spec in self.specs}:
            delattr(self, kind)
        for _, variable in nnx.iter_graph(layers):
            if isinstance(variable, Linear):
                # FP8 products scale by the largest magnitude of the whole batch, so that a token's
                # result would depend on its neighbors: for training only.
                variable.product = None
            if isinstance(variable, nnx.Variable):
                axes = variable.get_metadata()["axes"][1:]
                variable.set_metadata(axes=axes)
                variable.set_value(constrain(variable.get_value(), *axes))
        if self.exact is None:
            fuse_all(layers)
        self.layers = nnx.List(layers)

    def map_states(
        self, change: Callable[..., State], *states: Sequence[State]
    ) -> tuple[State, ...]:
        """Return change(mixer, spec, its state in each of `states`) of every layer, on the mesh."""
        return tuple(
            mixer.place_state(change(mixer, spec, *layer_states))
            for (spec, mixer), *layer_states in zip(self.mixers(), *states, strict=True)
        )

    def mixing_flops(self, spans: np.ndarray) -> float:
        """FLOPs of a forward pass of all layers besides those of weights; see Mixer."""
        layer_flops = functools.cache(lambda spec, mixer: mixer.mixing_flops(spec, spans))
        return sum(layer_flops(spec, mixer) for spec, mixer in self.mixers())

    def mixers(self) -> list[tuple[LayerSpec, Mixer]]:
        """Return each layer's spec and the part of its block that mixes tokens."""
        return [(spec, block.mixer) for spec, block in zip(self.specs, self.blocks(), strict=True)]

    def blocks(self) -> list[Any]:
        """Return each layer's block; for stacked layers, the stacked block of their kind."""
        return list(self.layers or [getattr(self, spec.kind) for spec in self.specs])

    def _split_blocks(
        self, segments: Sequence[LayerSegment], rounded: bool = True
    ) -> list[dict[str, tuple[Any, nnx.State]]]:
        """For each segment {kind: (graphdef, its layers' parameters on a leading axis)}."""
        if self.layers is not None:
            blocks = []
            for spec, block in zip(self.specs, self.layers, strict=True):
                graphdef, state = nnx.split(block)
                blocks.append({spec.kind: (graphdef, jax.tree.map(lambda leaf: leaf[None], state))})
            return blocks
        segment_kinds = [
            [self.specs[layer].kind for layer in segment.layers] for segment in segments
        ]
        blocks = [{} for _ in segments]
        for kind in {spec.kind for spec in self.specs}:
            stacked = nnx.split(getattr(self, kind))
            # A scan reads stacks, so they are rounded at once. Layers that run one by one are
            # rounded one by one: a slice of a rounded stack of fused kernels would be a copy.
            if rounded and self.scan:
                barrier = "TPU" not in device_kind()
                stacked = round_kernels(*stacked, self.exact is None, output_barrier=barrier)
            owners = [index for index, kinds in enumerate(segment_kinds) if kind in kinds]
            sizes = [segment_kinds[index].count(kind) for index in owners]
            for index, piece in zip(owners, split_leading(stacked[1], sizes), strict=True):
                block = (stacked[0], piece)
                if rounded and not self.scan:
                    block = round_kernels(*block, self.exact is None)
                blocks[index][kind] = block
        return blocks

    def _plan_scan(
        self, segment: LayerSegment, captures: Sequence[int], depth: int | None
    ) -> "ScanPlan":
        specs = self.specs[segment.start : segment.start + segment.period]
        assert not any(spec.exports for spec in specs), "only a single layer can export"
        rounds = segment.repeats
        if depth is not None:
            rounds = min(rounds, -(-(depth - segment.start) // segment.period))
        return ScanPlan(segment, specs, captures, rounds)


def single_layers(num_layers: int) -> tuple[LayerSegment, ...]:
    """Return segments of one layer each."""
    return tuple(LayerSegment(layer, 1, 1) for layer in range(num_layers))


@functools.cache
def find_segments(specs: tuple[LayerSpec, ...]) -> tuple[LayerSegment, ...]:
    """Return the segments with the fewest layers to compile, by dynamic programming from the
    end."""
    best: dict[int, tuple[int, tuple[LayerSegment, ...]]] = {len(specs): (0, ())}
    for start in reversed(range(len(specs))):
        options = [LayerSegment(start, 1, 1)]
        for period in range(1, (len(specs) - start) // 2 + 1):
            repeats = 1
            while specs[start : start + period] == specs[start + period * repeats :][:period]:
                repeats += 1
                options.append(LayerSegment(start, period, repeats))
        candidates = []
        for option in options:
            cost, later_segments = best[option.layers.stop]
            candidates.append((option.period + cost, (option, *later_segments)))
        # Of equal costs the fewest segments, then the longest first one.
        best[start] = min(
            candidates, key=lambda entry: (entry[0], len(entry[1]), -len(entry[1][0].layers))
        )
    return best[0][1]


@dataclasses.dataclass(frozen=True)
class ScanPlan:
    """Static description of a scan over a segment."""

    segment: LayerSegment
    specs: Sequence[LayerSpec]
    """Specs of one period."""
    captures: Sequence[int]
    """Layers whose outputs are returned."""
    rounds: int
    """Periods to run; fewer than the segment's repeats if later layers are not needed."""


def _scan(
    plan: ScanPlan,
    runners: Sequence[Callable],
    x_BTD: jax.Array,
    params: dict[str, nnx.State],
    layer_inputs: Any,
) -> tuple[jax.Array, dict[int, jax.Array], dict[str, jax.Array]]:
    """Return (output, {layer: output} of the captured layers, {name: [layers, ...]} notes)."""
    (_, period, repeats), captures, rounds = plan.segment, plan.captures, plan.rounds
    kinds = [spec.kind for spec in plan.specs]
    folded = {kind: fold(state, kinds.count(kind)) for kind, state in params.items()}
    # Every layer writes its output to a slot of one buffer, to a spare slot if it is not captured.
    # The write is outside of what is rematerialized, so nothing is saved per layer.
    slots = [
        captures.index(layer) if layer in captures else len(captures)
        for layer in plan.segment.layers
    ]
    slots_RP = jnp.array(slots, jnp.int32).reshape(repeats, period) if captures else None
    buffer = jnp.zeros((len(captures) + 1, *x_BTD.shape), x_BTD.dtype) if captures else None

    def body(carry, step):
        x_BTD, buffer = carry
        if rounds == repeats:
            params, layer_inputs, slots_P = step
        else:
            params, layer_inputs, slots_P = jax.tree.map(lambda leaf: leaf[step], steps)
        pieces = {
            kind: iter(unfold_params(state, kinds.count(kind))) for kind, state in params.items()
        }
        inputs_P, notes = unfold(layer_inputs, period), {}
        for index, (kind, run) in enumerate(zip(kinds, runners, strict=True)):
            x_BTD, _, _, layer_notes = run(x_BTD, next(pieces[kind]), inputs_P[index])
            if buffer is not None:
                buffer = jax.lax.dynamic_update_index_in_dim(buffer, x_BTD, slots_P[index], 0)
            for name, value in layer_notes.items():
                notes.setdefault(name, []).append(value)
        return (x_BTD, buffer), notes

    steps = (folded, fold(layer_inputs, period), slots_RP)
    # A part of the stack is indexed inside of the body: scanning over a slice of it would copy it.
    scanned = steps if rounds == repeats else jnp.arange(rounds)
    (x_BTD, buffer), notes = jax.lax.scan(body, (x_BTD, buffer), scanned, length=rounds)
    segment_notes = {}
    for name, values in notes.items():
        joined = jnp.stack(values, 1) if len(values) > 1 else values[0]
        segment_notes[name] = joined.reshape(-1, *joined.shape[2:]) if len(values) > 1 else joined
    outputs = {layer: buffer[slot] for slot, layer in enumerate(captures)}
    return x_BTD, outputs, segment_notes
