"""Feature-matching (energy-based) fine-tuning."""

KINDS = {
    "ebft": {"section": "config:EBFTTask", "method": "method"},
    "ebft_strided": {"section": "config:EBFTStridedTask", "method": "strided_method"},
}
