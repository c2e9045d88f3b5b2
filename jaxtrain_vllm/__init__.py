"""What jaxtrain adds to a vLLM server: a way to receive weights from a trainer over TCP.

Runs inside vLLM's own environment and imports neither jax nor jaxtrain. `serve.py` starts a server,
`engine.py` is the worker's side, `wire.py` the messages that both sides speak.
"""

BACKEND = "jaxtrain"
"""The name for --weight-transfer-config '{"backend": "jaxtrain"}'."""


def register() -> None:
    """Entry point `vllm.general_plugins`: called in every process of the server, maybe twice."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "jaxtrain_vllm.engine", "TrainerLinkEngine"
        )
