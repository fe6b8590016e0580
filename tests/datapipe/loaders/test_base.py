"""What all loaders share, without one that reads anything."""

import dataclasses

import pytest

from datapipe.errors import SettingError
from datapipe.loaders.base import DataDescription, Loader
from datapipe.loaders.options import LoaderOptions

DATA = DataDescription(200, 10, 3, 32, 32, (32, 32), "checksum")
GLOBAL_BATCH_SIZE = 96


class Reader(Loader):
    """A loader without batches."""

    def _batches(self, epoch, steps):
        yield from ()


def open_blocks(world_size):
    options = LoaderOptions(GLOBAL_BATCH_SIZE // world_size, size=32, order="blocks", world_size=world_size)
    return Reader(DATA, options)


def test_the_lanes_are_those_of_the_ranks_that_began():
    state = open_blocks(3).state_dict()
    alone = open_blocks(1)
    assert (state["lanes"], alone.lanes) == (48, 32)
    alone.load_state_dict(state)
    assert alone.lanes == 48 and alone.state_dict() == state
    with pytest.raises(SettingError, match="lanes: 36 do not share a global batch of 96"):
        alone.load_state_dict(state | {"lanes": 36})


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(LoaderOptions)])
def test_a_value_of_a_wrong_type_is_named(name):
    with pytest.raises(SettingError, match=f"^{name}: "):
        LoaderOptions(**{"batch_size": 4, name: b"4"})
