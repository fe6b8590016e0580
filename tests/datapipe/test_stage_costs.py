"""What staging costs, and which mode is the best: arithmetic; and the network interfaces that it depends on."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from datapipe.errors import SettingError
from datapipe.jobgroup.network import address_of, interface_addresses, link_speed
from datapipe.stage_costs import Situation, compare, describe_costs

GB = 10**9
FOUR = Situation(data_bytes=120 * GB, num_nodes=4, read_mb_per_s=1000, network_mb_per_s=1250, free_bytes=200 * GB)


@pytest.mark.parametrize(
    ("change", "mode", "copy_s", "exchange_s"),
    [
        ({}, "exchange", 480, 120),  # the filesystem is the limit
        ({"network_mb_per_s": 250}, "exchange", 480, 360),  # the network is
        ({"network_mb_per_s": 187.5}, "exchange", 480, 480),
        ({"network_mb_per_s": 125}, "copy", 480, 720),
        ({"network_mb_per_s": None}, "exchange", 480, 120),
        ({"num_nodes": 1}, "copy", 120, 120),
        ({"num_nodes": 1024}, "exchange", 122_880, 120),
        ({"free_bytes": 120 * GB}, "exchange", 480, 120),
        ({"free_bytes": 120 * GB - 1}, "slice", 480, 120),
        ({"free_bytes": 7 * GB}, "slice", 480, 120),
        ({"free_bytes": 6 * GB}, "none", 480, 120),
        ({"free_bytes": 6 * GB, "is_local": True}, "none", 480, 120),
        ({"is_local": True}, "none", 480, 120),
        ({"data_bytes": 0, "free_bytes": 0}, "exchange", 0, 0),
    ],
)
def test_which_mode_is_the_best(change, mode, copy_s, exchange_s):
    costs = compare(replace(FOUR, **change))
    assert costs.mode == mode and (costs.copy_s, costs.exchange_s) == pytest.approx((copy_s, exchange_s))


def test_bytes():
    costs = compare(FOUR)
    assert (costs.copy_bytes, costs.exchange_bytes, costs.network_bytes) == (480 * GB, 120 * GB, 90 * GB)
    assert (costs.one_node_s, costs.network_s) == (120, 72) and compare(replace(FOUR, num_nodes=1)).network_bytes == 0


def lines(**change: object) -> list[str]:
    situation = replace(FOUR, **change)
    return describe_costs({**asdict(situation), **asdict(compare(situation)), "local": "/local", "interface": "ib0"})


def test_what_it_says():
    assert lines() == [
        "mode: exchange, in which each byte leaves the shared filesystem once",
        "  120.0 GB at 1,000 MB/s, to one node: 120.0 s",
        "  copy: 480.0 GB to 4 nodes: 480.0 s, if the filesystem gives 1,000 MB/s to all together; 120.0 s, if to each",
        "  exchange: 120.0 GB, and 90.0 GB per node over the network (ib0) at 1,250 MB/s: 120.0 s",
        '  not staged, order="blocks": 120.0 GB in each epoch, at least 120.0 s',
    ]
    assert "over a network (ib0) whose speed is not known" in lines(network_mb_per_s=None)[3]
    assert (
        "since the network is slower" in lines(network_mb_per_s=125)[0] and "12 min" in lines(network_mb_per_s=125)[3]
    )
    assert lines(free_bytes=GB)[0] == "mode: none, 120.0 GB do not fit: /local has 1.0 GB free"
    sliced = lines(free_bytes=60 * GB)
    assert sliced[0] == "mode: slice, 120.0 GB do not fit: /local has 60.0 GB free"
    assert sliced[4] == "  slice: --capacity 54000MB, 45%; a node reads at most about 55% of its blocks again"
    assert lines(num_nodes=1)[0] == "mode: copy" and len(lines(num_nodes=1)) == 3
    assert len(lines(is_local=True)) == 1


def test_interfaces():
    assert interface_addresses()["lo"] == address_of("lo") == "127.0.0.1"
    with pytest.raises(SettingError, match=r"interface: 'eth99' is not on this host; allowed: .*lo \(127\.0\.0\.1\)"):
        address_of("eth99")
    assert link_speed("127.0.0.1") == ("lo", None)  # a link that has no speed
