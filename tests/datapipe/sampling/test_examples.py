"""The examples in docstrings give what they say."""

import doctest

import pytest

from datapipe.sampling import augment, block_order, order


@pytest.mark.parametrize("module", [augment, block_order, order], ids=lambda module: module.__name__)
def test_examples_of_docstrings(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed
