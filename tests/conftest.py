"""What all tests share: the --slow option and the real sample."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


@pytest.fixture(scope="session")
def sample_dir() -> Path:
    """Folder of the real sample of Fashion-MNIST: four IDX files, 2,400 training and 600 test images."""
    return Path(__file__).parent / "data" / "fashion-mnist-sample"
