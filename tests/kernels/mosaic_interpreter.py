"""Runs Mosaic GPU kernels on a CPU: jax's own interpreter plus the primitives that it lacks.

jax 0.11's interpreter knows neither `pl.run_state` (an accumulator that starts from a value), nor
stores to accumulators, nor `wgmma` with its left side in registers, nor TMA that adds. They are
added here, on private interfaces of that release: for tests only. Races between warpgroups and TMA
are detected; not modeled are layouts, missing waits for wgmma, and alignment (compiling for sm_90a
finds those).
"""

import contextlib
import inspect
import textwrap
import threading

import jax
import jax.numpy as jnp
import pytest


def require() -> None:
    """Skip the test, with the reason, where the interpreter does not exist."""
    if jax.__version_info__[:2] != (0, 11):
        pytest.skip(f"the Mosaic GPU interpreter is extended for jax 0.11, not {jax.__version__}")


@contextlib.contextmanager
def interpreted(detect_races: bool = False):
    """Mosaic GPU kernels called inside run on the CPU; races fail the test."""
    require()
    _extend()
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=detect_races)):
        yield
    if detect_races:
        assert not interpret_pallas_call.get_races().races_found


def _extend() -> None:
    """Add the missing primitives to the interpreter, once."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
    from jax._src.state import discharge

    interpreter = jaxpr_interpret.JaxprInterpreter
    if hasattr(interpreter, "interpret_run_state"):
        return
    gpu_callbacks.copy_smem_to_gmem = _adding(gpu_callbacks.copy_smem_to_gmem)
    interpreter.interpret_run_state = _run_state
    interpreter.interpret_accumulator_store = _accumulator_store
    interpreter._interpret_wgmma_ref_p = _wgmma_from_registers(interpreter._interpret_wgmma_ref_p)
    interpreter._interpret_inline_mgpu_p = _inline
    source = textwrap.dedent(inspect.getsource(interpreter.interpret))
    anchor = "        case gpu_primitives.commit_smem_p:\n"
    assert source.count(anchor) == 1, "jax's interpreter has changed: extend it anew"
    cases = (
        "        case discharge.run_state_p:\n"
        "          token, out = self.interpret_run_state(eqn, token, deferred_invals)\n"
        "        case gpu_primitives.wgmma_accumulator_store_p:\n"
        "          token, out = self.interpret_accumulator_store(eqn, token, deferred_invals)\n"
    )
    module = jaxpr_interpret.__dict__
    module["discharge"] = discharge
    extended = {}
    exec(  # the dispatch is one `match` statement inside a method: there is nothing to hook
        compile(source.replace(anchor, cases + anchor), jaxpr_interpret.__file__, "exec"),
        module,
        extended,
    )
    interpreter.interpret = extended["interpret"]


def _place(self, eqn) -> dict:
    return {
        "mesh_location": self.mesh_location,
        "thread": self.thread,
        "source_info": eqn.source_info,
    }


def _in_registers(self, eqn, token, value):
    """Put a value into a fresh register buffer; (token, key)."""
    from jax._src.pallas.mosaic_gpu import core
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory

    token, request = gpu_callbacks.call_make_allocation_request_array(
        token=token,
        compute_unit=self.thread,
        memory_space_id=shared_memory.get_memory_space_idx(core.MemorySpace.REGS),
        initial_ref_count=1,
    )
    return gpu_callbacks.call_allocate_buffer(
        token=token, allocation_request_as_array=request, value=value, **_place(self, eqn)
    )


def _released(self, eqn, token, key):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return gpu_callbacks.call_deallocate_buffer(
        token=token, allocation_key_as_array=key, **_place(self, eqn)
    )


def _run_state(self, eqn, token, get_values):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax._src.state import types

    jaxpr = eqn.params["jaxpr"]
    arguments, owned = [], []
    for value, inner, outer in zip(get_values(), jaxpr.invars, eqn.invars, strict=True):
        becomes_ref = isinstance(inner.aval, types.AbstractRef)
        if becomes_ref and not isinstance(outer.aval, types.AbstractRef):
            token, key = _in_registers(self, eqn, token, value)
            arguments.append(key)
            owned.append(inner.aval.inner_aval)
        else:
            arguments.append(value)
            owned.append(None)
    token, _ = self.interpret(jaxpr, token, *arguments)
    results = []
    for argument, aval in zip(arguments, owned, strict=True):
        if aval is not None:
            key = argument
            token, argument = gpu_callbacks.call_get(
                token=token,
                result_shape_and_dtype=jax.ShapeDtypeStruct(aval.shape, aval.dtype),
                allocation_key_as_array=key,
                transforms=(),
                **_place(self, eqn),
            )
            token = _released(self, eqn, token, key)
        results.append(argument)
    return token, results


def _accumulator_store(self, eqn, token, get_values):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    accumulator, value = get_values()
    token, _ = gpu_callbacks.call_swap(
        token=token,
        result_shape_and_dtype=jax.ShapeDtypeStruct(value.shape, value.dtype),
        allocation_key_as_array=accumulator,
        transforms=(),
        val=value,
        mask=None,
        **_place(self, eqn),
    )
    return token, value


def _wgmma_from_registers(original):
    from jax._src.state import types

    def wgmma(self, eqn, token, get_values):
        if isinstance(eqn.invars[1].aval, types.AbstractRef):
            return original(self, eqn, token, get_values)
        accumulator, unused, *rest = get_values()
        token, key = _in_registers(self, eqn, token, unused)
        token, result = original(self, eqn, token, lambda: [accumulator, key, *rest])
        return _released(self, eqn, token, key), result

    return wgmma


def _inline(self, eqn, token, get_values):
    """Emulate the inline GPU instructions of kernels: two functions of `mosaic`."""
    from jaxtrain_kernels import mosaic

    handlers = {
        "nearest_int": lambda x: jnp.round(x).astype(jnp.int32),
        "exp2_partly": mosaic.polynomial_exp2,  # for all numbers: the less exact of both ways
    }
    (value,) = get_values()
    return token, [handlers[eqn.params["mgpu_fn"].__name__](value)]


def _adding(original):
    """TMA stores with a reduction, done at once: outside of the race detection."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory

    lock = threading.Lock()

    def copy_smem_to_gmem(*, reduction_op, **arguments):
        if reduction_op is None:
            return original(reduction_op=reduction_op, **arguments)
        assert reduction_op == "add", reduction_op
        memory, thread = gpu_callbacks._get_shared_memory(), arguments["thread"]
        info = shared_memory.GPULoggingInfo(
            arguments["mesh_location"], thread, arguments["source_info"]
        )

        def access(side):
            key = arguments[f"{side}_allocation_key_as_array"]
            key = gpu_callbacks.HostAllocationKey.from_array(key)
            transforms = gpu_callbacks._remove_noop_transforms(arguments[f"{side}_transforms"])
            return key, memory.access(key, jax.tree.map(int, transforms))

        with lock:
            (source, part), (target, index) = access("src"), access("dst")
            value = memory.get_buffer_content(source, part, thread, logging_info=info)[0]
            held = memory.get_buffer_content(target, index, thread, logging_info=info)[0]
            memory.store_buffer_content(target, index, held + value, thread, logging_info=info)
        return arguments["token"]

    return copy_smem_to_gmem
