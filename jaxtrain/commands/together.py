"""Work of a verb on all processes that its config and the environment tell of"""

from collections.abc import Callable

from jaxtrain.errors import RunStopped, UserError


def leave_gpus(config):
    """The config; the GPUs of servers that it has started are theirs from now on. Before jax."""
    from jaxtrain.rollout.vllm.gpus import leave_gpus

    leave_gpus(config)
    return config


def run_together(read: Callable, join: Callable, work: Callable) -> int:
    """work(read()) on all processes that join(read()), a section `parallel` and the run's folder,
    and the environment tell of; what ends one of them is told once."""
    wanted = mistake = None
    try:
        wanted = read()  # before jax, which takes all devices that it sees
    except UserError as error:
        mistake = error
    from jaxtrain.parallel.processes import join_by_config, report, shutdown

    try:
        if mistake is not None:
            join_by_config(None)  # so that this, too, is told once
            raise mistake
        join_by_config(*join(wanted))
        code = work(wanted)
        shutdown()
        return code
    except (UserError, RunStopped, KeyboardInterrupt) as error:
        report(error, {UserError: 2, RunStopped: 1}.get(type(error), 130))
        raise
    except Exception as error:
        report(error, 0)  # another process's end shows here as a collective that failed
        raise
