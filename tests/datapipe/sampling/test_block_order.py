"""The order "blocks": every sample once, every byte once, the same on any number of ranks."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datapipe.dataset.index import RECORD
from datapipe.dataset.shard_reader import ShardReader
from datapipe.errors import SettingError
from datapipe.loaders import open_loader
from datapipe.sampling.block_order import (
    MIN_WINDOW,
    BlockOrder,
    _lane_lengths,
    grid,
    longest,
    num_lanes,
    shuffle_quality,
)
from datapipe.sampling.order import BLOCKS, WITHIN, num_steps, permutation, uniform


def index_of(sizes_by_shard, gap=0):
    """Records of samples that lie one behind the other in their shards."""
    records = []
    for shard, sizes in enumerate(sizes_by_shard):
        offset = 0
        for size in sizes:
            records.append((offset, size, shard, 0, 0, 1, 1, 0, 0))
            offset += size + gap
    return np.array(records, RECORD)


def block_order(blocks, global_batch_size, last, lanes, seed, epoch):
    """Samples and runs of a whole epoch."""
    order = BlockOrder(blocks, global_batch_size, last, lanes, seed, epoch)
    return order.at(np.arange(len(order)))


def sorted_order(blocks, global_batch_size, last, lanes, seed, epoch):
    """The same by sorting all samples at once, as it was first defined: what saved states rely on."""
    sizes = np.diff(blocks.starts)
    shuffled = permutation(len(sizes), seed, epoch, BLOCKS)
    sequence = np.concatenate([blocks.samples[blocks.starts[b] : blocks.starts[b + 1]] for b in shuffled])
    block = np.repeat(np.arange(len(sizes)), sizes[shuffled])
    length = _lane_lengths(len(sequence), global_batch_size, last, lanes)
    total = int(length.sum())
    sequence, block, lane = sequence[:total], block[:total], np.repeat(np.arange(lanes), length)
    run = np.cumsum(np.append(False, (lane[1:] != lane[:-1]) | (block[1:] != block[:-1])))
    window = block // -(-MIN_WINDOW // lanes)
    mixed = np.lexsort((uniform(seed, epoch, WITHIN, np.arange(total), 1)[:, 0], window, lane))
    place = np.arange(total) - np.repeat(np.cumsum(length) - length, length)
    share = global_batch_size // lanes
    position = place // share * global_batch_size + lane * share + place % share
    samples, runs = np.empty(total, np.int64), np.empty(total, np.int64)
    samples[position], runs[position] = sequence[mixed], run[mixed]
    return samples, runs


epochs = st.integers(0, 9)
shards = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=40), min_size=1, max_size=5)


@settings(max_examples=200, deadline=None)
@given(shards, st.integers(1, 12), st.integers(1, 6), st.sampled_from(["drop", "pad"]), st.integers(0, 9))
def test_every_sample_once_and_runs_are_of_one_lane_and_block(sizes, share, lanes, last, epoch):
    index, batch = index_of(sizes), share * lanes
    if last == "drop" and batch > len(index):
        return
    samples, runs = block_order(grid(index, 100), batch, last, lanes, 7, epoch)
    steps = num_steps(len(index), batch, last)
    assert len(samples) == len(runs) == (steps * batch if last == "drop" else len(index))
    assert len(set(samples.tolist())) == len(samples) and set(samples.tolist()) <= set(range(len(index)))
    lane = np.arange(len(samples)) % batch // share
    for run in np.unique(runs):
        mine = runs == run
        assert len(set(lane[mine])) == 1
        records = index[samples[mine]]
        assert len(set(zip(records["shard"], records["offset"] // 100, strict=True))) == 1
        inside = np.sort(samples[mine])
        assert (np.diff(inside) == 1).all()  # neighbours in the file, so reading it takes no byte of another run


@settings(max_examples=200, deadline=None)
@given(shards, st.integers(1, 12), st.integers(1, 40), st.sampled_from(["drop", "pad"]), epochs, st.booleans())
def test_the_order_is_that_of_sorting_all_samples(sizes, share, lanes, last, epoch, mixed_up):
    index, batch = index_of(sizes), share * lanes
    if last == "drop" and batch > len(index):
        return
    if mixed_up:  # an index that is not in the order of the files
        index = index[permutation(len(index), 1, 0)]
    arguments = grid(index, 100), batch, last, lanes, 7, epoch
    samples, runs = sorted_order(*arguments)
    order = BlockOrder(*arguments)
    assert len(order) == len(samples)
    for first in range(0, len(samples), share):
        positions = np.arange(first, min(first + share, len(samples)))
        for found, expected in zip(order.at(positions), (samples[positions], runs[positions]), strict=True):
            np.testing.assert_array_equal(found, expected)
    steps = np.empty(len(index), np.int64)
    steps[samples] = np.arange(len(samples)) // batch
    for run in np.unique(runs):
        assert sorted(order.samples_of(run)) == sorted(samples[runs == run])
        np.testing.assert_array_equal(order.steps_of(run), steps[order.samples_of(run)])


@settings(max_examples=200, deadline=None)
@given(shards, st.integers(1, 8), st.integers(1, 6), st.integers(1, 8), st.sampled_from(["drop", "pad"]), st.data())
def test_a_rank_is_told_the_runs_that_it_needs(sizes, share, lanes, ranks, last, data):
    """Also ranks that share a lane, as after a resume on another number of ranks."""
    index, batch = index_of(sizes), share * lanes
    if batch % ranks or (last == "drop" and batch > len(index)):
        return
    order = BlockOrder(grid(index, 100), batch, last, lanes, 7, 0)
    _, runs = order.at(np.arange(len(order)))
    total = num_steps(len(index), batch, last)
    steps = range(data.draw(st.integers(0, total)), total)
    step, rank = np.divmod(np.arange(len(order)), batch)
    for number in range(ranks):
        needs = order.needs(number, ranks, steps)
        mine = (rank // (batch // ranks) == number) & (step >= steps.start)
        assert set(runs[mine]) <= set(needs.runs) and len(set(needs.runs)) == len(needs.runs)
        assert (np.diff(needs.first) >= 0).all()
        for run, first, last_step in zip(*needs, strict=True):
            of_run = step[mine & (runs == run)]
            assert not len(of_run) or first <= of_run.min() <= of_run.max() <= last_step
        if lanes % ranks == 0:  # whole lanes, from the beginning: nothing that others read, too
            needed = order.needs(number, ranks, range(total)).runs
            assert set(needed) == set(runs[rank // (batch // ranks) == number])


def test_an_order_costs_no_memory_for_each_sample():
    """100 M samples would else take 8 GB: here 4 M in 800 blocks, of which 64 are asked for."""
    index = np.zeros(4_000_000, RECORD)
    index["offset"], index["size"] = np.arange(len(index)) * 1000, 1000
    blocks = grid(index, 5_000_000)
    assert longest(index, blocks) == 5_000_000
    tracemalloc.start()
    try:
        order = BlockOrder(blocks, 64, "drop", 32, 0, 0)
        order.at(np.arange(64))
        assert tracemalloc.get_traced_memory()[1] < len(index)
    finally:
        tracemalloc.stop()


def test_no_block_is_read_twice_by_ranks_of_whole_lanes():
    index = index_of([[10] * 1000] * 3)
    for ranks in (1, 2, 4, 8, 32):
        lanes = num_lanes(64, ranks)
        samples, runs = block_order(grid(index, 100), 64, "drop", lanes, 0, 0)
        rank = np.arange(len(samples)) % 64 // (64 // ranks)
        assert sum(len(np.unique(runs[rank == r])) for r in range(ranks)) == len(np.unique(runs))


def test_lanes():
    assert [num_lanes(256, ranks) for ranks in (1, 2, 4, 32, 64, 256)] == [32, 32, 32, 32, 64, 256]
    assert num_lanes(768, 3) == 48 and num_lanes(7, 7) == 7 and num_lanes(5, 1) == 5 and num_lanes(101, 1) == 101


def test_epochs_differ_and_repeat():
    blocks = grid(index_of([[10] * 500] * 4), 100)
    one, two, again = (block_order(blocks, 40, "drop", 8, 3, epoch)[0] for epoch in (0, 1, 0))
    assert (one == again).all() and (one != two).mean() > 0.9


def test_shuffle_quality_tells_orders_apart():
    index = index_of([[1000] * 5000] * 8)
    by_class = np.arange(len(index)) // 400
    packed = by_class[permutation(len(index), 1, 0)]  # pack shuffles
    orders = {
        "files": np.arange(len(index)),
        "full": permutation(len(index), 0, 0),
        "blocks": block_order(grid(index, 100_000), 256, "drop", 32, 0, 0)[0],
    }
    found = {name: shuffle_quality(order, packed[order]) for name, order in orders.items()}
    assert found["files"]["displacement"] == 0 and found["files"]["neighbours"] == 1
    assert found["full"]["neighbours"] == pytest.approx(2 / len(index), abs=3e-4)
    for name in ("full", "blocks"):
        assert found[name]["displacement"] == pytest.approx(1, abs=0.05)
        assert found[name]["label_runs"] == pytest.approx(1, abs=0.02)
    # Were the data not shuffled when they were packed, the figures would say so.
    unshuffled = {name: shuffle_quality(order, by_class[order])["label_runs"] for name, order in orders.items()}
    assert unshuffled["files"] < 0.01 < unshuffled["blocks"] < 0.3 and unshuffled["full"] == pytest.approx(1, abs=0.02)


class Counted:
    """What was read of each shard, past the loaders."""

    def __init__(self, monkeypatch):
        self.bytes: dict[tuple[str, int], int] = {}
        self.calls = 0
        read = ShardReader.read

        def counted(reader, shard, offset, size, into=None):
            self.calls += 1
            for place in range(offset, offset + size):
                key = reader._paths[shard].name, place
                self.bytes[key] = self.bytes.get(key, 0) + 1
            return read(reader, shard, offset, size, into)

        monkeypatch.setattr(ShardReader, "read", counted)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_loader_reads_every_byte_once(packed_folders, monkeypatch, ranks):
    counted, seen = Counted(monkeypatch), []
    for rank in range(ranks):
        place = {"rank": rank, "world_size": ranks}
        with open_loader(
            packed_folders["tar"] / "train", 12 // ranks, size=16, order="blocks", last="pad", **place
        ) as loader:
            seen += [sample for batch in loader for sample in batch.samples[batch.valid].tolist()]
            index = loader.source.data_set.index
    assert sorted(seen) == list(range(61))
    assert set(counted.bytes.values()) == {1}
    assert len(counted.bytes) >= index["size"].sum() and counted.calls < 61


@pytest.mark.parametrize("format", ["tar", "hdf5", "lmdb"])
def test_ranks_together_give_the_same_global_batches(packed_folders, format):
    """One epoch on 1, then 2, 3 and 4 ranks, against one that was not interrupted."""
    folder = packed_folders[format] / "train"

    def collected(loader, count):
        steps = []
        for batch in loader:
            steps.append([getattr(batch, name).numpy().copy() for name in ("images", "labels", "samples")])
            if len(steps) == count:
                break
        return steps

    settings_ = {"size": 24, "order": "blocks", "seed": 5}
    with open_loader(folder, 12, **settings_) as loader:
        loader.set_epoch(3)
        whole = collected(loader, 5)
        loader.set_epoch(3)
        state, done = loader.state_dict(), []
    for ranks, count in ((1, 1), (2, 1), (3, 2), (4, 1)):
        parts = []
        for rank in range(ranks):
            with open_loader(folder, 12 // ranks, rank=rank, world_size=ranks, **settings_) as loader:
                loader.load_state_dict(state)
                parts.append(collected(loader, count))
                after = loader.state_dict()
        done += [[np.concatenate(parts_) for parts_ in zip(*step, strict=True)] for step in zip(*parts, strict=True)]
        state = after
    assert len(done) == len(whole) == 5
    for mine, wanted in zip(done, whole, strict=True):
        for a, b in zip(mine, wanted, strict=True):
            np.testing.assert_array_equal(a, b)


def test_room_is_made_for_the_longest_block(packed_folders):
    with open_loader(packed_folders["tar"] / "train", 12, size=16, order="blocks", block_mib=10**6) as loader:
        index = loader.source.data_set.index
        longest = max(
            int((part["offset"] + part["size"]).max() - part["offset"].min())
            for part in (index[index["shard"] == shard] for shard in set(index["shard"].tolist()))
        )
        assert longest <= loader.source._memory.take().nbytes <= longest + 3 * 4096
        assert sum(int(batch.valid.sum()) for batch in loader) == 60


def test_a_state_of_another_order_is_refused(packed_folders):
    folder = packed_folders["tar"] / "train"
    with open_loader(folder, 12, order="blocks") as loader, open_loader(folder, 12) as full:
        with pytest.raises(SettingError, match="order"):
            loader.load_state_dict(full.state_dict())
        with pytest.raises(SettingError, match="order"):
            full.load_state_dict(loader.state_dict())
