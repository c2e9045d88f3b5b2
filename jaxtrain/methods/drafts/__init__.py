"""Draft models: DFlash and Eagle3."""

KINDS = {
    "dflash": {"section": "config:DFlashTask", "method": "dflash_method", "trains": "draft"},
    "eagle3": {"section": "config:Eagle3Task", "method": "eagle3_method", "trains": "draft"},
}
