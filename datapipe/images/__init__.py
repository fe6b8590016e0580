"""Images as bytes: read headers, decode, encode, re-encode, and cut windows out of JPEG files."""

Buffer = bytes | bytearray | memoryview


class UndecodableError(ValueError):
    """An image that a decoder refuses.

    Attributes:
        reason: In our own words, the same wherever and whenever it is said: for what is recorded.
        detail: In the decoder's words: for people.
    """

    def __init__(self, reason: str, detail: object) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, str(detail)

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.reason, self.detail)
