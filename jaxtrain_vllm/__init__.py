"""Extension of a vLLM server that receives weights from a trainer over TCP.

Runs inside vLLM's own environment and imports neither jax nor jaxtrain. `serve.py` starts a server,
`engine.py` is the worker's side, `wire.py` the message format of both sides.
"""

BACKEND = "jaxtrain"
"""Name for --weight-transfer-config '{"backend": "jaxtrain"}'."""


def register() -> None:
    """Register the backend. Entry point `vllm.general_plugins`: called in every process of the
    server, possibly twice."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "jaxtrain_vllm.engine", "TrainerLinkEngine"
        )
