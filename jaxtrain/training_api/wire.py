"""Protobuf messages of the training API, read and written as the `tinker` client does.

The client sends forward_backward as ForwardBackwardRequest, and reads the results of forward,
forward_backward and samples as ForwardBackwardOutput and SampleResponse; all else is JSON. Numbers
and names of the fields are those of its wheel (0.38.0, package `tinker_public`).
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "tinker_public"
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
"""Numbers of the enumeration DType."""
STOP, LENGTH = 0, 1
"""Numbers of the enumeration StopReason."""
MESSAGES = {
    "SparseCsr": "1 values bytes, 2 crow_indices bytes, 3 col_indices bytes",
    "Tensor": "1 dense bytes? layout, 2 sparse_csr SparseCsr? layout, 3 dtype int32,"
    " 4 shape int64*",
    "EncodedTextChunk": "1 tokens bytes",
    "ImageChunk": "1 data bytes, 2 format string",
    "DmelChunk": "1 dmel bytes",
    "Chunk": "1 encoded_text EncodedTextChunk? kind, 2 image ImageChunk? kind,"
    " 3 dmel DmelChunk? kind",
    "ProvenanceSpan": "",
    "LossFnInputsEntry": "1 key string, 2 value Tensor",
    "Datum": "1 model_input Chunk*, 2 loss_fn_inputs LossFnInputsEntry*,"
    " 3 model_input_spans ProvenanceSpan*, 4 loss_fn_input_spans ProvenanceSpan*",
    "LossConfigValue": "1 number double? value, 2 text string? value",
    "LossFnConfigEntry": "1 key string, 2 value double",
    "LossFnConfigV2Entry": "1 key string, 2 value LossConfigValue",
    "ForwardBackwardRequest": "1 model_id string, 2 seq_id int32, 3 data Datum*, 4 loss_fn string,"
    " 5 loss_fn_config LossFnConfigEntry*, 6 forward_only bool,"
    " 7 loss_fn_config_v2 LossFnConfigV2Entry*",
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape int64*",
    "FieldsEntry": "1 key string, 2 value BatchedTensor",
    "ArrayRecord": "1 type_tag string, 2 fields FieldsEntry*, 3 num_datums int64",
    "MetricsEntry": "1 key string, 2 value double",
    "ForwardBackwardOutput": "1 loss_fn_output_type string, 2 loss_fn_outputs ArrayRecord*,"
    " 3 metrics MetricsEntry*",
    "TopkLogprobs": "1 token_ids bytes, 2 logprobs bytes, 3 k uint32, 4 length uint32",
    "SampledSequence": "1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes? presence,"
    " 4 topk_sampled_logprobs TopkLogprobs",
    "SampleResponse": "1 sequences SampledSequence*, 2 prompt_logprobs bytes? presence,"
    " 3 topk_prompt_logprobs TopkLogprobs, 4 prompt_cache_hit_tokens int32",
}
"""Fields of each message: number, name, type, with * repeated, with ? in the oneof that follows.
Maps are written as what they are on the wire, repeated entries; enumerations as their numbers."""


def make_messages() -> dict[str, Any]:
    """Return the class of each message in MESSAGES."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="jaxtrain_training_api.proto", package=PACKAGE, syntax="proto3"
    )
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        choices: list[str] = []
        for text in filter(None, fields.split(", ")):
            number, field, kind, *choice = text.split()
            bare = kind.rstrip("*?")
            entry = message.field.add(
                name=field,
                number=int(number),
                label=kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL,
                type=getattr(kinds, f"TYPE_{'MESSAGE' if bare in MESSAGES else bare.upper()}"),
                type_name=f".{PACKAGE}.{bare}" if bare in MESSAGES else None,
            )
            if choice:
                if choice[0] not in choices:
                    choices.append(choice[0])
                    message.oneof_decl.add(name=choice[0])
                entry.oneof_index = choices.index(choice[0])
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in MESSAGES
    }


CLASSES = make_messages()
ForwardBackwardRequest = CLASSES["ForwardBackwardRequest"]
ForwardBackwardOutput = CLASSES["ForwardBackwardOutput"]
SampleResponse = CLASSES["SampleResponse"]
