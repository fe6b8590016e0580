"""Copies of a state, which stay as they are while training continues."""

import pytest
import torch

from tests.device_counts import DeviceCounts, fake_tensors
from trainer.checkpoints.snapshot import Snapshot


@pytest.fixture
def state():
    whole = torch.randn(4, 6)
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    return {"a": whole, "list": [whole[1:3, ::2], image, "text", None], "empty": {}, 3: (torch.tensor(5), 2.5)}


def test_what_changes_afterwards_does_not_change_the_copy(state):
    snapshot, wanted = Snapshot(), [*torch.utils._pytree.tree_leaves(state)]
    wanted = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in wanted]
    copy = snapshot.take(state, "state")
    state["a"].zero_()
    state["list"].append("more")
    snapshot.wait()
    found = torch.utils._pytree.tree_leaves(copy)
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs
    assert copy["list"][1].is_contiguous(memory_format=torch.channels_last)
    assert copy["list"][0].untyped_storage().nbytes() == 2 * 3 * 4  # a view is no more than what is seen of it


def test_the_next_copy_is_in_the_same_memory(state):
    snapshot = Snapshot()
    first = snapshot.take(state, "state")
    addresses = [leaf.data_ptr() for leaf in torch.utils._pytree.tree_leaves(first) if isinstance(leaf, torch.Tensor)]
    other = snapshot.take(state, "another")
    second = snapshot.take(state, "state")
    again = [leaf.data_ptr() for leaf in torch.utils._pytree.tree_leaves(second) if isinstance(leaf, torch.Tensor)]
    assert again == addresses and other["a"].data_ptr() != addresses[0]
    state["a"] = torch.ones(5)
    assert snapshot.take(state, "state")["a"].tolist() == [1.0] * 5


def test_the_host_waits_for_no_device():
    with fake_tensors(), DeviceCounts() as counts:
        tensors = {"weights": torch.empty(1000, device="cuda"), "steps": torch.empty((), device="cuda")}
        copy = Snapshot().take(tensors, "state")
        assert not counts.waits[""] and {tensor.device.type for tensor in copy.values()} == {"cpu"}
        torch.empty(3, device="cuda").to("cpu")
        assert counts.waits[""] == 1
