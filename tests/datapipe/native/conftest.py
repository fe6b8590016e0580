"""The decoder in C, in each way that it was compiled."""

from __future__ import annotations

import platform

import pytest

from datapipe import native

NAMES = [native.PLAIN, native.VECTORS.get(platform.machine(), native.AVX2)]


@pytest.fixture(params=NAMES)
def library(request: pytest.FixtureRequest) -> native.Native:
    try:
        library = native.open_library(request.param)
    except native.UnusableError as error:
        pytest.skip(f"no decoder in C here: {error}")
    return library


@pytest.fixture(scope="session")
def library_of_session() -> list[native.Native]:
    """All of them, for property tests."""
    libraries = []
    for name in NAMES:
        try:
            libraries.append(native.open_library(name))
        except native.UnusableError as error:
            reason = f"no decoder in C here: {error}"
    if not libraries:
        pytest.skip(reason)
    return libraries
