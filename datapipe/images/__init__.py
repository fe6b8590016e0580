"""Images as bytes: read headers, decode, encode, re-encode, and cut windows out of JPEG files."""

Buffer = bytes | bytearray | memoryview
