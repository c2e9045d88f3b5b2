"""Plain text as rows: a line of a .txt file each, blank ones left out."""

from typing import Any

from jaxtrain.data.sources.jsonl import JsonlRows
from jaxtrain.errors import UserError


class TextRows(JsonlRows):
    """Rows {"text": line}, read when asked for."""

    holds = "text"

    @staticmethod
    def parse(line: bytes, path: str, number: int) -> dict[str, Any]:
        """See JsonlRows; the line's end is no part of the text. UserError where it is no UTF-8."""
        try:
            return {"text": line.decode().rstrip("\r\n").removeprefix("\ufeff")}
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path} line {number} is not UTF-8 text (byte {error.start + 1}); save it as UTF-8"
            ) from None
