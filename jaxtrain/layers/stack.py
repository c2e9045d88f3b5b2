"""Stack: L blocks in their order, those of a kind stored stacked, run scanned or one by one.

The storage is the same either way, so a checkpoint does not know how the model was run. A scan
takes the shortest period in which layers of several kinds, windows or encodings repeat:

    local local global local local global local    two rounds of three layers, and one layer

Decoding runs the layers one by one: each has a state of its own kind.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtrain_kernels import Context
from jaxtrain_kernels.mosaic import device_kind

from jaxtrain.distributed.sharding import constrain
from jaxtrain.errors import UserError
from jaxtrain.layers.linear import Linear
from jaxtrain.layers.mixer import Decoding, LayerInputs, LayerSpec, Mixer, State
from jaxtrain.layers.noise import give_words, mix
from jaxtrain.layers.rope import Angles

SAVE_DOTS = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    # In the place of the products that they are or are the sum of, which then nothing reads.
    jax.checkpoint_policies.save_only_these_names("adapted_out", "linear_out"),
)
SAVE_ATTENTION = jax.checkpoint_policies.save_only_these_names(
    "attention_out", "attention_lse", "mla_latent", "moe_out"
)
REMAT: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "elementwise": jax.checkpoint_policies.save_from_both_policies(SAVE_DOTS, SAVE_ATTENTION),
    "dots": SAVE_DOTS,
    "save_attention": SAVE_ATTENTION,
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""What the backward pass finds in memory: everything; the input of each block with the results of
its matmuls and what attention put out; without the latter; without the former; or the input alone.
Everything else is computed again. Attention's backends, adapters and the Linears of a scan name
their results as the policies do."""


class StackOutput(NamedTuple):
    """What comes out of the layers."""

    hidden: jax.Array
    """[B, T, D]."""
    captured: dict[int, jax.Array]
    """{layer: its output [B, T, D]} of the layers that were asked for."""
    notes: dict[str, jax.Array]
    """{name: [layers, ...]} of what blocks noted, in the order of the layers that did."""


class TokenReplay(NamedTuple):
    """What a layer without a trial state of its own needs to read again the tokens that stay."""

    state: State
    """Before the trial."""
    x: jax.Array
    """[B, T, D] what the block was given."""


class LayerSegment(NamedTuple):
    """Layers that run as one scan, or a single one."""

    start: int
    period: int
    """Layers that differ from each other."""
    repeats: int

    @property
    def layers(self) -> range:
        return range(self.start, self.start + self.period * self.repeats)


class Stack(nnx.Module):
    """Blocks (x_BTD, LayerInputs, state) -> (x_BTD, state, {name: array}), in the order of `specs`.

    `make_block(kind, rngs)` makes one. A block has a `mixer`, the Mixer that its state belongs to.
    only: which layer of each kind is made, counted within the kind: to draw weights in pieces.
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
        self.layers = nnx.data(None)
        keys = jax.random.split(rngs.params(), len(self.specs))
        for kind in dict.fromkeys(spec.kind for spec in self.specs):
            assert not hasattr(self, kind), f"{kind!r} is no name for a kind of layers"
            mine = [layer for layer, spec in enumerate(self.specs) if spec.kind == kind]
            make, own = functools.partial(make_block, kind), keys[jnp.array(mine)]
            setattr(self, kind, _stacked(make, own if only is None else own[only][None]))

    def __call__(
        self,
        x_BTD: jax.Array,
        context: Context,
        angles: Mapping[str, Angles],
        *,
        extra: Any = None,
        experts: jax.Array | None = None,
        capture: Sequence[int] = (),
        states: Sequence[State] | None = None,
        decoding: Decoding | None = None,
        beside: Any = None,
        trial: bool = False,
        depth: int | None = None,
        words: jax.Array | None = None,
    ) -> tuple[StackOutput, tuple[State, ...]]:
        """(outputs, the states after the tokens; none without `states`, as in training).

        angles: by the names of the position encodings. extra: a pytree of arrays [L, ...], of which
        each block gets its layer's slice. experts: [L, B, T, k] those that tokens go to; slices of
        layers without experts mean nothing. beside: what all blocks get alike. trial: the states
        are for `commit`. depth: no layer from this one on need be run; what would come out behind
        them is not told then. words: uint32 [B, T] of the tokens, for blocks that draw (see
        layers.noise).
        """
        num_layers = len(self.specs)
        assert all(0 <= layer < num_layers for layer in capture), f"{capture} of {num_layers}"
        if self.scan and self.layers is None and states is None:
            segments = find_segments(self.specs)
        else:
            segments = tuple(LayerSegment(layer, 1, 1) for layer in range(num_layers))
        blocks = self._split_blocks(segments)
        numbers = None if words is None else jnp.arange(num_layers, dtype=jnp.uint32)
        extras = _split((extra, experts, numbers), [len(segment.layers) for segment in segments])

        shared = {}
        if states is None:
            for kind, part in (pair for own in blocks for pair in own.items()):
                if kind not in shared:
                    shared[kind] = nnx.merge(*part).mixer.find_shared(context)

        def run(x_BTD, params, part, state, given, graphdef, spec):
            (extra, experts, number), params = part, _taken(params)
            x_BTD = constrain(x_BTD, "rows", "sequence", "features")
            block = nnx.merge(graphdef, params)
            if words is not None:
                give_words(block, mix(words, number + jnp.uint32(1)))
            own = trial and block.mixer.trials == "own"
            turns = angles.get(spec.rope)
            found = shared.get(spec.kind)
            inputs = LayerInputs(
                context, spec, turns, decoding, extra, experts, beside, found, given, trial=own
            )
            before = TokenReplay(state, x_BTD)
            x_BTD, state, noted = block(x_BTD, inputs, state)
            state, given = state if spec.gives else (state, None)
            if trial and not own:
                assert not spec.gives, "read again, it would hand on something else"
                return x_BTD, before, given, noted
            return x_BTD, block.mixer.place_state(state), given, noted

        @functools.cache  # traced, differentiated and lowered once; kernels are compiled once
        def runner(graphdef, spec, scanned):
            run_one = functools.partial(run, graphdef=graphdef, spec=spec)
            if self.remat != "none" and states is None:
                # Inside a scan the loop already keeps XLA from undoing the rematerialization.
                policy, keep = REMAT[self.remat], not self.scan
                run_one = jax.checkpoint(run_one, policy=policy, prevent_cse=keep)
            return run_one if scanned else jax.jit(run_one)

        captured, notes, new_states, handed = {}, {}, [], {}
        for segment, own, part in zip(segments, blocks, extras, strict=True):
            start, period, repeats = segment
            if depth is not None and start >= depth:
                break
            wanted = [layer for layer in segment.layers if layer in capture]
            if repeats == 1:
                graphdef, params = own[self.specs[start].kind]
                params, part = jax.tree.map(lambda leaf: leaf[0], (params, part))
                state = None if states is None else states[start]
                spec = self.specs[start]
                run_one, given = runner(graphdef, spec, scanned=False), handed.get(spec.takes)
                x_BTD, state, given, noted = run_one(x_BTD, params, part, state, given)
                new_states.append(state)
                handed |= {spec.gives: given} if spec.gives else {}
                captured |= dict.fromkeys(wanted, x_BTD)
                found = {name: value[None] for name, value in noted.items()}
            else:
                period_specs = self.specs[start : start + period]
                graphdefs = {kind: graphdef for kind, (graphdef, _) in own.items()}
                params = {kind: state for kind, (_, state) in own.items()}
                assert not any(spec.gives for spec in period_specs), "one layer alone gives a name"
                runners = [
                    functools.partial(
                        runner(graphdefs[spec.kind], spec, scanned=True),
                        state=None,
                        given=handed.get(spec.takes),
                    )
                    for spec in period_specs
                ]
                rounds = repeats if depth is None else min(repeats, -(-(depth - start) // period))
                x_BTD, taken, found = _scan(
                    segment, period_specs, runners, x_BTD, params, part, wanted, rounds
                )
                captured |= taken
            for name, value in found.items():
                notes.setdefault(name, []).append(value)
        notes = {name: jnp.concatenate(parts) for name, parts in notes.items()}
        return StackOutput(x_BTD, captured, notes), () if states is None else tuple(new_states)

    def commit(
        self,
        tried: Sequence[State],
        context: Context,
        angles: Mapping[str, Angles],
        decoding: Decoding,
        extra: Any = None,
    ) -> tuple[State, ...]:
        """The states after the tokens of a trial up to `decoding.end`; context, angles and extra
        are of all its tokens."""
        found = []
        parts = _split(extra, [1] * len(self.specs))
        for (spec, block), part, state in zip(self.singles(), parts, tried, strict=True):
            part = jax.tree.map(lambda leaf: leaf[0], part)
            if isinstance(state, TokenReplay):
                inputs = LayerInputs(context, spec, angles.get(spec.rope), decoding, part)
                _, state, _ = block(state.x, inputs, state.state)
            else:
                state = block.mixer.commit_state(spec, state, decoding)
            found.append(block.mixer.place_state(state))
        return tuple(found)

    def singles(self) -> list[tuple[LayerSpec, Any]]:
        """Each layer's spec and its block by itself."""
        found = []
        alone = [LayerSegment(layer, 1, 1) for layer in range(len(self.specs))]
        for spec, own in zip(self.specs, self._split_blocks(alone), strict=True):
            graphdef, params = own[spec.kind]
            found.append((spec, nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[0], params))))
        return found

    def unstack(self) -> None:
        """Store every layer by itself from now on, and run them one by one.

        For programs that run the layers in a loop of their own, as decoding does: there a slice of
        the stack is a copy every time. To be called inside of jit; nothing of the stack remains.
        """
        singles = [LayerSegment(layer, 1, 1) for layer in range(len(self.specs))]
        layers = []
        for own in self._split_blocks(singles, rounded=False):
            ((graphdef, state),) = own.values()
            layers.append(nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[0], state)))
        for kind in {spec.kind for spec in self.specs}:
            delattr(self, kind)
        for _, variable in nnx.iter_graph(layers):
            if isinstance(variable, Linear):
                variable.product = None  # numbers of training, scaled by all that a batch holds
            if isinstance(variable, nnx.Variable):
                axes = variable.get_metadata()["axes"][1:]
                variable.set_metadata(axes=axes)
                variable.set_value(constrain(variable.get_value(), *axes))
        join_all(layers)
        self.layers = nnx.List(layers)

    def map_states(
        self, change: Callable[..., State], *states: Sequence[State]
    ) -> tuple[State, ...]:
        """change(mixer, spec, its state in each of `states`) of every layer, on the mesh."""
        return tuple(
            mixer.place_state(change(mixer, spec, *own))
            for (spec, mixer), *own in zip(self.mixers(), *states, strict=True)
        )

    def mixing_flops(self, spans: np.ndarray) -> float:
        """FLOPs of a forward pass of all layers beside those of weights; see Mixer."""
        alike = functools.cache(lambda spec, mixer: mixer.mixing_flops(spec, spans))
        return sum(alike(spec, mixer) for spec, mixer in self.mixers())

    def mixers(self) -> list[tuple[LayerSpec, Mixer]]:
        """Each layer's spec, and the part of its block that mixes tokens."""
        return [(spec, one.mixer) for spec, one in zip(self.specs, self.blocks(), strict=True)]

    def blocks(self) -> list[Any]:
        """Each layer's block; of those that are stored stacked, that of all their kind."""
        return list(self.layers or [getattr(self, spec.kind) for spec in self.specs])

    def _split_blocks(
        self, segments: Sequence[LayerSegment], rounded: bool = True
    ) -> list[dict[str, tuple[Any, nnx.State]]]:
        """For each segment {kind: (graphdef, its layers' parameters on a leading axis)}."""
        if self.layers is not None:
            found = []
            for spec, block in zip(self.specs, self.layers, strict=True):
                graphdef, state = nnx.split(block)
                found.append({spec.kind: (graphdef, jax.tree.map(lambda leaf: leaf[None], state))})
            return found
        counts = [[self.specs[layer].kind for layer in segment.layers] for segment in segments]
        found = [{} for _ in segments]
        for kind in {spec.kind for spec in self.specs}:
            one = nnx.split(getattr(self, kind))
            # A scan reads stacks; layers that run one by one are rounded one by one, for slices of
            # a rounded stack of joined kernels would be copies of it.
            if rounded and self.scan:
                one = _round_kernels(*one, settles="TPU" not in device_kind())
            owners = [index for index, kinds in enumerate(counts) if kind in kinds]
            pieces = _split(one[1], [counts[index].count(kind) for index in owners])
            for index, piece in zip(owners, pieces, strict=True):
                own = (one[0], piece)
                if rounded and not self.scan:
                    own = _round_kernels(*own)
                found[index][kind] = own
        return found


@functools.cache
def find_segments(specs: tuple[LayerSpec, ...]) -> tuple[LayerSegment, ...]:
    """Segments in which the fewest layers have to be compiled."""
    best: dict[int, tuple[int, tuple[LayerSegment, ...]]] = {len(specs): (0, ())}
    for start in reversed(range(len(specs))):
        options = [LayerSegment(start, 1, 1)]
        for period in range(1, (len(specs) - start) // 2 + 1):
            repeats = 1
            while specs[start : start + period] == specs[start + period * repeats :][:period]:
                repeats += 1
                options.append(LayerSegment(start, period, repeats))
        found = []
        for option in options:
            cost, others = best[option.layers.stop]
            found.append((option.period + cost, (option, *others)))
        best[start] = min(found, key=lambda one: (one[0], len(one[1]), -len(one[1][0].layers)))
    return best[0][1]


def _scan(
    segment: LayerSegment,
    specs: Sequence[LayerSpec],
    runners: Sequence[Callable],
    x_BTD: jax.Array,
    params: dict[str, nnx.State],
    extra: Any,
    wanted: Sequence[int],
    rounds: int,
) -> tuple[jax.Array, dict[int, jax.Array], dict[str, jax.Array]]:
    """(output, {layer: output} of those wanted, {name: [layers, ...]}) of a segment's first rounds.

    Every layer writes its output at its slot of one buffer, at a spare one where nobody asked;
    outside of what is rematerialized, so nothing is kept of it for each layer.
    """
    _, period, repeats = segment
    kinds = [spec.kind for spec in specs]
    folded = {kind: _fold(state, kinds.count(kind)) for kind, state in params.items()}
    slots = [wanted.index(layer) if layer in wanted else len(wanted) for layer in segment.layers]
    slots_RP = jnp.array(slots, jnp.int32).reshape(repeats, period) if wanted else None
    buffer = jnp.zeros((len(wanted) + 1, *x_BTD.shape), x_BTD.dtype) if wanted else None

    def body(carry, step):
        x_BTD, buffer = carry
        if rounds == repeats:
            params, extra, slots_P = step
        else:
            params, extra, slots_P = jax.tree.map(lambda leaf: leaf[step], steps)
        pieces = {kind: iter(_pieces(state, kinds.count(kind))) for kind, state in params.items()}
        extras, notes = _unfold(extra, period), {}
        for place, (kind, run) in enumerate(zip(kinds, runners, strict=True)):
            x_BTD, _, _, noted = run(x_BTD, next(pieces[kind]), extras[place])
            if buffer is not None:
                buffer = jax.lax.dynamic_update_index_in_dim(buffer, x_BTD, slots_P[place], 0)
            for name, value in noted.items():
                notes.setdefault(name, []).append(value)
        return (x_BTD, buffer), notes

    steps = (folded, _fold(extra, period), slots_RP)
    # A part of the stack is read where it lies: as what is scanned over it would be copied.
    over = steps if rounds == repeats else jnp.arange(rounds)
    (x_BTD, buffer), notes = jax.lax.scan(body, (x_BTD, buffer), over, length=rounds)
    found = {}
    for name, values in notes.items():
        joined = jnp.stack(values, 1) if len(values) > 1 else values[0]
        found[name] = joined.reshape(-1, *joined.shape[2:]) if len(values) > 1 else joined
    return x_BTD, {layer: buffer[slot] for slot, layer in enumerate(wanted)}, found


def _fold(tree: Any, count: int) -> Any:
    """Leading axis R * count -> R, count; unchanged for one."""
    if count == 1:
        return tree
    return jax.tree.map(lambda leaf: leaf.reshape(-1, count, *leaf.shape[1:]), tree)


def _unfold(tree: Any, count: int) -> list[Any]:
    """The `count` pieces of a step of what was folded."""
    if count == 1:
        return [tree]
    return [jax.tree.map(lambda leaf: leaf[0], piece) for piece in _split(tree, [1] * count)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerSlice:
    """`whole[index]`, to be taken by who reads it."""

    whole: jax.Array
    index: jax.Array

    def take(self) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(self.whole, self.index, keepdims=False)


def _pieces(params: Any, count: int) -> list[Any]:
    """As `_unfold`, but each piece of a matrix is a `LayerSlice`: what is rematerialized keeps what it
    is given, and so would keep a copy of every piece, where the whole lies in the scan's input
    anyway. For the others a concatenation of gradients is cheaper than a sum: see `_split`."""
    if count == 1:
        return [params]
    leaves, treedef = jax.tree.flatten(params)
    taken = [
        [LayerSlice(leaf, jnp.int32(index)) for index in range(count)]
        if leaf.ndim > 2
        else _unfold(leaf, count)
        for leaf in leaves
    ]
    return [jax.tree.unflatten(treedef, own) for own in zip(*taken, strict=True)]


def _taken(params: Any) -> Any:
    """The parameters with what `_pieces` left to be taken."""
    is_slice = lambda leaf: isinstance(leaf, LayerSlice)  # noqa: E731
    return jax.tree.map(
        lambda leaf: leaf.take() if is_slice(leaf) else leaf, params, is_leaf=is_slice
    )


def join_all(node: Any) -> None:
    """`side_by_side.join` of all that a module or a list of them multiplies together, in place."""
    for _, part in list(nnx.iter_graph(node)):
        if hasattr(part, "join_kernels"):
            part.join_kernels()


def _stacked(make: Callable[[nnx.Rngs], nnx.Module], keys: jax.Array) -> nnx.Module:
    """One module whose parameters are those of `make` for each key, on a leading axis."""
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    state = jax.vmap(lambda key: nnx.state(make(nnx.Rngs(params=key))))(keys)
    block = nnx.merge(graphdef, state)
    for _, variable in nnx.iter_graph(block):
        if isinstance(variable, nnx.Variable):
            variable.set_metadata(axes=("layers", *variable.get_metadata()["axes"]))
    return block


def _round_kernels(graphdef: Any, state: nnx.State, settles: bool = False) -> tuple[Any, nnx.State]:
    """(graphdef, state) with the kernels in the dtype that their Linear computes in. On one device
    those that the same x is multiplied by lie side by side then, if their masters are wider: see
    `side_by_side.join`. settles: see `Linear.settles`.

    All layers of a scan at once: a kernel is read in float32 once a pass, and its gradient leaves
    the loop over layers in the dtype in which the matmul computed it.
    """
    block, mesh = nnx.merge(graphdef, state), jax.sharding.get_abstract_mesh()
    linears = [node for _, node in nnx.iter_graph(block) if isinstance(node, Linear)]
    rounded = [one for one in linears if one.rounds_kernel and one.kernel.dtype != one.dtype]
    masters = any(one.kernel.dtype.itemsize > one.dtype.itemsize for one in rounded)
    for linear in rounded:
        # A new one: the variable is the model's own, and this may be an inner trace.
        linear.kernel = linear.kernel.replace(linear.kernel[...].astype(linear.dtype))
    alone, bare = mesh.empty or mesh.size == 1, all(one.adapter is None for one in linears)
    if masters and alone and bare:
        join_all(block)
    for _, node in nnx.iter_graph(block) if settles else ():
        if hasattr(node, "settles"):
            node.settles = True
    return nnx.split(block)


def _split(tree: Any, sizes: Sequence[int]) -> list[Any]:
    """Pieces along the leading axis. lax.split, because its gradient is one concatenation, while
    that of L slices is a sum of L arrays as large as the whole."""
    if len(sizes) == 1:
        return [tree]
    leaves, treedef = jax.tree.flatten(tree)
    pieces = [jax.lax.split(leaf, tuple(sizes)) for leaf in leaves]
    return [jax.tree.unflatten(treedef, [piece[i] for piece in pieces]) for i in range(len(sizes))]
